"""What an operator sees and evicts: entries in order, by pages; eviction by number, digest, age."""

from __future__ import annotations

import pytest

from runtime_cache.cache import desk
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import CacheEntry
from runtime_cache.errors import InvalidRequest, UnknownEntry
from tests.support.caching import (
    MakeCache,
    admitted,
    chain_of,
    commit,
    computed,
    digests_of,
    entries,
    gauges,
    num_cached,
    parked_blocks,
    plan_aged,
    plan_idle,
    register,
    serve,
)


def digest_of(cache: CacheManager, tokens: range | list[int]) -> str:
    """Of the entry that ends with these tokens [hexadecimal]."""
    (digest,) = (
        node.digest.hex()
        for node in cache.index
        if node.num_tokens == len(tokens) == num_cached(cache, tokens)
        and b"".join(step.tokens for step in node.path) == packed(tokens)
    )
    return digest


def packed(tokens: range | list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def lengths(cache: CacheManager, limit: int | None = None, offset: int = 0) -> list[int]:
    return [entry.num_tokens for entry in entries(cache, limit, offset)[0]]


# -- entries ------------------------------------------------------------------------------------


def test_an_empty_cache_has_no_entries(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    assert entries(cache) == ([], 0)
    assert entries(cache, limit=5, offset=3) == ([], 0)


def test_entries_are_what_nothing_continues_and_what_is_kept(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    cache.now_s = 1.0
    keep = register(cache, "p", range(4))  # block 1
    assert keep is not None
    cache.now_s = 2.0
    serve(cache, range(10), priority=60)  # 1 <- 2 <- 3
    cache.now_s = 3.0
    serve(cache, range(20, 25))  # 4 <- 5
    found, total = entries(cache)
    assert total == 3
    assert found == [
        CacheEntry(
            digest_of(cache, range(20, 25)),
            num_tokens=5,
            num_blocks=2,
            num_requests=0,
            num_hits=0,
            created_s=3.0,
            last_used_s=3.0,
            priority=50,
        ),
        CacheEntry(
            digests_of(range(4))[0],
            num_tokens=4,
            num_blocks=1,
            num_requests=0,
            num_hits=1,
            created_s=1.0,
            last_used_s=2.0,
            priority=60,
            keep=keep,
        ),
        CacheEntry(
            digest_of(cache, range(10)),
            num_tokens=10,
            num_blocks=3,
            num_requests=0,
            num_hits=1,
            created_s=2.0,
            last_used_s=2.0,
            priority=60,
        ),
    ]


def test_keeps_that_end_in_one_block_are_entries_of_their_own(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(40, 44))
    cache.now_s = 1.0
    names = ("longest", "middle", "shortest")
    keeps = [register(cache, name, range(n)) for name, n in zip(names, (8, 7, 6), strict=True)]
    pinned = desk.pin(cache, digests_of(range(8))[1], None)
    expected = [*keeps, pinned, None]
    found, total = entries(cache)
    assert ([entry.keep for entry in found], total) == (expected, 5)
    assert {entry.num_requests for entry in found} == {0}
    assert [e.num_tokens for e in found] == [k.num_tokens if k else 4 for k in expected]
    for limit in range(1, 6):
        pages = [entries(cache, limit, offset) for offset in range(0, 5, limit)]
        assert [entry for page, _ in pages for entry in page] == found
        assert {total for _, total in pages} == {5}


def test_only_live_requests_use_an_entry(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    register(cache, "p", range(4))
    register(cache, "q", range(8))
    assert desk.pin(cache, digests_of(range(8))[1], None) is not None

    def used() -> dict[int, int]:
        found, total = entries(cache)
        assert total == 3
        return {entry.num_tokens: entry.num_requests for entry in found}

    assert used() == {4: 0, 8: 0}
    table = admitted(cache, [*range(8), 50])
    assert used() == {4: 1, 8: 1}
    reader = admitted(cache, [*range(6), 60])  # it copies from the second block
    assert used() == {4: 2, 8: 2}
    cache.copied(reader)
    assert used() == {4: 2, 8: 1}
    cache.release(table)
    cache.release(reader)
    assert used() == {4: 0, 8: 0}


@pytest.mark.parametrize(
    ("limit", "offset", "expected"),
    [
        (None, 0, [3, 2, 1, 5]),
        (None, 1, [2, 1, 5]),
        (0, 0, []),
        (1, 0, [3]),
        (2, 1, [2, 1]),
        (3, 1, [2, 1, 5]),
        (4, 0, [3, 2, 1, 5]),
        (5, 0, [3, 2, 1, 5]),
        (1, 3, [5]),
        (1, 4, []),
        (9, 9, []),
    ],
)
def test_entries_come_in_pages_last_used_first(
    make_cache: MakeCache, limit: int | None, offset: int, expected: list[int]
) -> None:
    cache = make_cache(12)
    for number, num_tokens in enumerate((5, 1, 2, 3)):
        cache.now_s = float(number)
        serve(cache, range(10 * number, 10 * number + num_tokens))
    assert lengths(cache, limit, offset) == expected
    assert entries(cache, limit, offset)[1] == 4


def test_a_registration_of_nothing_comes_last(make_cache: MakeCache) -> None:
    cache = make_cache(12, max_prefix_tokens=0)
    cache.now_s = 5.0
    keep = register(cache, "p", range(3))
    assert keep is not None
    assert (keep.num_tokens, keep.blocks, keep.digest) == (0, (), "")
    assert entries(cache) == ([CacheEntry("", 0, 0, 0, 0, 5.0, 5.0, 0, keep)], 1)
    assert entries(cache, limit=1, offset=1) == ([], 1)


def test_a_kept_block_that_has_more_tokens_now_is_listed_as_it_is(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    table = computed(cache, range(6), room=6)
    keep = desk.pin(cache, digest_of(cache, range(6)), None)
    assert keep is not None
    assert cache.reserve(table, 9)
    commit(cache, table, range(7))
    (entry,) = entries(cache)[0]
    # Six are kept, in a block that has seven by now.
    assert (entry.num_tokens, entry.digest) == (6, digest_of(cache, range(7)))
    assert (entry.keep, entry.num_requests) == (keep, 1)
    commit(cache, table, range(9))
    assert lengths(cache) == [6, 9]
    # It is given up by the digest that is listed, or by the one it was pinned by.
    with pytest.raises(UnknownEntry):
        desk.unpin(cache, digest_of(cache, range(9)))
    assert desk.unpin(cache, digests_of(range(8))[1][:12]) == keep
    assert lengths(cache) == [9]


# -- finding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_digits", [8, 63, 64])
def test_an_entry_is_found_by_the_beginning_of_its_digest(
    make_cache: MakeCache, num_digits: int
) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    first, second = digests_of(range(8))
    assert desk.find(cache, first[:num_digits]).block == 1
    assert desk.find(cache, second[:num_digits]).block == 2


def test_what_is_not_there_is_not_found(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    unknown = digests_of(range(50, 54))[0]
    for digest in (unknown, unknown[:8]):
        with pytest.raises(UnknownEntry, match=digest):
            desk.find(cache, digest)


def test_an_ambiguous_digest_names_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(40)
    # Some two of 17 digests begin with the same digit.
    for number in range(17):
        serve(cache, range(10 * number, 10 * number + 4))
    firsts = [node.digest.hex()[0] for node in cache.index]
    digit = max(firsts, key=firsts.count)
    expected = f"{firsts.count(digit)} digests begin with `{digit}`: give more of it"
    before = gauges(cache)
    for ask in (
        lambda: desk.find(cache, digit),
        lambda: desk.pin(cache, digit, None),
        lambda: desk.plan_entry(cache, digit).carry_out(cache),
    ):
        with pytest.raises(InvalidRequest, match=expected):
            ask()
    assert (gauges(cache), len(cache.keeps)) == (before, 0)


# -- evicting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_blocks", "evicted"), [(0, 0), (1, 1), (2, 2), (3, 2), (None, 2)])
def test_an_operator_evicts_what_nobody_holds(
    make_cache: MakeCache, max_blocks: int | None, evicted: int
) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    computed(cache, range(20, 24))
    assert desk.plan_blocks(cache, max_blocks).carry_out(cache) == (evicted, 1, 0)
    assert cache.num_evictable == 2 - evicted
    assert cache.counters.evicted_by["operator"] == evicted


def test_a_prefix_is_evicted_and_a_shared_beginning_stays(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    one, other = [*range(12)], [*range(4), *range(50, 58)]
    serve(cache, one)  # 1, 2, 3
    serve(cache, other)  # 1, 4, 5
    assert desk.plan_entry(cache, digest_of(cache, one)).carry_out(cache) == (2, 0, 0)
    assert (num_cached(cache, one), num_cached(cache, other)) == (4, 12)
    # What only led to the last one goes with it.
    assert desk.plan_entry(cache, digest_of(cache, other)).carry_out(cache) == (3, 0, 0)
    assert gauges(cache) == (0, 0, 11)


def test_all_that_goes_on_from_a_prefix_goes_with_it(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(12))
    serve(cache, [*range(8), 50, 51])
    serve(cache, [*range(8), 60])
    serve(cache, range(100, 104))
    first, second = digests_of(range(8))
    assert desk.plan_entry(cache, second).carry_out(cache) == (5, 0, 0)
    assert [num_cached(cache, range(12)), num_cached(cache, range(100, 104))] == [0, 4]
    with pytest.raises(UnknownEntry):
        desk.plan_entry(cache, first).carry_out(cache)


def test_of_a_prefix_what_is_held_stays(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(12))  # 1, 2, 3
    held = computed(cache, [*range(8), 60])  # 1, 2, 4
    assert desk.plan_entry(cache, digests_of(range(4))[0]).carry_out(cache) == (1, 3, 0)
    assert num_cached(cache, range(12)) == 8
    assert desk.plan_entry(cache, digest_of(cache, [*range(8), 60])).carry_out(cache) == (0, 3, 0)
    cache.release(held)
    assert parked_blocks(cache) == [4, 2, 1]
    assert desk.plan_entry(cache, digests_of(range(4))[0]).carry_out(cache) == (3, 0, 0)


def test_of_a_kept_prefix_all_blocks_are_in_use_however_it_is_asked(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(20))  # 1 to 5
    serve(cache, [*range(20), *range(50, 58)])  # 6, 7
    digest = digests_of(range(20))[4]
    assert desk.pin(cache, digest, None) is not None
    assert desk.plan_entry(cache, digest).carry_out(cache) == (2, 0, 5)
    assert (
        desk.plan_entry(cache, digest).carry_out(cache)
        == desk.plan_blocks(cache, None).carry_out(cache)
        == (0, 0, 5)
    )


@pytest.mark.parametrize(("idle_s", "evicted"), [(0.0, 5), (1.0, 5), (1.5, 3), (4.0, 3), (4.1, 0)])
def test_what_was_not_used_for_so_long_is_evicted(
    make_cache: MakeCache, idle_s: float, evicted: int
) -> None:
    cache = make_cache(12)
    serve(cache, range(12))  # at 0
    computed(cache, range(50, 54))
    cache.now_s = 3.0
    serve(cache, range(20, 28))
    cache.now_s = 4.0
    assert plan_idle(cache, idle_s).carry_out(cache) == (evicted, idle_s <= 4.0, 0)


def test_of_an_idle_prefix_the_beginning_that_is_in_use_stays(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(12))
    cache.now_s = 10.0
    serve(cache, [*range(4), *range(50, 54)])
    assert plan_idle(cache, 5.0).carry_out(cache) == (2, 0, 0)
    assert num_cached(cache, [*range(4), *range(50, 54)]) == 8


def test_an_idle_beginning_stays_while_something_goes_on_from_it(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    slow = admitted(cache, range(8))
    cache.commit(slow, chain_of(range(8)), 4)
    cache.now_s = 10.0
    commit(cache, slow, range(8))
    cache.release(slow)
    assert plan_idle(cache, 5.0).carry_out(cache) == (0, 0, 0)
    cache.now_s = 15.0
    assert plan_idle(cache, 5.0).carry_out(cache) == (2, 0, 0)


@pytest.mark.parametrize(("age_s", "evicted"), [(0.0, 5), (1.0, 5), (1.5, 3), (4.0, 3), (4.1, 0)])
def test_what_was_committed_so_long_ago_is_evicted_however_often_it_was_used(
    make_cache: MakeCache, age_s: float, evicted: int
) -> None:
    cache = make_cache(12)
    serve(cache, range(12))  # at 0
    cache.now_s = 3.0
    serve(cache, range(20, 28))
    cache.now_s = 4.0
    serve(cache, range(12))
    assert plan_aged(cache, age_s).carry_out(cache) == (evicted, 0, 0)


def test_old_blocks_that_stay_are_told_apart(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(8))  # 1, 2
    computed(cache, range(20, 25))  # 3, 4
    assert desk.pin(cache, digests_of(range(4))[0], None) is not None
    live = computed(cache, [*range(4), 50])  # 1, 5
    cache.now_s = 10.0
    computed(cache, range(60, 64))  # held, and not old
    assert plan_idle(cache, 5.0).result == (1, 4, 0)
    cache.release(live)
    assert plan_idle(cache, 5.0).result == (2, 2, 1)
    assert desk.plan_blocks(cache, None).result == (2, 3, 1)
    assert desk.plan_entry(cache, digests_of(range(4))[0]).result == (2, 0, 1)


def test_what_goes_next_of_several_caches(make_cache: MakeCache) -> None:
    one, other, empty = caches = [make_cache(16), make_cache(16), make_cache(4)]
    for cache, now_s, first, priority in (
        (one, 0.0, 0, 50),
        (other, 1.0, 20, 50),
        (one, 2.0, 40, 50),
        (other, 3.0, 60, 49),
    ):
        cache.now_s = now_s
        serve(cache, range(first, first + 8), priority=priority)
    computed(other, range(80, 88))
    shares = [desk.next_of_all(caches, number) for number in range(10)]
    assert [share[:2] for share in shares] == [
        [0, 0],
        *([0, 1], [0, 2]),  # the lowest priority first, however young
        *([1, 2], [2, 2]),
        *([2, 3], [2, 4]),
        *([3, 4], [4, 4]),
        [4, 4],
    ]
    assert {share[2] for share in shares} == {empty.num_evictable} == {0}
    assert desk.next_of_all([other], 3) == [3]


def test_no_more_than_so_many_of_what_is_old(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(12))
    assert plan_idle(cache, 0.0, max_blocks=0).result == (0, 0, 0)
    assert [node.num_tokens for node in plan_idle(cache, 0.0, max_blocks=2).nodes] == [12, 8]
