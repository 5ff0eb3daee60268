"""The free list in its exact order, and hold counts."""

from __future__ import annotations

import pytest

from runtime_cache.cache.block_pool import BlockPool
from runtime_cache.errors import InternalError
from runtime_cache.ids import NULL_BLOCK, BlockId


def test_a_new_pool_hands_out_from_one_upwards() -> None:
    pool = BlockPool(5)
    assert list(pool.free_blocks) == [1, 2, 3, 4]
    assert (pool.num_usable, pool.num_free, pool.num_live) == (4, 4, 0)
    assert pool.allocate(2) == [1, 2]
    assert list(pool.free_blocks) == [3, 4]
    assert (pool.num_free, pool.num_live) == (2, 2)


def test_all_blocks_can_be_taken_but_not_one_more() -> None:
    pool = BlockPool(4)
    with pytest.raises(InternalError, match="4 blocks asked, 3 free"):
        pool.allocate(4)
    assert pool.free_blocks == (1, 2, 3)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(0) == []
    with pytest.raises(InternalError):
        pool.allocate(1)


def test_freed_blocks_go_to_the_end_of_the_list() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    for block in (two, one):
        assert pool.release(block) == 0
        pool.free(block)
    assert pool.free_blocks == (3, 2, 1)


def test_holds_are_counted() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.hold(block)
    assert pool.num_holds(block) == 2
    assert pool.num_live == 1
    assert pool.release(block) == 1
    assert pool.num_live == 1
    assert pool.release(block) == 0
    assert pool.num_live == 0
    pool.hold(block)  # parked by an index meanwhile
    assert (pool.num_holds(block), pool.num_live) == (1, 1)


def test_a_release_too_many_is_our_bug() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(InternalError, match="block 1 is released without a hold"):
        pool.release(block)
    assert pool.num_live == 0


def test_a_held_block_cannot_be_freed() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(InternalError, match="block 1 with 1 holds cannot be freed"):
        pool.free(block)
    assert pool.free_blocks == (2,)


def test_the_null_block_is_never_held_or_freed() -> None:
    pool = BlockPool(3)
    with pytest.raises(InternalError):
        pool.hold(NULL_BLOCK)
    with pytest.raises(InternalError):
        pool.free(NULL_BLOCK)
    assert NULL_BLOCK not in pool.allocate(2)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_needs_a_usable_block(num_blocks: int) -> None:
    with pytest.raises(InternalError):
        BlockPool(num_blocks)
    assert BlockPool(2).allocate(1) == [BlockId(1)]
