"""The closest of many continuations, and beginnings of each other, without looking at all."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.cache import children as children_module
from runtime_cache.cache.children import Children
from runtime_cache.cache.hashing import common_tokens
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.ids import BlockHash, BlockId

Tokens = tuple[int, ...]


def pack(tokens: Iterable[int]) -> bytes:
    return np.array(tuple(tokens), dtype="<i4").tobytes()


def node(tokens: Tokens, block: int = 1) -> PrefixNode:
    return PrefixNode(BlockHash(b""), pack(tokens), BlockId(block), None, 0, 1, 0.0, 0.0)


def family(*all_tokens: Tokens) -> Children:
    children = Children()
    for tokens in all_tokens:
        children.add(node(tokens))
    return children


def unpack(found: PrefixNode | None) -> Tokens | None:
    return None if found is None else tuple(np.frombuffer(found.tokens, dtype="<i4").tolist())


def test_none_at_all() -> None:
    children = Children()
    assert (len(children), bool(children), list(children)) == (0, False, [])
    assert children.closest(pack((1, 2))) == (None, 0)
    assert children.covering(pack((1,))) is None
    assert children.covered(pack((1,))) is None


@pytest.mark.parametrize(
    ("tokens", "num_common"),
    [((), 0), ((9,), 0), ((1,), 1), ((1, 2, 9), 2), ((1, 2, 3), 3), ((1, 2, 3, 4), 3)],
)
def test_the_closest_of_one(tokens: Tokens, num_common: int) -> None:
    found, common = family((1, 2, 3)).closest(pack(tokens))
    assert common == num_common
    assert unpack(found) == ((1, 2, 3) if num_common else None)


@pytest.mark.parametrize(
    ("tokens", "closest", "num_common"),
    [
        ((5, 1), (5, 1, 1), 2),
        ((5, 1, 2), (5, 1, 1), 2),
        ((5, 2, 9), (5, 2), 2),
        ((5, 3), (5, 2), 1),
        ((6, 0), (6,), 1),
        ((7,), None, 0),
        ((), None, 0),
    ],
)
def test_the_closest_of_several(tokens: Tokens, closest: Tokens | None, num_common: int) -> None:
    found, common = family((5, 1, 1), (6,), (5, 2)).closest(pack(tokens))
    assert (unpack(found), common) == (closest, num_common)


def test_bytes_that_are_alike_are_not_tokens() -> None:
    # 0x0101 and 0x0201 share their lowest byte, which comes first.
    found, common = family((0x0101,), (0x0301,)).closest(pack((0x0201,)))
    assert (found, common) == (None, 0)


def test_the_closest_of_10_000_is_found_by_two_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[bytes] = []

    def counting(one: bytes, other: bytes) -> int:
        compared.append(one)
        return common_tokens(one, other)

    monkeypatch.setattr(children_module, "common_tokens", counting)
    # Seven tokens each, different at any of the first four.
    children = family(
        *((i // 1000, i // 100 % 10, i // 10 % 10, i % 10, 7, 7, 7) for i in range(10_000))
    )
    assert len(children) == 10_000
    for tokens, num_common in [
        ((3, 1, 4, 1, 7, 7, 7), 7),
        ((3, 1, 4, 1, 7, 7, 8), 6),
        ((3, 1, 4, 1), 4),
        ((3, 1, 4, 11), 3),
        ((9, 9, 10), 2),
        ((0, 99), 1),
        ((10, 0), 0),
    ]:
        compared.clear()
        found, common = children.closest(pack(tokens))
        assert common == num_common
        assert (unpack(found) or ())[:num_common] == tokens[:num_common]
        assert len(compared) <= 2


def test_a_node_that_begins_with_all_of_the_tokens_covers_them() -> None:
    children = family((5, 1, 1), (5, 2))
    assert unpack(children.covering(pack((5, 1)))) == (5, 1, 1)
    assert unpack(children.covering(pack((5, 2)))) == (5, 2)
    assert children.covering(pack((5, 2, 1))) is None
    assert children.covering(pack((5, 3))) is None
    assert children.covering(pack((4,))) is None


def test_a_node_that_is_a_beginning_of_the_tokens_is_covered() -> None:
    children = family((5, 1), (5, 2, 2))
    assert unpack(children.covered(pack((5, 1, 3)))) == (5, 1)
    assert children.covered(pack((5, 1))) is None
    assert children.covered(pack((5, 2))) is None
    assert children.covered(pack((4, 9))) is None
    assert unpack(family((5,)).covered(pack((5, 1)))) == (5,)


def test_a_sibling_that_goes_on_supersedes() -> None:
    children = Children()
    short, other = node((5, 1)), node((5, 3))
    children.add(short)
    assert children.superseding(short) is None
    children.add(other)
    assert children.superseding(short) is None
    children.add(long := node((5, 1, 0)))
    assert children.superseding(short) is long
    assert children.superseding(long) is None
    assert children.superseding(other) is None


def test_the_order_is_that_of_the_packed_tokens() -> None:
    children = family((2,), (1, 5), (1,), (1, 4))
    assert [unpack(child) for child in children] == [(1,), (1, 4), (1, 5), (2,)]


def test_nodes_come_and_go() -> None:
    one, other = node((1,)), node((2,))
    children = Children()
    children.add(one)
    assert list(children) == [one]
    children.remove(one)
    assert (len(children), bool(children)) == (0, False)
    for child in (other, one):
        children.add(child)
    children.remove(other)
    assert list(children) == [one]
    assert children.closest(pack((2,))) == (None, 0)
    children.remove(one)
    assert not children
    children.add(other)
    assert list(children) == [other]


runs = st.lists(st.integers(0, 1), max_size=4).map(tuple)


@given(st.sets(runs.filter(bool), max_size=12), runs)
def test_the_same_as_looking_at_all(all_tokens: set[Tokens], run: Tokens) -> None:
    children = family(*all_tokens)
    common = {
        tokens: next((i for i, (a, b) in enumerate(zip(tokens, run)) if a != b), None)  # noqa: B905
        for tokens in all_tokens
    }
    lengths = {
        tokens: min(len(tokens), len(run)) if place is None else place
        for tokens, place in common.items()
    }
    found, num_common = children.closest(pack(run))
    assert num_common == max(lengths.values(), default=0)
    assert (found is None) == (num_common == 0)
    assert found is None or lengths[unpack(found) or ()] == num_common
    covering: list[Tokens | None] = [t for t in all_tokens if t[: len(run)] == run]
    assert unpack(children.covering(pack(run))) in (covering or [None])
    for child in children:
        own = unpack(child) or ()
        longer: list[Tokens | None] = [t for t in all_tokens if t[: len(own)] == own != t]
        assert unpack(children.superseding(child)) in (longer or [None])
