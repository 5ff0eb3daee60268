"""What is always true of the cache between two calls. Pure.

The tests run `check` after every step; it costs time proportional to the pool. The first thing
found wrong is raised as one sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import TOKEN_BYTES, next_digest
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockId


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
    """Each block is in exactly one place."""
    pool, index = manager.pool, manager.index
    free = Counter(pool.free_blocks)
    for block in map(BlockId, pool.blocks):
        places = free[block] + (pool.num_holds(block) > 0) + index.is_parked(block)
        _require(
            places == 1,
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
    index, parent, name = manager.index, node.parent, f"the node of block {node.block}"
    _require(node.is_indexed, f"{name} says that it is not indexed")
    _require(index.node_of(node.block) is node, f"{name} is not found by its block")
    _require(index.get(node.digest) is node, f"{name} is not found by its digest")
    before, num_blocks, num_tokens = manager.root, 1, len(node.tokens) // TOKEN_BYTES
    if parent is not None:
        _require(index.get(parent.digest) is parent, f"{name} has a lost parent")
        is_full = len(parent.tokens) == manager.block_size * TOKEN_BYTES
        _require(is_full, f"{name} continues a block that is not full")
        before = parent.digest
        num_blocks += parent.num_blocks
        num_tokens += parent.num_tokens
    _require(node.num_blocks == num_blocks, f"{name} is at the wrong depth {node.num_blocks}")
    _require(node.num_tokens == num_tokens, f"{name} has a wrong length {node.num_tokens}")
    digest = next_digest(before, node.tokens)
    _require(digest == node.digest, f"{name} has a digest that is not of its tokens")


def _check_children(manager: CacheManager) -> None:
    """Every node is found below its parent, and the leaves are counted right."""
    index = manager.index
    children: dict[int, list[PrefixNode]] = {}
    for node in index:
        children.setdefault(id(node.parent), []).append(node)
    for parent in (None, *index):
        listed = list(index.children_of(parent))
        below = sorted(children.get(id(parent), ()), key=lambda node: node.tokens)
        block = None if parent is None else parent.block
        _require(listed == below, f"the children of block {block} are not those behind it")
    num_leaves = sum(not node.children for node in index)
    _require(index.num_leaves == num_leaves, f"{index.num_leaves} leaves counted, {num_leaves} are")


def _check_queue(manager: CacheManager) -> None:
    """A child goes before its parent: the front of the queue can always be evicted."""
    index = manager.index
    place = {id(node): i for i, node in enumerate(index.parked)}
    _require(len(place) == len(index.parked), "the queue's length is wrong")
    for node in index:
        is_parked = id(node) in place
        _require(is_parked == (node.rank is not None), f"block {node.block} is in no queue")
        if is_parked:
            longer = index.children_of(node.parent).superseding(node)
            _require(longer is None, f"block {node.block} is only the beginning of a sibling")
        if node.parent is not None and id(node.parent) in place:
            _require(is_parked, f"block {node.block} is held, but not its parent")
            is_before = place[id(node)] < place[id(node.parent)]
            _require(is_before, f"block {node.block} goes after its parent {node.parent.block}")


def _check_owners(manager: CacheManager, tables: list[BlockTable]) -> None:
    """Every hold belongs to a request or a keep."""
    owned: Counter[BlockId] = Counter()
    for table in tables:
        owned.update(table.blocks)
        if table.copy is not None:
            owned[table.copy.source] += 1
    for keep in manager.keeps:
        owned.update(keep.blocks)
    for block in map(BlockId, manager.pool.blocks):
        holds = manager.pool.num_holds(block)
        _require(
            holds == owned[block],
            f"block {block} has {holds} holds, its owners have {owned[block]}",
        )
