"""The road of a request through the cache, with exact block ids and exact queue order.

Blocks hold four tokens. Every test ends with a check of all invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from runtime_cache.cache import invariants
from runtime_cache.cache.block_pool import BlockPool
from runtime_cache.cache.hashing import BlockKey
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import CacheEntry
from runtime_cache.errors import ConfigError, InternalError
from runtime_cache.ids import BlockId, PrefixId
from tests.support.caching import (
    ROOT,
    admit,
    admitted,
    chain_of,
    free_blocks,
    gauges,
    make_manager,
    parked_blocks,
    serve,
)

MakeCache = Callable[..., CacheManager]
P1, P2 = PrefixId("p1"), PrefixId("p2")


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    made: list[CacheManager] = []

    def make(num_blocks: int, **options: int) -> CacheManager:
        made.append(make_manager(num_blocks, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cache in made:
        invariants.check(cache)


# -- admit, commit, release ---------------------------------------------------------------------


def test_a_cold_prompt_takes_blocks_in_order(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    table = admitted(cache, range(9))
    assert table.blocks == [1, 2, 3]
    assert (table.num_hit_tokens, table.num_committed) == (0, 0)
    assert table.slots[:12].tolist() == list(range(4, 16))
    assert free_blocks(cache) == [4, 5]
    assert gauges(cache) == (3, 0, 2)


def test_released_tail_first_full_blocks_parked_the_rest_free(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    assert serve(cache, range(9)) == [1, 2, 3]
    assert parked_blocks(cache) == [2, 1]
    assert free_blocks(cache) == [4, 5, 3]
    assert gauges(cache) == (0, 2, 3)


def test_a_hit_shares_the_blocks_in_place(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(9))
    table = admitted(cache, [*range(8), 50, 51])
    assert table.blocks == [1, 2, 4]
    assert (table.num_hit_tokens, table.num_committed) == (8, 2)
    assert table.slots[:10].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17]
    assert parked_blocks(cache) == []
    second = admitted(cache, [*range(8), 60])
    assert second.blocks == [1, 2, 5]
    assert [cache.pool.num_holds(BlockId(b)) for b in (1, 2, 4, 5)] == [2, 2, 1, 1]
    invariants.check(cache, [table, second])


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)]
)
def test_the_last_prompt_token_is_always_computed(
    make_cache: MakeCache, num_tokens: int, num_hit: int
) -> None:
    cache = make_cache(10)
    serve(cache, range(12))
    assert admitted(cache, range(num_tokens)).num_hit_tokens == num_hit


def test_match_tells_without_changing_anything(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    before = parked_blocks(cache), cache.entries(), gauges(cache)
    assert cache.match(chain_of(range(8)), 8) == (8, (1, 2))
    assert cache.match(chain_of(range(8)), 7) == (4, (1,))
    assert cache.match(chain_of(range(1, 9)), 8) == (0, ())
    assert (parked_blocks(cache), cache.entries(), gauges(cache)) == before


def test_nothing_is_visible_before_commit(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    first = admitted(cache, range(9))
    assert cache.match(chain_of(range(9)), 8).num_tokens == 0
    cache.commit(first, chain_of(range(9)), 7)
    assert cache.match(chain_of(range(9)), 8).num_tokens == 4
    cache.commit(first, chain_of(range(9)), 8)
    assert cache.match(chain_of(range(9)), 8).num_tokens == 8


def test_a_growing_answer_is_committed_block_by_block(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    chain = chain_of(range(6))
    table = admitted(cache, range(6), room=3)
    cache.commit(table, chain, 6)
    assert table.num_committed == 1
    assert cache.reserve(table, 7)
    assert table.blocks == [1, 2]
    assert cache.reserve(table, 9)
    assert table.blocks == [1, 2, 3]
    chain = chain_of(range(9))
    cache.commit(table, chain, 8)
    assert table.num_committed == 2
    cache.release(table)
    assert cache.match(chain, 9).num_tokens == 8


def test_a_request_moves_onto_a_block_computed_meanwhile(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    one, two = admitted(cache, range(9)), admitted(cache, [*range(8), 77])
    assert (one.blocks, two.blocks) == ([1, 2, 3], [4, 5, 6])
    cache.commit(one, chain_of(range(9)), 9)
    cache.commit(two, chain_of([*range(8), 77]), 9)
    assert two.blocks == [1, 2, 6]
    assert two.slots[:9].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 24]
    assert free_blocks(cache) == [7, 4, 5]
    assert cache.counters.duplicate_blocks == 2
    invariants.check(cache, [one, two])


def test_moving_onto_an_evictable_block_takes_it_out_of_the_queue(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    late = admitted(cache, range(9))
    serve(cache, [*range(8), 77])
    assert parked_blocks(cache) == [5, 4]
    cache.commit(late, chain_of(range(9)), 4)
    assert late.blocks == [4, 2, 3]
    assert parked_blocks(cache) == [5]
    invariants.check(cache, [late])


def test_a_collision_keeps_a_block_and_all_behind_it_out(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(5))
    chain = chain_of(range(20, 29))
    chain.keys[0] = BlockKey(chain_of(range(4)).keys[0].digest, chain.keys[0].tokens)
    table = admitted(cache, range(20, 29))
    cache.commit(table, chain, 9)
    assert (table.num_committed, len(cache.index)) == (0, 1)
    assert cache.counters.collisions == 1
    cache.release(table)
    assert gauges(cache) == (0, 1, 6)


def test_a_failed_step_leaves_only_free_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = admitted(cache, range(9))
    cache.commit(table, chain_of(range(9)), 4)
    cache.drop(table)
    assert cache.match(chain_of(range(9)), 8).num_tokens == 4
    assert cache.counters.dropped_blocks == 2
    assert gauges(cache) == (0, 1, 6)


def test_a_suspect_chain_is_forgotten_as_far_as_it_is_nobody_elses(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(12))
    serve(cache, [*range(4), *range(50, 55)])  # continues the first block
    suspect = admitted(cache, range(13))
    assert suspect.num_committed == 3
    cache.drop(suspect, is_all_suspect=True)
    assert (cache.counters.dropped_blocks, cache.counters.evicted_blocks) == (1, 2)
    assert cache.match(chain_of(range(13)), 12).num_tokens == 4
    assert cache.match(chain_of([*range(4), *range(50, 55)]), 8).num_tokens == 8


def test_a_suspect_chain_that_another_holds_stays(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(8))
    suspect, other = admitted(cache, range(9)), admitted(cache, range(9))
    cache.drop(suspect, is_all_suspect=True)
    assert cache.match(chain_of(range(9)), 8).num_tokens == 8
    cache.release(other)


def test_a_disabled_cache_keeps_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(6, is_enabled=False)
    serve(cache, range(9))
    assert gauges(cache) == (0, 0, 5)
    assert admitted(cache, range(9)).num_hit_tokens == 0


# -- capacity and eviction ----------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "fits"), [(19, True), (20, True), (21, False)])
def test_a_prompt_fits_up_to_the_last_block(
    make_cache: MakeCache, num_tokens: int, fits: bool
) -> None:
    cache = make_cache(6)
    assert (admit(cache, range(num_tokens)) is not None) == fits
    assert gauges(cache) == ((5, 0, 0) if fits else (0, 0, 5))


def test_a_short_pool_refuses_and_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    serve(cache, range(5))
    table = admitted(cache, range(20, 25), room=8)
    assert (table.blocks, parked_blocks(cache)) == ([3, 2], [1])
    before = parked_blocks(cache), gauges(cache), cache.counters.queried_tokens
    assert admit(cache, range(9)) is None  # one hit, but two more blocks are needed
    assert not cache.reserve(table, 13)
    assert (parked_blocks(cache), gauges(cache), cache.counters.queried_tokens) == before
    assert cache.reserve(table, 12)
    assert gauges(cache) == (3, 0, 0)


def test_more_room_than_announced_is_our_bug(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    table = admitted(cache, range(5), room=3)
    assert cache.reserve(table, 8)
    with pytest.raises(InternalError, match="9 tokens asked of a table for 8"):
        cache.reserve(table, 9)
    assert gauges(cache) == (2, 0, 3)


def test_matched_blocks_do_not_count_as_evictable(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    serve(cache, range(9))  # blocks 1, 2 parked, 3 free
    assert admit(cache, range(16)) is None
    assert admitted(cache, range(12)).blocks == [1, 2, 3]


def test_eviction_takes_the_least_recently_used_leaf(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    serve(cache, range(5))  # block 1
    serve(cache, range(20, 25))  # block 3
    assert (parked_blocks(cache), free_blocks(cache)) == ([1, 3], [5, 2, 4])
    serve(cache, range(6))  # a hit refreshes block 1
    assert parked_blocks(cache) == [3, 1]
    assert admitted(cache, range(40, 54)).blocks == [2, 4, 5, 3]
    assert parked_blocks(cache) == [1]
    assert cache.counters.evicted_blocks == 1


def test_a_shared_parent_outlives_its_leaves(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(9))  # 1 <- 2
    serve(cache, [*range(4), *range(30, 35)])  # 1 <- 4
    assert parked_blocks(cache) == [2, 4, 1]
    assert cache.evict(2) == (2, 0)
    assert parked_blocks(cache) == [1]
    assert cache.match(chain_of(range(9)), 8) == (4, (1,))


@pytest.mark.parametrize(("watermark", "num_free", "num_parked"), [(2, 3, 2), (3, 3, 2), (4, 4, 1)])
def test_the_watermark_evicts_ahead_of_need(
    make_cache: MakeCache, watermark: int, num_free: int, num_parked: int
) -> None:
    cache = make_cache(6, low_watermark_blocks=watermark)
    serve(cache, range(9))
    assert (cache.num_free, cache.num_evictable) == (num_free, num_parked)


def test_live_requests_may_use_the_reserve(make_cache: MakeCache) -> None:
    cache = make_cache(6, low_watermark_blocks=4)
    table = admitted(cache, range(20))
    assert gauges(cache) == (5, 0, 0)
    cache.commit(table, chain_of(range(20)), 20)
    cache.release(table)
    assert gauges(cache) == (0, 1, 4)
    assert parked_blocks(cache) == [1]


@pytest.mark.parametrize(("max_blocks", "evicted"), [(0, 0), (1, 1), (2, 2), (3, 2), (None, 2)])
def test_an_operator_evicts_what_nobody_holds(
    make_cache: MakeCache, max_blocks: int | None, evicted: int
) -> None:
    cache = make_cache(8)
    serve(cache, range(9))
    held = admitted(cache, range(20, 25))
    cache.commit(held, chain_of(range(20, 25)), 5)
    assert cache.evict(max_blocks) == (evicted, 1)
    assert cache.num_evictable == 2 - evicted


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "watermark"), [(1, 4, 0), (4, 0, 0), (4, 4, -1), (4, 4, 4)]
)
def test_sizes_out_of_range_are_config_errors(
    num_blocks: int, block_size: int, watermark: int
) -> None:
    with pytest.raises(ConfigError):
        CacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            root=ROOT,
            low_watermark_blocks=watermark,
        )


# -- counters -----------------------------------------------------------------------------------


def test_counters_are_of_tokens_and_count_a_request_once(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    serve(cache, range(9))
    table = admitted(cache, range(9))
    assert (cache.counters.queried_tokens, cache.counters.hit_tokens) == (18, 8)
    cache.release(table)
    again = cache.admit(
        chain_of(range(9)), num_tokens=9, max_tokens=9, max_hit_tokens=8, is_retry=True
    )
    assert again is not None
    assert again.num_hit_tokens == 8
    assert (cache.counters.queried_tokens, cache.counters.hit_tokens) == (18, 8)
    assert (cache.counters.inserted_blocks, cache.counters.evicted_blocks) == (2, 0)


# -- registered prefixes ------------------------------------------------------------------------


def register(cache: CacheManager, prefix_id: PrefixId, tokens: range) -> None:
    table = admitted(cache, tokens)
    cache.commit(table, chain_of(tokens), len(tokens))
    cache.register(prefix_id, table)
    cache.release(table)


def test_a_registered_prefix_is_never_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    register(cache, P1, range(9))
    assert [r[:3] for r in cache.registrations()] == [(P1, 8, (1, 2))]
    assert gauges(cache) == (2, 0, 3)
    assert cache.evict() == (0, 2)
    assert admit(cache, range(20, 33)) is None
    assert admitted(cache, range(9)).num_hit_tokens == 8


def test_a_released_prefix_stays_cached_until_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    register(cache, P1, range(9))
    assert cache.unregister(P1)
    assert not cache.unregister(P1)
    assert [r[:3] for r in cache.registrations()] == []
    assert parked_blocks(cache) == [2, 1]


def test_registering_again_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    register(cache, P1, range(9))
    register(cache, P1, range(9))
    assert [cache.pool.num_holds(BlockId(b)) for b in (1, 2)] == [1, 1]
    register(cache, P2, range(5))
    assert cache.pool.num_holds(BlockId(1)) == 2
    assert cache.unregister(P1)
    assert (cache.num_live, parked_blocks(cache)) == (1, [2])


def test_registering_other_tokens_replaces(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    register(cache, P1, range(5))
    register(cache, P1, range(20, 25))
    assert [r[:3] for r in cache.registrations()] == [(P1, 4, (3,))]
    assert parked_blocks(cache) == [1]


def test_a_prefix_shorter_than_a_block_keeps_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    cache.now_s = 5.0
    register(cache, P1, range(3))
    assert cache.registrations() == [(P1, 0, (), 5.0)]
    assert cache.entries() == [CacheEntry("", 0, 0, 0, 0, 5.0, 5.0, (P1,))]
    assert gauges(cache) == (0, 0, 3)
    assert cache.unregister(P1)


@pytest.mark.parametrize(("limit", "is_taken"), [(2, False), (3, True)])
def test_registrations_hold_up_to_their_limit(
    make_cache: MakeCache, limit: int, is_taken: bool
) -> None:
    cache = make_cache(10, max_registered_blocks=limit)
    register(cache, P1, range(9))
    table = admitted(cache, [*range(4), *range(30, 35)])  # shares a block with P1
    cache.commit(table, chain_of([*range(4), *range(30, 35)]), 9)
    before = gauges(cache), cache.registrations()
    assert (cache.register(P2, table) is not None) == is_taken
    assert cache.num_registered_blocks == (3 if is_taken else 2)
    if not is_taken:
        assert (gauges(cache), cache.registrations()) == before


def test_a_replaced_registration_does_not_count_twice(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    assert cache.max_registered_blocks == 2
    register(cache, P1, range(9))
    register(cache, P1, range(20, 29))
    assert [r[:3] for r in cache.registrations()] == [(P1, 8, (4, 5))]


def test_entries_show_leaves_and_registered_prefixes(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    cache.now_s = 1.0
    register(cache, P1, range(5))  # block 1
    cache.now_s = 2.0
    serve(cache, range(9))  # 1 <- 3
    cache.now_s = 3.0
    serve(cache, range(20, 25))
    digests = [key.digest.hex() for key in chain_of(range(8)).keys]
    other = chain_of(range(20, 25)).keys[0].digest.hex()
    assert cache.entries() == [
        CacheEntry(other, 4, 1, 0, num_hits=0, created_s=3.0, last_used_s=3.0, prefix_ids=()),
        CacheEntry(
            digests[0], 4, 1, 0, num_hits=1, created_s=1.0, last_used_s=2.0, prefix_ids=(P1,)
        ),
        CacheEntry(digests[1], 8, 2, 0, num_hits=1, created_s=2.0, last_used_s=2.0, prefix_ids=()),
    ]


def test_only_live_requests_use_an_entry(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    register(cache, P1, range(4))
    register(cache, P2, range(8))
    assert [(e.num_blocks, e.num_requests) for e in cache.entries()] == [(1, 0), (2, 0)]
    table = admitted(cache, range(9))
    assert [(e.num_blocks, e.num_requests) for e in cache.entries()] == [(1, 1), (2, 1)]
    cache.release(table)


@pytest.mark.parametrize(("num_short", "is_taken"), [(1, True), (2, False)])
def test_registrations_that_hold_nothing_are_counted_too(
    make_cache: MakeCache, num_short: int, is_taken: bool
) -> None:
    cache = make_cache(10, max_registered_blocks=2)
    for index in range(num_short):
        register(cache, PrefixId(f"short{index}"), range(index, index + 2))
    table = admitted(cache, range(5))
    assert (cache.register(P1, table) is not None) == is_taken
    cache.release(table)


# -- the checker itself -------------------------------------------------------------------------


def _lose_a_block(cache: CacheManager) -> None:
    cache.pool.allocate(1)
    cache.pool.release(BlockId(3))


def _free_an_indexed_block(cache: CacheManager) -> None:
    cache.index.unpark(cache.index.parked[0])
    cache.pool.free(BlockId(2))


def _turn_the_queue(cache: CacheManager) -> None:
    node = cache.index.parked[0]
    cache.index.unpark(node)
    cache.index.park(node)


def _hold_only_the_child(cache: CacheManager) -> None:
    cache.index.unpark(cache.index.parked[0])
    cache.pool.hold(BlockId(2))


def _miscount_children(cache: CacheManager) -> None:
    cache.index.parked[1].num_children = 0


def _change_the_tokens(cache: CacheManager) -> None:
    node = cache.index.parked[0]
    node.key = BlockKey(node.key.digest, b"\0" * 16)


def _hand_out_the_null_block(cache: CacheManager) -> None:
    cache.pool = BlockPool(6)
    cache.pool._free.appendleft(BlockId(0))


def _hold_without_owner(cache: CacheManager) -> None:
    cache.pool.allocate(1)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_lose_a_block, "block 3 is in 0 places"),
        (_free_an_indexed_block, "free block 2 is indexed"),
        (_turn_the_queue, "block 2 stands behind its parent 1"),
        (_hold_only_the_child, "block 2 is held, but not its parent 1"),
        (_miscount_children, "block 1 counts 0 children, has 1"),
        (_change_the_tokens, "block 2 has a digest that is not of its tokens"),
        (_hand_out_the_null_block, "block 0 is in 1 places"),
        (_hold_without_owner, "has 1 holds, its owners have 0"),
    ],
)
def test_the_checker_finds_damage(damage: Callable[[CacheManager], None], sentence: str) -> None:
    cache = make_manager(6)
    serve(cache, range(8))
    invariants.check(cache, [])
    damage(cache)
    with pytest.raises(InternalError, match=sentence):
        invariants.check(cache, [])
