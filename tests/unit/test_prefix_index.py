"""Nodes, matches proven by tokens, and the eviction queue."""

from __future__ import annotations

import pytest

from runtime_cache.cache.hashing import BlockKey
from runtime_cache.cache.prefix_index import PrefixIndex, PrefixNode
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockHash, BlockId
from tests.support.caching import chain_of

KEYS = chain_of(range(12)).keys


def index_of_three() -> tuple[PrefixIndex, list[PrefixNode]]:
    index = PrefixIndex()
    nodes: list[PrefixNode] = []
    for i, key in enumerate(KEYS):
        nodes.append(
            index.insert(key, BlockId(i + 1), nodes[-1] if nodes else None, now_s=float(i))
        )
    return index, nodes


def test_inserted_blocks_are_found_by_digest_and_block() -> None:
    index, nodes = index_of_three()
    assert len(index) == 3
    assert list(index) == nodes
    assert index.get(KEYS[1].digest) is nodes[1]
    assert index.node_of(BlockId(2)) is nodes[1]
    assert index.node_of(BlockId(4)) is None
    assert [node.num_blocks for node in nodes] == [1, 2, 3]
    assert [node.num_children for node in nodes] == [1, 1, 0]
    assert [node.last_used_s for node in nodes] == [0, 1, 2]


@pytest.mark.parametrize(("max_blocks", "blocks"), [(0, []), (1, [1]), (2, [1, 2]), (9, [1, 2, 3])])
def test_the_longest_match_is_limited(max_blocks: int, blocks: list[int]) -> None:
    index, _ = index_of_three()
    assert [node.block for node in index.longest_match(KEYS, max_blocks)] == blocks


def test_a_match_ends_at_the_first_difference() -> None:
    index, _ = index_of_three()
    other = chain_of([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11]).keys
    assert [node.block for node in index.longest_match(other, 3)] == [1]


def test_equal_digests_with_other_tokens_are_no_match() -> None:
    index, _ = index_of_three()
    forged = [BlockKey(KEYS[0].digest, b"\xff" * 16), *KEYS[1:]]
    assert index.longest_match(forged, 3) == []


def test_equal_digests_behind_another_parent_are_no_match() -> None:
    index, nodes = index_of_three()
    assert index.longest_match(KEYS[1:], 2) == []
    assert nodes[1].is_same(KEYS[1], nodes[0])
    assert not nodes[1].is_same(KEYS[1], None)


def test_eviction_takes_leaves_in_release_order() -> None:
    index, nodes = index_of_three()
    for node in reversed(nodes):
        index.park(node)
    assert [node.block for node in index.parked] == [3, 2, 1]
    assert index.evict_oldest() is nodes[2]
    assert nodes[1].num_children == 0
    assert index.get(KEYS[2].digest) is None
    assert index.node_of(BlockId(3)) is None
    assert [index.evict_oldest().block for _ in range(2)] == [2, 1]
    assert (len(index), index.num_parked) == (0, 0)
    with pytest.raises(InternalError, match="nothing to evict"):
        index.evict_oldest()


def test_a_held_node_leaves_the_queue_and_returns_at_its_end() -> None:
    index, nodes = index_of_three()
    for node in reversed(nodes):
        index.park(node)
    index.unpark(nodes[0])
    assert [node.block for node in index.parked] == [3, 2]
    assert not index.is_parked(BlockId(1))
    index.unpark(nodes[0])  # a second holder changes nothing
    index.park(nodes[0])
    assert [node.block for node in index.parked] == [3, 2, 1]


def test_a_parent_before_its_child_in_the_queue_is_our_bug() -> None:
    index, nodes = index_of_three()
    index.park(nodes[0])
    with pytest.raises(InternalError, match="block 1 would be evicted before its children"):
        index.evict_oldest()


def test_a_digest_or_block_is_indexed_once() -> None:
    index, nodes = index_of_three()
    with pytest.raises(InternalError, match="indexed already"):
        index.insert(KEYS[0], BlockId(9), None, now_s=0.0)
    with pytest.raises(InternalError, match="indexed already"):
        index.insert(BlockKey(BlockHash(b"x"), b""), BlockId(1), None, now_s=0.0)
    index.park(nodes[2])
    gone = index.evict_oldest()
    with pytest.raises(InternalError, match="parent of block 9 is not indexed"):
        index.insert(BlockKey(BlockHash(b"x"), b""), BlockId(9), gone, now_s=0.0)
    assert len(index) == 2
