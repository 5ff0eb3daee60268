"""The road of a request through the cache, with exact block ids and exact queue order.

Blocks hold four tokens. Every test ends with a check of all invariants.
"""

from __future__ import annotations

import pytest

from runtime_cache.cache import desk, invariants
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.results import MatchHint
from runtime_cache.errors import ConfigError, InternalError
from runtime_cache.ids import BlockId
from tests.support.caching import (
    ROOT,
    MakeCache,
    admit,
    admitted,
    chain_of,
    commit,
    computed,
    entries,
    free_blocks,
    gauges,
    make_manager,
    num_cached,
    parked_blocks,
    serve,
)

# -- admit, commit, release ---------------------------------------------------------------------


def test_a_cold_prompt_takes_blocks_in_order(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    table = admitted(cache, range(9))
    assert table.blocks == [1, 2, 3]
    assert (table.num_hit_tokens, table.num_committed, table.copy) == (0, 0, None)
    assert table.slots[:12].tolist() == list(range(4, 16))
    assert free_blocks(cache) == [4, 5]
    assert gauges(cache) == (3, 0, 2)


def test_the_blocks_may_be_any_range_of_the_pool() -> None:
    cache = CacheManager(blocks=range(7, 10), block_size=4, root=ROOT)
    assert serve(cache, range(9)) == [7, 8, 9]
    table = admitted(cache, [*range(8), 50])
    assert (table.blocks, table.slots[:9].tolist()) == ([7, 8, 9], [*range(28, 37)])
    assert cache.num_usable == 3
    invariants.check(cache, [table])


def test_all_of_a_served_prompt_stays_and_is_parked_tail_first(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    assert serve(cache, range(9)) == [1, 2, 3]
    assert (parked_blocks(cache), free_blocks(cache)) == ([3, 2, 1], [4, 5])
    assert gauges(cache) == (0, 3, 2)
    assert num_cached(cache, range(9)) == 9


def test_room_that_was_not_used_is_free_again(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    table = admitted(cache, range(13))
    cache.commit(table, chain_of(range(13)), 6)
    cache.release(table)
    assert (parked_blocks(cache), free_blocks(cache)) == ([1], [5, 4, 3, 2])


def test_a_hit_shares_the_whole_blocks_in_place(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    table = admitted(cache, [*range(8), 50, 51])
    assert table.blocks == [1, 2, 3]
    assert (table.num_hit_tokens, table.num_committed, table.copy) == (8, 2, None)
    assert table.slots[:10].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert parked_blocks(cache) == []
    second = admitted(cache, [*range(8), 60])
    assert second.blocks == [1, 2, 4]
    assert [cache.pool.num_holds(BlockId(b)) for b in (1, 2, 3, 4)] == [2, 2, 1, 1]
    invariants.check(cache, [table, second])


def test_tables_with_shared_blocks_are_released_in_any_order(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(4))
    tables = [
        computed(cache, [*range(4), *range(10, 14)]),  # 1, 2
        computed(cache, [*range(4), *range(10, 14), 20]),  # 1, 2, 3
        computed(cache, [*range(4), 30]),  # 1, 4
    ]
    cache.release(tables[1])
    assert parked_blocks(cache) == [3]
    cache.release(tables[0])
    assert parked_blocks(cache) == [3, 2]
    cache.release(tables[2])
    assert parked_blocks(cache) == [3, 2, 4, 1]
    desk.plan_blocks(cache, 3).carry_out(cache)
    assert parked_blocks(cache) == [1]


def test_match_tells_without_changing_anything(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(10))
    before = parked_blocks(cache), entries(cache), gauges(cache), cache.counters.copy()
    nodes = list(cache.index)
    match = cache.match(chain_of(range(10)), 10)
    assert match == (10, tuple(nodes[:2]), nodes[2], 10, nodes[2])
    assert cache.match(chain_of(range(8)), 8) == (8, tuple(nodes[:2]), None, 8, None)
    assert cache.match(chain_of(range(8)), 7) == (7, (nodes[0],), nodes[1], 8, None)
    assert cache.match(chain_of([0, 1, 50]), 2) == (2, (), nodes[0], 2, nodes[0])
    assert cache.match(chain_of(range(1, 9)), 8) == (0, (), None, 0, None)
    assert cache.match(chain_of(range(10)), 0) == (0, (), None, 0, None)
    after = parked_blocks(cache), entries(cache), gauges(cache), cache.counters
    assert after == before


def test_nothing_is_visible_before_commit(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    first = admitted(cache, range(9))
    assert num_cached(cache, range(9)) == 0
    cache.commit(first, chain_of(range(9)), 7)
    assert num_cached(cache, range(9)) == 4
    cache.commit(first, chain_of(range(9)), 8)
    assert num_cached(cache, range(9)) == 8


def test_a_growing_answer_is_committed_block_by_block(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    chain = chain_of(range(6))
    table = admitted(cache, range(6), room=3)
    cache.commit(table, chain, 6)
    assert table.num_committed == 1
    assert cache.reserve(table, 8)
    assert table.blocks == [1, 2]
    assert cache.reserve(table, 9)
    assert table.blocks == [1, 2, 3]
    chain = chain_of(range(9))
    cache.commit(table, chain, 8)
    assert table.num_committed == 2
    cache.release(table)
    assert num_cached(cache, range(9)) == 8


def test_a_request_moves_onto_a_block_computed_meanwhile(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    one, two = admitted(cache, range(9)), admitted(cache, [*range(8), 77])
    assert (one.blocks, two.blocks) == ([1, 2, 3], [4, 5, 6])
    cache.commit(one, chain_of(range(9)), 9)
    cache.commit(two, chain_of([*range(8), 77]), 9)
    assert two.blocks == [1, 2, 6]
    assert two.slots[:9].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 24]
    assert free_blocks(cache) == [7, 4, 5]
    assert (cache.counters.duplicate_blocks, cache.counters.inserted_blocks) == (2, 2)
    invariants.check(cache, [one, two])


def test_moving_onto_an_evictable_block_takes_it_out_of_the_queue(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    late = admitted(cache, range(9))
    serve(cache, [*range(8), 77])
    assert parked_blocks(cache) == [6, 5, 4]
    cache.commit(late, chain_of(range(9)), 4)
    assert late.blocks == [4, 2, 3]
    assert parked_blocks(cache) == [6, 5]
    invariants.check(cache, [late])


def test_a_request_that_wants_no_cache_neither_reads_nor_writes_it(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    table = admitted(cache, range(8), is_caching=False)
    assert (table.blocks, table.num_hit_tokens, table.copy) == ([3, 4], 0, None)
    assert (table.is_caching, table.report) == (False, None)
    commit(cache, table, range(8))
    cache.release(table)
    assert free_blocks(cache) == [5, 6, 7, 4, 3]
    assert cache.counters.queried_tokens == 8


# -- what a waiting request asks again and again ------------------------------------------------


def test_the_length_of_a_match_follows_what_comes_and_goes(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    chain, hint = chain_of(range(13)), MatchHint()
    assert cache.match_length(chain, hint, 12) == 0
    table = admitted(cache, range(13))
    for num_computed, length in [(3, 0), (4, 4), (9, 8), (12, 12)]:
        cache.commit(table, chain, num_computed)
        assert cache.match_length(chain, hint, 12) == length
    assert [n.block for n in hint.nodes] == [1, 2, 3]
    cache.release(table)
    desk.plan_blocks(cache, 2).carry_out(cache)
    assert cache.match_length(chain, hint, 12) == 4
    serve(cache, range(9))
    assert cache.match_length(chain, hint, 12) == 8
    desk.plan_blocks(cache, None).carry_out(cache)
    assert cache.match_length(chain, hint, 12) == 0
    assert hint.nodes == []


@pytest.mark.parametrize(("max_tokens", "length"), [(3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_the_length_of_a_match_is_limited(
    make_cache: MakeCache, max_tokens: int, length: int
) -> None:
    cache = make_cache(6)
    serve(cache, range(9))
    assert cache.match_length(chain_of(range(9)), MatchHint(), max_tokens) == length


# -- room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "fits"), [(19, True), (20, True), (21, False)])
def test_a_prompt_fits_up_to_the_last_block(
    make_cache: MakeCache, num_tokens: int, fits: bool
) -> None:
    cache = make_cache(6)
    assert (admit(cache, range(num_tokens)) is not None) == fits
    assert gauges(cache) == ((5, 0, 0) if fits else (0, 0, 5))


def test_a_short_pool_refuses_and_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    serve(cache, range(4))
    table = admitted(cache, range(20, 25), room=8)
    assert (table.blocks, parked_blocks(cache)) == ([2, 3], [1])
    before = parked_blocks(cache), gauges(cache), cache.counters.copy()
    assert admit(cache, range(9)) is None  # one hit, but two more blocks are needed
    assert not cache.reserve(table, 13)
    assert (parked_blocks(cache), gauges(cache), cache.counters) == before
    assert cache.reserve(table, 12)
    assert gauges(cache) == (3, 0, 0)
    assert cache.counters.evicted_by == {"need": 1}


def test_more_room_than_announced_is_our_bug(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    table = admitted(cache, range(5), room=3)
    assert cache.reserve(table, 8)
    with pytest.raises(InternalError, match="9 tokens asked of a table for 8"):
        cache.reserve(table, 9)
    assert gauges(cache) == (2, 0, 3)


def test_matched_blocks_do_not_count_as_evictable(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    serve(cache, range(8))  # blocks 1, 2 parked, 3 free
    assert admit(cache, range(16)) is None
    assert admitted(cache, range(12)).blocks == [1, 2, 3]


def test_shared_blocks_that_are_held_cost_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(5)
    first = computed(cache, range(12))
    second = admitted(cache, [*range(12), 50])
    assert (first.blocks, second.blocks) == ([1, 2, 3], [1, 2, 3, 4])
    assert gauges(cache) == (4, 0, 0)
    assert admit(cache, range(12)) is None  # the last token needs a block of its own
    invariants.check(cache, [first, second])


def test_eviction_takes_the_least_recently_used_leaf(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    serve(cache, range(4))  # block 1
    serve(cache, range(20, 24))  # block 2
    assert (parked_blocks(cache), free_blocks(cache)) == ([1, 2], [3, 4, 5])
    cache.release(admitted(cache, range(5)))  # a hit refreshes block 1
    assert parked_blocks(cache) == [2, 1]
    assert admitted(cache, range(40, 56)).blocks == [4, 5, 3, 2]
    assert parked_blocks(cache) == [1]
    assert (cache.counters.evicted_blocks, cache.counters.evicted_by) == (1, {"need": 1})


def test_a_shared_parent_outlives_its_leaves(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(8))  # 1 <- 2
    serve(cache, [*range(4), *range(30, 34)])  # 1 <- 3
    assert parked_blocks(cache) == [2, 3, 1]
    assert desk.plan_blocks(cache, 2).carry_out(cache) == (2, 0, 0)
    assert parked_blocks(cache) == [1]
    assert num_cached(cache, range(8)) == 4


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "low", "high"),
    [(1, 4, 0, 0), (4, 0, 0, 0), (4, 4, -1, 0), (4, 4, 4, 0), (4, 4, 0, 4)],
)
def test_sizes_out_of_range_are_config_errors(
    num_blocks: int, block_size: int, low: int, high: int
) -> None:
    policy = CachePolicy(low_watermark_blocks=low, high_watermark_blocks=high)
    with pytest.raises(ConfigError):
        CacheManager(blocks=range(1, num_blocks), block_size=block_size, root=ROOT, policy=policy)


@pytest.mark.parametrize("level", [0, 3])
def test_sizes_within_range_are_taken(level: int) -> None:
    policy = CachePolicy(low_watermark_blocks=level, high_watermark_blocks=level)
    assert make_manager(4, policy=policy).num_free == 3


# -- counters -----------------------------------------------------------------------------------


def test_counters_are_of_tokens_and_count_a_request_once(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    serve(cache, range(9))
    table = admitted(cache, range(9))
    counters = cache.counters
    assert (counters.queried_tokens, counters.hit_tokens, counters.copied_tokens) == (18, 8, 0)
    assert table.report is not None
    cache.release(table)
    again = admitted(cache, range(9), is_retry=True)
    assert (again.num_hit_tokens, again.report) == (8, None)
    assert (counters.queried_tokens, counters.hit_tokens, counters.reuses) == (18, 8, 1)
    assert (counters.inserted_blocks, counters.evicted_blocks) == (3, 0)


def test_the_time_between_two_uses_is_added_up(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    cache.now_s = 10.0
    serve(cache, range(8))
    cache.now_s = 13.0
    serve(cache, range(7))  # copies half of the second block
    cache.now_s = 20.0
    serve(cache, range(5))  # the first one only
    assert (cache.counters.reuses, cache.counters.reuse_gap_s) == (2, 10.0)
    cache.now_s = 30.0
    serve(cache, range(50, 54))
    cache.now_s = 31.0
    assert desk.plan_blocks(cache, None).carry_out(cache) == (3, 0, 0)
    counters = cache.counters
    assert (counters.evicted_blocks, counters.evicted_unused_blocks) == (3, 1)
    assert counters.evicted_idle_s == (31 - 20) + (31 - 13) + (31 - 30)


def test_a_copy_of_the_counters_does_not_change(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    before = cache.counters.copy()
    serve(cache, range(8))
    desk.plan_blocks(cache, 1).carry_out(cache)
    after = cache.counters.copy()
    desk.plan_blocks(cache, 1).carry_out(cache)
    assert (before.inserted_blocks, before.evicted_by) == (0, {})
    assert (after.evicted_blocks, after.evicted_by) == (1, {"operator": 1})
    assert cache.counters.evicted_by == {"operator": 2}
