"""What is always true of the cache between two calls. Pure.

The tests run `check` after every step; it costs time proportional to the pool. The first thing
found wrong is raised as one sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import next_digest
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.errors import InternalError
from runtime_cache.ids import NULL_BLOCK, BlockId


def check(manager: CacheManager, tables: Iterable[BlockTable] | None = None) -> None:
    """Check everything that must hold.

    Args:
        tables: the tables of all live requests, to check that every hold has an owner; None if
            they are not at hand.

    Raises:
        InternalError: something does not hold; the message says what.
    """
    _check_blocks(manager)
    _check_gauges(manager)
    for node in manager.index:
        _check_node(manager, node)
    _check_children(manager)
    _check_queue(manager)
    if tables is not None:
        _check_owners(manager, list(tables))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InternalError(sentence)


def _check_blocks(manager: CacheManager) -> None:
    """Each block is in exactly one place; the null block is in none."""
    pool, index = manager.pool, manager.index
    free = Counter(pool.free_blocks)
    for block in map(BlockId, range(pool.num_blocks)):
        places = free[block] + (pool.num_holds(block) > 0) + index.is_parked(block)
        expected = 0 if block == NULL_BLOCK else 1
        _require(
            places == expected,
            f"block {block} is in {places} places: free {free[block]} times, "
            f"{pool.num_holds(block)} holds, parked {index.is_parked(block)}",
        )
        if free[block]:
            _require(index.node_of(block) is None, f"free block {block} is indexed")


def _check_gauges(manager: CacheManager) -> None:
    total = manager.num_live + manager.num_evictable + manager.num_free
    _require(
        total == manager.num_usable,
        f"{manager.num_live} live + {manager.num_evictable} evictable + {manager.num_free} free "
        f"blocks are not {manager.num_usable}",
    )


def _check_node(manager: CacheManager, node: PrefixNode) -> None:
    """The node is where the index says, behind an indexed parent, under its true digest."""
    index, name = manager.index, f"the node of block {node.block}"
    _require(index.node_of(node.block) is node, f"{name} is not found by its block")
    _require(index.get(node.key.digest) is node, f"{name} is not found by its digest")
    before, depth = manager.root, 0
    if node.parent is not None:
        _require(index.get(node.parent.key.digest) is node.parent, f"{name} has a lost parent")
        before, depth = node.parent.key.digest, node.parent.num_blocks
    _require(node.num_blocks == depth + 1, f"{name} is at the wrong depth {node.num_blocks}")
    digest = next_digest(before, node.key.tokens)
    _require(digest == node.key.digest, f"{name} has a digest that is not of its tokens")


def _check_children(manager: CacheManager) -> None:
    children = Counter(id(node.parent) for node in manager.index if node.parent is not None)
    for node in manager.index:
        _require(
            node.num_children == children[id(node)],
            f"block {node.block} counts {node.num_children} children, has {children[id(node)]}",
        )


def _check_queue(manager: CacheManager) -> None:
    """A child stands before its parent: the front of the queue can always be evicted."""
    place = {id(node): i for i, node in enumerate(manager.index.parked)}
    for node in manager.index:
        if node.parent is None or id(node.parent) not in place:
            continue
        _require(
            id(node) in place,
            f"block {node.block} is held, but not its parent {node.parent.block}",
        )
        _require(
            place[id(node)] < place[id(node.parent)],
            f"block {node.block} stands behind its parent {node.parent.block} in the queue",
        )


def _check_owners(manager: CacheManager, tables: list[BlockTable]) -> None:
    """Every hold belongs to a request or a registration."""
    owned: Counter[BlockId] = Counter()
    for table in tables:
        owned.update(table.blocks)
    for registration in manager.registrations():
        owned.update(registration.blocks)
    for block in map(BlockId, range(manager.pool.num_blocks)):
        holds = manager.pool.num_holds(block)
        _require(
            holds == owned[block],
            f"block {block} has {holds} holds, its owners have {owned[block]}",
        )
