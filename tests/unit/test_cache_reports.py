"""Why a prompt was not reused further: every reason, with exact numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime_cache.cache import desk
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.reports import EvictedDigests
from runtime_cache.cache.results import CacheReport
from runtime_cache.ids import BlockHash
from tests.support.caching import MakeCache, admitted, chain_of, commit, serve
from tests.unit.test_eviction import node


def report(cache: CacheManager, tokens: Sequence[int]) -> CacheReport:
    """Of a prompt whose last token is to be computed."""
    return cache.report(chain_of(tokens), len(tokens) - 1)


# -- all, nothing, too little -------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [2, 4, 5, 8, 9, 10])
def test_all_that_can_be_reused_is_a_hit(make_cache: MakeCache, num_tokens: int) -> None:
    cache = make_cache(8)
    serve(cache, range(10))
    assert report(cache, range(num_tokens)) == CacheReport(num_tokens - 1, "hit")


def test_nothing_begins_like_it(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    assert report(cache, range(5)) == CacheReport(0, "cold")
    serve(cache, range(5))
    assert report(cache, range(1, 6)) == CacheReport(0, "cold")


def test_of_one_token_nothing_can_be_reused(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    assert report(cache, [0]) == CacheReport(0, "too_short")
    serve(cache, range(5))
    assert report(cache, [0]) == CacheReport(0, "too_short")
    assert report(cache, [0, 1]) == CacheReport(1, "hit")


def test_the_cache_is_off(make_cache: MakeCache) -> None:
    cache = make_cache(8, is_enabled=False)
    off = CacheReport(0, "disabled", detail="the prefix cache is off (cache.enable)")
    assert [report(cache, range(n)) for n in (1, 9)] == [off, off]
    assert admitted(cache, range(9)).report == off


# -- it differs, or ends ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_common", "reason"),
    [
        (0, "cold"),
        (1, "diverged"),
        (3, "diverged"),
        (4, "diverged"),
        (5, "diverged"),
        (7, "diverged"),
        (8, "diverged"),
        (9, "diverged"),
        (10, "extended"),
    ],
)
def test_an_entry_goes_on_differently_or_ends(
    make_cache: MakeCache, num_common: int, reason: str
) -> None:
    cache = make_cache(8)
    serve(cache, range(10))
    expected = CacheReport(
        num_common,
        reason,  # type: ignore[arg-type]
        diverged_at=num_common or None,
        nearest_tokens=10 if num_common else None,
    )
    assert report(cache, [*range(num_common), 90, 91]) == expected


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8])
def test_an_entry_ends_at_the_edge_of_a_block(make_cache: MakeCache, num_tokens: int) -> None:
    cache = make_cache(8)
    serve(cache, range(num_tokens))
    longer = [*range(num_tokens), 90, 91]
    assert report(cache, longer) == CacheReport(num_tokens, "extended", num_tokens, num_tokens)
    assert report(cache, longer[:-1]) == CacheReport(num_tokens, "hit")


def test_the_nearest_entry_is_the_one_with_most_in_common(make_cache: MakeCache) -> None:
    cache = make_cache(20)
    serve(cache, range(20))
    serve(cache, [*range(6), 50, 51, 52])
    assert report(cache, [*range(6), 50, 60, 61]) == CacheReport(7, "diverged", 7, 9)
    assert report(cache, [*range(7), 60, 61]) == CacheReport(7, "diverged", 7, 20)


# -- it was there -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_left", "nearest"), [(12, 12), (8, 8), (4, 4), (0, None)])
def test_what_was_evicted_is_remembered_at_every_block(
    make_cache: MakeCache, num_left: int, nearest: int | None
) -> None:
    cache = make_cache(8)
    serve(cache, range(14))
    desk.plan_blocks(cache, 4 - num_left // 4).carry_out(cache)
    expected = CacheReport(num_left, "evicted", num_left or None, nearest)
    assert report(cache, range(14)) == expected
    table = admitted(cache, range(14))
    assert table.report == expected
    commit(cache, table, range(14))
    assert report(cache, range(14)) == CacheReport(13, "hit")


@pytest.mark.parametrize("num_tokens", [2, 3, 4])
def test_a_short_prompt_that_was_evicted_is_remembered(
    make_cache: MakeCache, num_tokens: int
) -> None:
    cache = make_cache(8)
    serve(cache, range(num_tokens))
    desk.plan_blocks(cache, None).carry_out(cache)
    assert report(cache, range(num_tokens)) == CacheReport(0, "evicted")
    assert report(cache, [*range(num_tokens - 1), 90]) == CacheReport(0, "cold")


def test_a_prompt_is_remembered_although_its_block_went_on(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = admitted(cache, range(6), room=4)
    commit(cache, table, range(6))  # the prompt
    commit(cache, table, range(7))  # and its answer
    commit(cache, table, range(8))
    cache.release(table)
    desk.plan_blocks(cache, None).carry_out(cache)
    assert report(cache, range(6)) == CacheReport(0, "evicted")
    serve(cache, range(4))
    assert report(cache, range(6)) == CacheReport(4, "evicted", 4, 4)
    assert report(cache, range(7)) == CacheReport(4, "evicted", 4, 4)
    assert report(cache, range(8)) == CacheReport(4, "evicted", 4, 4)
    assert report(cache, [*range(6), 90]) == CacheReport(4, "extended", 4, 4)


@pytest.mark.parametrize("is_longer_first", [False, True])
def test_a_prompt_is_remembered_although_a_longer_one_took_its_place(
    make_cache: MakeCache, is_longer_first: bool
) -> None:
    cache = make_cache(8)
    prompts = [range(8), range(6)] if is_longer_first else [range(6), range(8)]
    for prompt in prompts:
        serve(cache, prompt)
    desk.plan_blocks(cache, 1).carry_out(cache)
    assert report(cache, range(6)) == CacheReport(4, "evicted", 4, 4)


def test_that_it_was_evicted_beats_that_another_entry_is_near(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(12))  # 1, 2, 3
    serve(cache, [*range(10), 50])  # 1, 2, 4
    assert report(cache, [*range(11), 60, 61]) == CacheReport(11, "diverged", 11, 12)
    desk.plan_blocks(cache, 1).carry_out(cache)
    assert report(cache, range(13)) == CacheReport(10, "evicted", 10, 11)
    # Another prompt goes on differently in that block.
    assert report(cache, [*range(11), 60, 61]) == CacheReport(10, "diverged", 10, 11)


@pytest.mark.parametrize("num_served", [3, 6, 7])
def test_a_prompt_that_goes_on_from_an_evicted_end(make_cache: MakeCache, num_served: int) -> None:
    cache = make_cache(8)
    serve(cache, range(num_served))
    desk.plan_blocks(cache, 1).carry_out(cache)
    left = num_served // 4 * 4
    nearest = (left, left) if left else (None, None)
    assert report(cache, range(12)) == CacheReport(left, "evicted", *nearest)
    # One that goes on differently inside the block has lost nothing that it could have found.
    other = [*range(num_served - 1), 60, 61]
    reason = ("extended", left, left) if left else ("cold",)
    assert report(cache, other) == CacheReport(left, *reason)


def test_an_evicted_end_that_another_block_has_too(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, [1, 2])
    desk.plan_blocks(cache, 1).carry_out(cache)
    serve(cache, [1, 2, 50])
    assert report(cache, [1, 2, 60]) == CacheReport(2, "hit")
    assert report(cache, [1, 2, 60, 61]) == CacheReport(2, "diverged", 2, 3)


def test_what_was_given_up_for_other_reasons_was_not_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    cache.drop(admitted(cache, range(8)))
    assert report(cache, range(8)) == CacheReport(0, "cold")


def test_only_so_many_evictions_are_remembered() -> None:
    evicted = EvictedDigests(1, 4)

    def add(number: int) -> None:
        one = node(1)
        one.digest = BlockHash(number.to_bytes(4, "little"))
        evicted.add(one)

    for number in range(1024):
        add(number)
    assert len(evicted) == 1024
    add(0)  # evicted again: the last to be forgotten now
    add(1024)
    remembered = [BlockHash(n.to_bytes(4, "little")) in evicted for n in (0, 1, 2, 1024)]
    assert remembered == [True, False, True, True]
    assert len(evicted) == 1024
    assert EvictedDigests(5000, 4)._max_digests == 5000
    assert EvictedDigests(1 << 20, 4)._max_digests == 1 << 16


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (6, CacheReport(5, "hit")),
        (7, CacheReport(6, "hit")),
        (8, CacheReport(6, "limit")),
        (20, CacheReport(6, "limit")),
    ],
)
def test_behind_the_longest_prefix_nothing_is_reused(
    make_cache: MakeCache, num_tokens: int, expected: CacheReport
) -> None:
    cache = make_cache(8, max_prefix_tokens=6)
    serve(cache, range(20))
    assert report(cache, range(num_tokens)) == expected


def test_below_the_limit_the_reason_is_another(make_cache: MakeCache) -> None:
    cache = make_cache(8, max_prefix_tokens=6)
    assert report(cache, range(20)) == CacheReport(0, "cold")
    serve(cache, range(20))
    assert report(cache, [*range(5), *range(50, 60)]) == CacheReport(5, "diverged", 5, 6)
    desk.plan_blocks(cache, 1).carry_out(cache)
    assert report(cache, [*range(5), *range(50, 60)]) == CacheReport(4, "extended", 4, 4)


def test_no_prefix_may_be_reused_at_all(make_cache: MakeCache) -> None:
    cache = make_cache(8, max_prefix_tokens=0)
    serve(cache, range(9))
    assert report(cache, range(9)) == CacheReport(0, "limit")
    assert report(cache, [0]) == CacheReport(0, "too_short")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (range(8), CacheReport(0, "too_short")),  # the last token is computed: 7 could be reused
        (range(9), CacheReport(8, "hit")),
        (range(16), CacheReport(8, "hit")),
        (range(17), CacheReport(16, "hit")),
        ([*range(7), *range(50, 60)], CacheReport(0, "diverged", 7, 16)),
        ([*range(13), *range(50, 60)], CacheReport(8, "diverged", 13, 16)),
        ([*range(16), *range(50, 60)], CacheReport(16, "extended", 16, 16)),
        (range(50, 58), CacheReport(0, "too_short")),
        (range(50, 59), CacheReport(0, "cold")),
    ],
)
def test_on_a_grid(make_cache: MakeCache, tokens: Sequence[int], expected: CacheReport) -> None:
    cache = make_cache(12, grid_tokens=8)
    serve(cache, range(20))
    assert report(cache, tokens) == expected


# -- looking ------------------------------------------------------------------------------------


def test_the_report_of_an_admission_is_that_of_a_look_before(make_cache: MakeCache) -> None:
    cache = make_cache(16)
    serve(cache, range(10))
    for tokens in (range(10), [*range(6), 60, 61], [70, 71], [0]):
        before = cache.counters.copy()
        expected = report(cache, tokens)
        assert cache.counters == before
        table = admitted(cache, tokens)
        assert table.report == expected
        assert table.num_hit_tokens == expected.cached_tokens
        cache.release(table)


def test_a_registration_may_reuse_its_last_token_too(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(10))
    assert cache.report(chain_of(range(10)), 10) == CacheReport(10, "hit")
    assert cache.report(chain_of(range(11)), 11) == CacheReport(10, "extended", 10, 10)
