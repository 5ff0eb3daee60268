"""The checker of the cache's invariants finds each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime_cache.cache import invariants
from runtime_cache.cache.block_pool import BlockPool
from runtime_cache.cache.hashing import next_digest
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockHash, BlockId
from tests.support.caching import admitted, make_manager, serve


def node_of(cache: CacheManager, block: int) -> PrefixNode:
    node = cache.index.node_of(BlockId(block))
    assert node is not None
    return node


def _lose_a_block(cache: CacheManager) -> None:
    cache.pool.allocate(1)
    cache.pool.release(BlockId(4))


def _free_an_indexed_block(cache: CacheManager) -> None:
    cache.index.parked.unpark(node_of(cache, 3))
    cache.pool.free(BlockId(3))


def _free_a_block_twice(cache: CacheManager) -> None:
    cache.pool.free(BlockId(4))


def _turn_the_queue(cache: CacheManager) -> None:
    node = node_of(cache, 3)
    cache.index.parked.unpark(node)
    cache.index.parked.park(node)


def _hold_only_the_child(cache: CacheManager) -> None:
    cache.index.parked.unpark(node_of(cache, 3))
    cache.pool.hold(BlockId(3))


def _hold_a_parked_block(cache: CacheManager) -> None:
    cache.pool.hold(BlockId(3))


def _miscount_leaves(cache: CacheManager) -> None:
    cache.index.num_leaves = 2


def _lose_a_child(cache: CacheManager) -> None:
    cache.index.children_of(node_of(cache, 2)).remove(node_of(cache, 3))


def _change_the_tokens(cache: CacheManager) -> None:
    node_of(cache, 3).tokens = b"\0" * 8


def _change_the_length(cache: CacheManager) -> None:
    node_of(cache, 3).num_tokens = 11


def _change_the_depth(cache: CacheManager) -> None:
    node_of(cache, 3).num_blocks = 2


def _change_the_digest(cache: CacheManager) -> None:
    node_of(cache, 3).digest = BlockHash(b"x")


def _continue_a_block_that_is_not_full(cache: CacheManager) -> None:
    last = node_of(cache, 3)
    cache.pool.allocate(1)
    cache.index.insert(BlockHash(b"x"), b"\0" * 4, BlockId(4), last, 0.0)


def _leave_the_index(cache: CacheManager) -> None:
    node_of(cache, 3).is_indexed = False


def _another_pool(cache: CacheManager) -> None:
    cache.pool = BlockPool(range(1, 6))


def _hold_without_owner(cache: CacheManager) -> None:
    cache.pool.allocate(1)


def test_a_sound_cache_passes() -> None:
    cache = make_manager(6)
    serve(cache, range(10))
    table = admitted(cache, [*range(9), 50])
    assert table.copy is not None
    invariants.check(cache)
    invariants.check(cache, [table])
    with pytest.raises(InternalError, match="block 1 has 1 holds, its owners have 0"):
        invariants.check(cache, [])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_lose_a_block, "block 4 is in 0 places"),
        (_free_an_indexed_block, "free block 3 is indexed"),
        (_free_a_block_twice, "block 4 is in 2 places: free 2 times"),
        (_turn_the_queue, "block 3 goes after its parent 2"),
        (_hold_only_the_child, "block 3 is held, but not its parent"),
        (_hold_a_parked_block, "block 3 is in 2 places"),
        (_miscount_leaves, "2 leaves counted, 1 are"),
        (_lose_a_child, "the children of block 2 are not those behind it"),
        (_change_the_tokens, "block 3 has a digest that is not of its tokens"),
        (_change_the_length, "block 3 has a wrong length 11"),
        (_change_the_depth, "block 3 is at the wrong depth 2"),
        (_change_the_digest, "block 3 is not found by its digest"),
        (_continue_a_block_that_is_not_full, "block 4 continues a block that is not full"),
        (_leave_the_index, "block 3 says that it is not indexed"),
        (_another_pool, "block 1 is in 2 places"),
        (_hold_without_owner, "block 4 has 1 holds, its owners have 0"),
    ],
)
def test_the_checker_finds_damage(damage: Callable[[CacheManager], None], sentence: str) -> None:
    cache = make_manager(6)
    serve(cache, range(10))
    invariants.check(cache, [])
    damage(cache)
    with pytest.raises(InternalError, match=sentence):
        invariants.check(cache, [])


def test_the_checker_finds_a_parked_beginning_of_a_sibling() -> None:
    cache = make_manager(6)
    serve(cache, range(4))
    node = node_of(cache, 1)
    cache.pool.allocate(1)
    digest = next_digest(cache.root, node.tokens[:8])
    short = cache.index.insert(digest, node.tokens[:8], BlockId(2), None, 0.0)
    invariants.check(cache)  # it is held
    cache.pool.release(BlockId(2))
    cache.index.parked.park(short)
    with pytest.raises(InternalError, match="block 2 is only the beginning of a sibling"):
        invariants.check(cache)


def test_the_checker_finds_a_lost_parent() -> None:
    cache = make_manager(6)
    serve(cache, range(10))
    child, parent = node_of(cache, 3), node_of(cache, 2)
    cache.index.remove(child)
    cache.index.remove(parent)
    parent.is_indexed = True
    cache.pool.hold(BlockId(3))
    cache.index.insert(child.digest, child.tokens, BlockId(3), parent, 0.0)
    cache.pool.free(BlockId(2))
    with pytest.raises(InternalError, match="block 3 has a lost parent"):
        invariants.check(cache)
