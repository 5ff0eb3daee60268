"""Nodes, matches proven by tokens, growth, and leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime_cache.cache.hashing import next_digest
from runtime_cache.cache.prefix_index import PrefixIndex, PrefixNode
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockHash, BlockId
from tests.support.caching import ROOT, chain_of

CHAIN = chain_of(range(12))


def make_index() -> PrefixIndex:
    return PrefixIndex("lru", 20)


def insert(
    index: PrefixIndex, tokens: Sequence[int], block: int, parent: PrefixNode | None, now_s: float
) -> PrefixNode:
    """Index the last block of `tokens`, partly filled or not."""
    chain = chain_of(tokens)
    position = (len(tokens) - 1) // 4
    packed = chain.block(position)
    digest = next_digest(chain.digest_before(position), packed)
    return index.insert(digest, packed, BlockId(block), parent, now_s)


def index_of_three() -> tuple[PrefixIndex, list[PrefixNode]]:
    """Twelve tokens in blocks 1, 2 and 3."""
    index = make_index()
    nodes: list[PrefixNode] = []
    for i in range(3):
        parent = nodes[-1] if nodes else None
        nodes.append(insert(index, range(4 * i + 4), i + 1, parent, float(i)))
    return index, nodes


def blocks_of(nodes: Sequence[PrefixNode]) -> list[int]:
    return [int(node.block) for node in nodes]


def matched(index: PrefixIndex, tokens: Sequence[int], max_blocks: int = 9) -> list[int]:
    nodes: list[PrefixNode] = []
    index.extend_match(nodes, chain_of(tokens), max_blocks)
    return blocks_of(nodes)


def test_inserted_blocks_are_found_by_digest_and_block() -> None:
    index, nodes = index_of_three()
    assert len(index) == 3
    assert list(index) == nodes
    assert index.get(CHAIN.digests[1]) is nodes[1]
    assert index.get(ROOT) is None
    assert index.node_of(BlockId(2)) is nodes[1]
    assert index.node_of(BlockId(4)) is None
    assert [(n.num_blocks, n.num_tokens) for n in nodes] == [(1, 4), (2, 8), (3, 12)]
    assert [(n.num_children, n.longest_tokens) for n in nodes] == [(1, 12), (1, 12), (0, 12)]
    assert [(n.created_s, n.last_used_s) for n in nodes] == [(0, 0), (1, 1), (2, 2)]
    assert nodes[2].path == nodes
    assert list(index.children_of(None)) == nodes[:1]
    assert list(index.children_of(nodes[0])) == nodes[1:2]
    assert list(index.children_of(nodes[2])) == []


def test_leaves_are_counted() -> None:
    index, nodes = index_of_three()
    assert index.num_leaves == 1
    other = insert(index, [50, 51], 4, None, 3.0)
    assert index.num_leaves == 2
    twin = insert(index, [*range(8), 60], 5, nodes[1], 3.0)
    assert index.num_leaves == 3
    index.remove(twin)
    assert index.num_leaves == 2
    index.remove(nodes[2])
    assert index.num_leaves == 2  # the node before it is one now
    index.remove(other)
    assert index.num_leaves == 1
    index.remove(nodes[1])
    index.remove(nodes[0])
    assert (index.num_leaves, len(index), len(index.children_of(None))) == (0, 0, 0)


@pytest.mark.parametrize(("max_blocks", "blocks"), [(0, []), (1, [1]), (2, [1, 2]), (9, [1, 2, 3])])
def test_the_longest_match_is_limited(max_blocks: int, blocks: list[int]) -> None:
    index, _ = index_of_three()
    assert matched(index, range(12), max_blocks) == blocks


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(3, []), (4, [1]), (7, [1]), (8, [1, 2]), (11, [1, 2])]
)
def test_only_full_blocks_are_matched(num_tokens: int, blocks: list[int]) -> None:
    index, _ = index_of_three()
    assert matched(index, range(num_tokens)) == blocks


def test_a_match_ends_at_the_first_difference() -> None:
    index, _ = index_of_three()
    assert matched(index, [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11]) == [1]


def test_a_match_goes_on_where_it_was() -> None:
    index, nodes = index_of_three()
    match = nodes[:1]
    index.extend_match(match, CHAIN, 2)
    assert match == nodes[:2]
    index.extend_match(match, CHAIN, 1)
    assert match == nodes[:2]
    index.extend_match(match, CHAIN, 3)
    assert match == nodes


def test_a_partly_filled_block_is_no_match() -> None:
    index = make_index()
    node = insert(index, range(3), 1, None, 0.0)
    chain = chain_of(range(4))
    chain.digests[0] = node.digest
    match: list[PrefixNode] = []
    index.extend_match(match, chain, 1)
    assert match == []


def test_equal_digests_with_other_tokens_are_no_match() -> None:
    index, nodes = index_of_three()
    chain = chain_of(range(100, 112))
    chain.digests[0] = CHAIN.digests[0]
    match: list[PrefixNode] = []
    index.extend_match(match, chain, 3)
    assert match == []
    # Only the last block has the wrong tokens.
    chain = chain_of([*range(8), 8, 9, 10, 99])
    chain.digests[2] = CHAIN.digests[2]
    index.extend_match(match, chain, 3)
    assert match == nodes[:2]


def test_equal_digests_behind_another_parent_are_no_match() -> None:
    index, _ = index_of_three()
    chain = chain_of(range(4, 12))
    chain.digests[:] = CHAIN.digests[1:]
    match: list[PrefixNode] = []
    index.extend_match(match, chain, 2)
    assert match == []


def test_a_partly_filled_block_grows_and_is_known_by_all_its_tokens() -> None:
    index, nodes = index_of_three()
    node = insert(index, [*range(8), 50], 4, nodes[1], 3.0)
    short = node.digest
    assert (node.num_tokens, node.num_blocks, nodes[1].longest_tokens) == (9, 3, 12)
    grown = chain_of([*range(8), 50, 51, 52, 53])
    index.grow(node, grown.digests[2], grown.block(2))
    assert index.get(short) is None
    assert index.get(grown.digests[2]) is node
    assert (node.num_tokens, node.num_blocks, node.earlier) == (12, 3, (short,))
    assert index.num_leaves == 2
    assert index.children_of(nodes[1]).closest(grown.block(2)) == (node, 4)
    assert matched(index, [*range(8), 50, 51, 52, 53]) == [1, 2, 4]


def test_a_block_cannot_grow_into_something_else() -> None:
    index = make_index()
    node = insert(index, [1, 2], 1, None, 0.0)
    other = insert(index, [1, 3], 2, None, 0.0)
    with pytest.raises(InternalError, match="block 1 cannot grow"):
        index.grow(node, BlockHash(b"new"), other.tokens)
    with pytest.raises(InternalError, match="block 1 cannot grow"):
        index.grow(node, other.digest, node.tokens + other.tokens)
    assert index.get(node.digest) is node
    assert list(index.children_of(None)) == [node, other]


def test_a_block_takes_over_what_a_shorter_one_stood_for() -> None:
    index = make_index()
    short = insert(index, [1], 1, None, 5.0)
    short.priority, short.num_hits, short.earlier = 70, 3, (BlockHash(b"e"),)
    long = insert(index, [1, 2], 2, None, 4.0)
    long.num_hits = 1
    long.take_over(short)
    assert (long.priority, long.num_hits, long.last_used_s) == (70, 3, 5.0)
    assert long.earlier == (BlockHash(b"e"), short.digest)
    assert (long.num_tokens, long.created_s) == (2, 4.0)


def test_a_removed_block_is_gone() -> None:
    index, nodes = index_of_three()
    index.parked.park(nodes[2])
    assert index.is_parked(BlockId(3))
    index.remove(nodes[2])
    assert not nodes[2].is_indexed
    assert nodes[2].rank is None
    assert not index.is_parked(BlockId(3))
    assert index.get(nodes[2].digest) is None
    assert (index.node_of(BlockId(3)), len(index.parked)) == (None, 0)
    assert nodes[1].children is None
    again = insert(index, range(12), 7, nodes[1], 9.0)
    assert matched(index, range(12)) == [1, 2, 7]
    assert again is not nodes[2]


def test_a_parent_cannot_leave_before_its_children() -> None:
    index, nodes = index_of_three()
    with pytest.raises(InternalError, match="block 2 would leave the index before its children"):
        index.remove(nodes[1])
    assert matched(index, range(12)) == [1, 2, 3]


def test_a_digest_or_block_is_indexed_once() -> None:
    index, nodes = index_of_three()
    with pytest.raises(InternalError, match="block 9 or its digest is indexed already"):
        index.insert(CHAIN.digests[0], b"", BlockId(9), None, 0.0)
    with pytest.raises(InternalError, match="block 1 or its digest is indexed already"):
        index.insert(BlockHash(b"x"), b"", BlockId(1), None, 0.0)
    index.remove(nodes[2])
    with pytest.raises(InternalError, match="parent of block 9 is not indexed"):
        index.insert(BlockHash(b"x"), b"", BlockId(9), nodes[2], 0.0)
    assert (len(index), index.num_leaves) == (2, 1)
