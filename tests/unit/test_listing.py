"""The order and the choice of what an operator is listed; one prefix, block by block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.cache import desk, listing
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import BlockFacts, CacheEntry
from runtime_cache.errors import UnknownEntry, UnknownPrefix
from runtime_cache.ids import PrefixId, TenantName
from tests.support.caching import (
    MakeCache,
    computed,
    digests_of,
    entries,
    make_manager,
    register,
    serve,
)

SORTS = ("used", "age", "size", "hits", "tokens")


def filled(cache: CacheManager) -> CacheManager:
    """Prefixes of 9, 3 and 6 tokens; made at 1, 2, 3; what leads to the first used again at
    4 and 5, the second at 6."""
    for now_s, start, num_tokens in ((1.0, 0, 9), (2.0, 20, 3), (3.0, 40, 6)):
        cache.now_s = now_s
        serve(cache, range(start, start + num_tokens))
    for now_s in (4.0, 5.0):
        cache.now_s = now_s
        serve(cache, range(9))
    cache.now_s = 6.0
    serve(cache, range(20, 23))
    return cache


def lengths(cache: CacheManager, **query: Any) -> list[int]:
    return [entry.num_tokens for entry in entries(cache, **query)[0]]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("used", [3, 6, 9]),
        ("age", [9, 3, 6]),
        ("size", [9, 6, 3]),
        ("hits", [9, 3, 6]),
        ("tokens", [9, 6, 3]),
    ],
)
def test_orders(make_cache: MakeCache, sort: str, expected: list[int]) -> None:
    cache = filled(make_cache(16))
    assert lengths(cache, sort=sort) == expected
    assert lengths(cache, sort=sort, is_reversed=True) == expected[::-1]
    assert lengths(cache, sort=sort, limit=1, offset=1) == expected[1:2]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"created_until_s": 1.0}, [9]),
        ({"created_until_s": 0.9}, []),
        ({"used_until_s": 3.0}, [9, 6]),
        ({"used_until_s": 2.9}, [9]),
        ({"min_blocks": 1}, [9, 6, 3]),
        ({"min_blocks": 2}, [9, 6]),
        ({"min_blocks": 4}, []),
        ({"min_hits": 1}, [9, 3]),
        ({"min_hits": 2}, [9]),
        ({"max_hits": 0}, [6]),
        ({"max_hits": 1}, [6, 3]),
        ({"min_hits": 1, "max_hits": 1}, [3]),
        ({"min_hits": 2, "max_hits": 1}, []),
    ],
)
def test_filters(make_cache: MakeCache, query: dict[str, Any], expected: list[int]) -> None:
    cache = filled(make_cache(16))
    assert lengths(cache, sort="tokens", **query) == expected
    assert entries(cache, limit=1, **query)[1] == len(expected)


def test_what_is_kept_and_what_is_not(make_cache: MakeCache) -> None:
    cache = filled(make_cache(24))
    register(cache, "p", range(60, 64))
    register(cache, "q", range(40, 46))
    assert desk.pin(cache, digests_of(range(4))[0], None) is not None
    assert desk.pin(cache, digests_of(range(8))[1], 9.0) is not None

    def kept(*kinds: str) -> list[int]:
        return sorted(lengths(cache, kept=frozenset(kinds)))

    assert kept("registration") == [4, 6]
    assert kept("pin") == [4]
    assert kept("lease") == [8]
    assert kept("registration", "pin", "lease") == [4, 4, 6, 8]
    assert kept() == [3, 9]
    assert sorted(lengths(cache)) == [3, 4, 4, 6, 8, 9]


def test_a_registration_of_nothing_is_last_in_every_order(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(3))
    register(cache, "p", range(20, 24))
    (node,) = (node for node in cache.index if node.num_tokens == 4)
    cache.index.remove(node)  # as a failed step does
    for sort in SORTS:
        for is_reversed in (False, True):
            assert lengths(cache, sort=sort, is_reversed=is_reversed) == [3, 0]
    assert lengths(cache, min_blocks=1) == [3]
    cache.index.insert(node.digest, node.tokens, node.block, None, 0.0)


def test_tenants_are_listed_together(make_cache: MakeCache) -> None:
    caches = {TenantName("a"): make_cache(8), TenantName("b"): make_cache(8)}
    for number, cache in enumerate(caches.values()):
        serve(cache, range(4))
        cache.now_s = 1.0 + number
        serve(cache, range(20, 23 + number))
    found = listing.page(caches, EntryQuery(limit=3))
    assert [(tenant, entry.num_tokens) for tenant, entry in found.entries] == [
        ("b", 4),
        ("a", 3),
        ("a", 4),
    ]
    assert found.total == 4


@given(
    prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=12),
    sort=st.sampled_from(SORTS),
    is_reversed=st.booleans(),
    page=st.integers(1, 5),
)
def test_pages_are_parts_of_the_whole(
    prompts: list[tuple[int, int]], sort: Any, is_reversed: bool, page: int
) -> None:
    cache = make_manager(40)
    for now_s, (start, num_tokens) in enumerate(prompts):
        cache.now_s = float(now_s)
        serve(cache, range(20 * start, 20 * start + num_tokens))
    query: dict[str, Any] = {"sort": sort, "is_reversed": is_reversed}
    whole, total = entries(cache, **query)
    assert len(whole) == total
    parts = [entries(cache, page, offset, **query)[0] for offset in range(0, total, page)]
    assert [entry for part in parts for entry in part] == whole
    assert sorted(entries(cache)[0], key=repr) == sorted(whole, key=repr)


# -- one prefix ---------------------------------------------------------------------------------


def test_a_prefix_block_by_block(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(9))
    cache.now_s = 2.0
    table = computed(cache, [*range(8), 50])
    assert desk.pin(cache, digests_of(range(4))[0], None) is not None
    first, second = digests_of(range(8))
    shown = desk.show(cache, second[:8])
    assert shown.entry == CacheEntry(second, 8, 2, 1, 1, 0.0, 2.0, 50)
    assert shown.blocks == (
        BlockFacts(first, 4, 1, 2.0, num_requests=1, is_kept=True),
        BlockFacts(second, 4, 1, 2.0, num_requests=1, is_kept=False),
    )
    assert shown.num_continued_by == 2
    assert shown.tokens == b"".join(n.to_bytes(4, "little") for n in range(8))
    cache.release(table)
    assert [block.num_requests for block in desk.show(cache, second).blocks] == [0, 0]
    assert desk.show(cache, first).entry.keep is not None


def test_a_registered_prefix_is_shown_by_its_name(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    keep = register(cache, "p", range(6))
    shown = desk.show_registered(cache, PrefixId("p"))
    assert (shown.entry.keep, shown.entry.num_tokens, len(shown.blocks)) == (keep, 6, 2)
    with pytest.raises(UnknownPrefix, match="no prefix `q` is registered"):
        desk.show_registered(cache, PrefixId("q"))


def test_nothing_of_a_registration_can_be_shown(make_cache: MakeCache) -> None:
    cache = make_cache(16, max_prefix_tokens=0)
    register(cache, "p", range(6))
    with pytest.raises(UnknownEntry, match="nothing of `p` is kept"):
        desk.show_registered(cache, PrefixId("p"))
