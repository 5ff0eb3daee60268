"""The free list in its exact order, and hold counts."""

from __future__ import annotations

import pytest

from runtime_cache.cache.block_pool import BlockPool
from runtime_cache.errors import InternalError
from runtime_cache.ids import NULL_BLOCK, BlockId


def test_a_new_pool_hands_out_its_first_block_first() -> None:
    pool = BlockPool(range(3, 7))
    assert pool.blocks == range(3, 7)
    assert list(pool.free_blocks) == [3, 4, 5, 6]
    assert (pool.num_usable, pool.num_free, pool.num_live) == (4, 4, 0)
    assert pool.allocate(2) == [3, 4]
    assert list(pool.free_blocks) == [5, 6]
    assert (pool.num_usable, pool.num_free, pool.num_live) == (4, 2, 2)


def test_all_blocks_can_be_taken_but_not_one_more() -> None:
    pool = BlockPool(range(1, 4))
    with pytest.raises(InternalError, match="4 blocks asked, 3 free"):
        pool.allocate(4)
    assert pool.free_blocks == (1, 2, 3)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(0) == []
    with pytest.raises(InternalError, match="1 blocks asked, 0 free"):
        pool.allocate(1)


def test_freed_blocks_go_to_the_end_of_the_list() -> None:
    pool = BlockPool(range(1, 4))
    one, two = pool.allocate(2)
    for block in (two, one):
        assert pool.release(block) == 0
        pool.free(block)
    assert pool.free_blocks == (3, 2, 1)


def test_holds_are_counted() -> None:
    pool = BlockPool(range(1, 3))
    (block,) = pool.allocate(1)
    pool.hold(block)
    assert (pool.num_holds(block), pool.num_live) == (2, 1)
    assert pool.release(block) == 1
    assert pool.num_live == 1
    assert pool.release(block) == 0
    assert pool.num_live == 0
    pool.hold(block)  # parked by an index meanwhile
    assert (pool.num_holds(block), pool.num_live) == (1, 1)


def test_a_release_too_many_is_our_bug() -> None:
    pool = BlockPool(range(1, 3))
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(InternalError, match="block 1 is released without a hold"):
        pool.release(block)
    assert pool.num_live == 0


def test_a_held_block_cannot_be_freed() -> None:
    pool = BlockPool(range(1, 3))
    (block,) = pool.allocate(1)
    with pytest.raises(InternalError, match="block 1 is held or not of this pool"):
        pool.free(block)
    assert pool.free_blocks == (2,)


@pytest.mark.parametrize("block", [NULL_BLOCK, BlockId(2), BlockId(6)])
def test_a_block_of_another_range_is_never_held_or_freed(block: BlockId) -> None:
    pool = BlockPool(range(3, 6))
    with pytest.raises(InternalError):
        pool.hold(block)
    with pytest.raises(InternalError):
        pool.free(block)
    assert (pool.free_blocks, pool.num_live) == ((3, 4, 5), 0)


@pytest.mark.parametrize("blocks", [range(1, 1), range(0, 4), range(-1, 4), range(1, 9, 2)])
def test_a_pool_is_a_range_behind_the_null_block(blocks: range) -> None:
    with pytest.raises(InternalError, match="is no range of blocks behind the null block"):
        BlockPool(blocks)
    assert BlockPool(range(1, 2)).allocate(1) == [BlockId(1)]
