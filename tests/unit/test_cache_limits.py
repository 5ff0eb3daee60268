"""The operator's settings, each at its edge: watermarks, lengths, numbers, the grid, on and off."""

from __future__ import annotations

import pytest

from runtime_cache.cache import desk, invariants
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy
from tests.support.caching import (
    MakeCache,
    admit,
    admitted,
    chain_of,
    commit,
    computed,
    free_blocks,
    gauges,
    num_cached,
    parked_blocks,
    register,
    serve,
)

# -- watermarks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "num_free", "num_parked"),
    [
        (2, 0, 2, 3),  # two are free: enough
        (3, 0, 3, 2),
        (3, 3, 3, 2),
        (3, 4, 4, 1),
        (2, 5, 2, 3),  # high alone does nothing
        (5, 5, 5, 0),
    ],
)
def test_below_the_low_watermark_is_evicted_up_to_the_high_one(
    make_cache: MakeCache, low: int, high: int, num_free: int, num_parked: int
) -> None:
    cache = make_cache(6, low_watermark_blocks=low, high_watermark_blocks=high)
    serve(cache, range(12))
    assert (cache.num_free, cache.num_evictable) == (num_free, num_parked)
    assert cache.counters.evicted_by["watermark"] == 3 - num_parked


def test_the_watermark_evicts_as_soon_as_blocks_are_taken(make_cache: MakeCache) -> None:
    cache = make_cache(8, low_watermark_blocks=2, high_watermark_blocks=3)
    serve(cache, range(12))  # 1, 2, 3 of seven
    table = admitted(cache, range(50, 58))
    assert gauges(cache) == (2, 3, 2)
    assert cache.reserve(table, 8)
    other = admitted(cache, range(60, 64))
    assert (gauges(cache), parked_blocks(cache)) == ((3, 1, 3), [1])
    invariants.check(cache, [table, other])


def test_live_requests_may_use_the_reserve(make_cache: MakeCache) -> None:
    cache = make_cache(6, low_watermark_blocks=4)
    table = admitted(cache, range(20))
    assert gauges(cache) == (5, 0, 0)
    commit(cache, table, range(20))
    cache.release(table)
    assert (gauges(cache), parked_blocks(cache)) == ((0, 1, 4), [1])


# -- max_prefix_length --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_prefix", "num_tokens", "num_kept", "blocks"),
    [
        (0, 9, 0, []),
        (1, 9, 1, [1]),
        (6, 5, 5, [2, 1]),
        (6, 6, 6, [2, 1]),
        (6, 7, 6, [2, 1]),
        (6, 12, 6, [2, 1]),
        (8, 7, 7, [2, 1]),
        (8, 8, 8, [2, 1]),
        (8, 9, 8, [2, 1]),
    ],
)
def test_only_the_beginning_of_a_prompt_is_kept(
    make_cache: MakeCache, max_prefix: int, num_tokens: int, num_kept: int, blocks: list[int]
) -> None:
    cache = make_cache(8, max_prefix_tokens=max_prefix)
    serve(cache, range(num_tokens))
    assert num_cached(cache, range(num_tokens)) == num_kept
    assert (parked_blocks(cache), gauges(cache)) == (
        blocks,
        (0, len(blocks), 7 - len(blocks)),
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_hit", "reason"), [(6, 5, "hit"), (7, 6, "hit"), (8, 6, "limit")]
)
def test_only_the_beginning_of_a_prompt_is_looked_for(
    make_cache: MakeCache, num_tokens: int, num_hit: int, reason: str
) -> None:
    cache = make_cache(8, max_prefix_tokens=6)
    serve(cache, range(12))
    table = admitted(cache, range(num_tokens))
    assert (table.num_hit_tokens, table.copy) == (num_hit, (2, num_hit - 4))
    assert table.report is not None
    assert table.report.reason == reason


def test_a_block_behind_the_limit_goes_on_being_written(make_cache: MakeCache) -> None:
    cache = make_cache(8, max_prefix_tokens=6)
    table = admitted(cache, range(7), room=9)
    for num_tokens in range(7, 15):
        assert cache.reserve(table, num_tokens + 1)
        cache.commit(table, chain_of(range(num_tokens)), num_tokens, is_tail=True)
        assert (table.num_committed, num_cached(cache, range(12))) == (1, 6)
    assert len(cache.index) == 2
    invariants.check(cache, [table])


# -- max_cached_prefixes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_leaves", "left"), [(None, [1, 1, 1]), (3, [1, 1, 1]), (2, [0, 1, 1]), (1, [0, 0, 1])]
)
def test_the_oldest_prefixes_beyond_the_number_go_as_a_whole(
    make_cache: MakeCache, max_leaves: int | None, left: list[int]
) -> None:
    cache = make_cache(12, max_leaves=max_leaves)
    prompts = [range(start, start + 10) for start in (0, 20, 40)]
    for prompt in prompts:
        serve(cache, prompt)
    assert [num_cached(cache, prompt) for prompt in prompts] == [10 * n for n in left]
    assert cache.counters.evicted_by["max_cached_prefixes"] == 3 * left.count(0)


def test_a_prefix_that_goes_on_is_one_and_branches_are_several(make_cache: MakeCache) -> None:
    cache = make_cache(12, max_leaves=2)
    serve(cache, range(8))
    serve(cache, range(12))  # goes on
    serve(cache, [*range(8), 50])  # branches
    assert (cache.index.num_leaves, cache.counters.evicted_blocks) == (2, 0)
    serve(cache, [*range(8), 60])
    assert cache.index.num_leaves == 2
    assert num_cached(cache, range(12)) == 8


def test_a_held_prefix_is_counted_and_another_one_goes(make_cache: MakeCache) -> None:
    cache = make_cache(12, max_leaves=2)
    held = computed(cache, range(4))
    serve(cache, range(20, 24))
    serve(cache, range(30, 34))
    assert [num_cached(cache, range(s, s + 4)) for s in (0, 20, 30)] == [4, 0, 4]
    invariants.check(cache, [held])


def test_held_prefixes_may_be_more_until_they_are_given_back(make_cache: MakeCache) -> None:
    cache = make_cache(12, max_leaves=2)
    tables = [computed(cache, range(start, start + 4)) for start in (0, 20, 40)]
    assert cache.index.num_leaves == 3
    cache.release(tables[1])
    assert cache.index.num_leaves == 2
    assert [num_cached(cache, range(s, s + 4)) for s in (0, 20, 40)] == [4, 0, 4]
    cache.release(tables[0])
    cache.release(tables[2])
    assert (cache.index.num_leaves, parked_blocks(cache)) == (2, [1, 3])


def test_what_was_held_only_to_be_copied_goes_when_it_is_copied(make_cache: MakeCache) -> None:
    cache = make_cache(12, max_leaves=1)
    serve(cache, range(6))
    reader = admitted(cache, [*range(6), 50])
    other = computed(cache, range(20, 24))
    assert (cache.index.num_leaves, cache.num_evictable) == (2, 0)
    cache.copied(reader)
    assert (cache.index.num_leaves, num_cached(cache, range(6))) == (2, 4)  # of held ones
    invariants.check(cache, [reader, other])


def test_no_prefix_at_all(make_cache: MakeCache) -> None:
    cache = make_cache(6, max_leaves=0)
    serve(cache, range(9))
    assert gauges(cache) == (0, 0, 5)


# -- the grid of deterministic mode -------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "num_kept"), [(1, 14), (3, 12), (4, 12), (5, 10), (6, 12), (8, 8), (15, 0)]
)
def test_prefixes_are_kept_in_multiples_of_the_grid(
    make_cache: MakeCache, grid: int, num_kept: int
) -> None:
    cache = make_cache(8, grid_tokens=grid)
    serve(cache, range(14))
    assert num_cached(cache, range(14)) == num_kept
    assert cache.num_evictable == -(-num_kept // 4)


@pytest.mark.parametrize(
    ("grid", "num_common", "num_hit", "copy"),
    [
        (3, 2, 0, None),
        (3, 3, 3, (1, 3)),
        (3, 5, 3, (1, 3)),
        (3, 6, 6, (2, 2)),
        (3, 11, 9, (3, 1)),
        (3, 12, 12, None),
        (6, 5, 0, None),
        (6, 6, 6, (2, 2)),
        (6, 12, 12, None),
        (8, 7, 0, None),
        (8, 8, 8, None),
        (8, 15, 8, None),
    ],
)
def test_prefixes_are_reused_in_multiples_of_the_grid(
    make_cache: MakeCache,
    grid: int,
    num_common: int,
    num_hit: int,
    copy: tuple[int, int] | None,
) -> None:
    cache = make_cache(10, grid_tokens=grid)
    serve(cache, range(16))
    table = admitted(cache, [*range(num_common), 90, 91])
    assert (table.num_hit_tokens, table.num_committed) == (num_hit, num_hit // 4)
    assert table.copy == copy
    in_cache = min(num_common, 16 - 16 % grid)
    assert cache.counters.rounded_tokens == in_cache - num_hit
    invariants.check(cache, [table])


def test_what_the_grid_costs_is_counted_where_all_was_cached(make_cache: MakeCache) -> None:
    cache = make_cache(10, grid_tokens=8)
    serve(cache, range(16))
    assert admitted(cache, range(16)).num_hit_tokens == 8  # 15 could be
    assert cache.counters.rounded_tokens == 7


def test_what_the_limit_costs_is_not_the_grid(make_cache: MakeCache) -> None:
    cache = make_cache(10, grid_tokens=2, max_prefix_tokens=7)
    serve(cache, range(16))
    assert admitted(cache, range(16)).num_hit_tokens == 6
    assert cache.counters.rounded_tokens == 0


def test_on_a_grid_too_a_prompt_has_room_without_the_block_to_copy_from(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(6, grid_tokens=3)
    serve(cache, range(20))
    # Of the 18 cached tokens two would be copied, of 15 three: neither has room. 12 have.
    table = admitted(cache, range(20))
    assert (table.num_hit_tokens, table.copy) == (12, None)
    assert table.blocks == [1, 2, 3, 5, 4]
    invariants.check(cache, [table])


# -- on and off ---------------------------------------------------------------------------------


def test_a_disabled_cache_keeps_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(6, is_enabled=False)
    serve(cache, range(9))
    assert gauges(cache) == (0, 0, 5)
    table = admitted(cache, range(9))
    assert (table.num_hit_tokens, table.is_caching) == (0, False)
    assert table.report is not None
    assert (table.report.reason, table.report.detail) == (
        "disabled",
        "the prefix cache is off (cache.enable)",
    )
    cache.release(table)
    keep = register(cache, "p", range(9))
    assert keep is not None
    assert (keep.num_tokens, keep.blocks) == (0, ())


def test_without_auto_detection_only_registrations_are_kept(make_cache: MakeCache) -> None:
    cache = make_cache(10, is_auto=False)
    serve(cache, range(9))
    assert (gauges(cache), num_cached(cache, range(9))) == ((0, 0, 9), 0)
    keep = register(cache, "p", range(6))
    assert keep is not None
    assert (keep.num_tokens, len(keep.blocks)) == (6, 2)
    # Every request reads it; none adds to it.
    table = computed(cache, range(9))
    assert table.num_hit_tokens == 6
    cache.release(table)
    assert num_cached(cache, range(9)) == 6
    assert gauges(cache) == (2, 0, 7)


def test_without_auto_detection_a_request_gives_its_own_blocks_back(make_cache: MakeCache) -> None:
    cache = make_cache(10, is_auto=False)
    register(cache, "p", range(4))
    table = computed(cache, range(9))
    assert table.blocks == [1, 2, 3]
    cache.release(table)
    assert free_blocks(cache)[-2:] == [3, 2]


# -- the policy's own arithmetic ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_prefix", "grid", "num_tokens", "cacheable"),
    [
        (None, 1, 9, 9),
        (8, 1, 7, 7),
        (8, 1, 8, 8),
        (8, 1, 9, 8),
        (None, 4, 7, 4),
        (None, 4, 8, 8),
        (7, 4, 9, 4),
        (3, 4, 9, 0),
    ],
)
def test_how_much_may_be_cached(
    max_prefix: int | None, grid: int, num_tokens: int, cacheable: int
) -> None:
    policy = CachePolicy(max_prefix_tokens=max_prefix, grid_tokens=grid)
    assert policy.cacheable(num_tokens) == cacheable


def test_the_number_of_keeps_is_half_of_the_blocks_unless_said(make_cache: MakeCache) -> None:
    def most(cache: CacheManager) -> int:
        return cache.keeps.max_blocks

    assert [most(make_cache(n)) for n in (2, 3, 4, 9)] == [0, 1, 1, 4]
    assert [most(make_cache(9, max_kept_blocks=n)) for n in (0, 3, 8)] == [0, 3, 8]


def test_evicting_all_leaves_what_is_live(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(9))
    live = computed(cache, range(20, 25))
    assert desk.plan_blocks(cache, None).carry_out(cache) == (3, 2, 0)
    assert gauges(cache) == (2, 0, 5)
    assert admit(cache, range(40, 61)) is None
    assert admit(cache, range(40, 60)) is not None
    cache.release(live)
