"""In which order cached blocks go: the queue alone, and whole caches under streams of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from runtime_cache.cache import desk
from runtime_cache.cache.eviction import EvictionQueue
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import EvictionPolicy
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockHash, BlockId
from tests.support.caching import (
    MakeCache,
    admitted,
    commit,
    free_blocks,
    num_cached,
    parked_blocks,
    serve,
)


def node(block: int, *, priority: int = 50, num_hits: int = 0) -> PrefixNode:
    return PrefixNode(BlockHash(b""), b"", BlockId(block), None, 0, 1, 0.0, 0.0, priority, num_hits)


def queue_of(
    policy: EvictionPolicy, nodes: Iterable[PrefixNode], *, num_blocks: int = 10
) -> EvictionQueue:
    queue = EvictionQueue(policy, num_blocks)
    for parked in nodes:
        queue.park(parked)
    return queue


def order(queue: EvictionQueue) -> list[int]:
    return [int(parked.block) for parked in queue]


# -- the queue ----------------------------------------------------------------------------------


def test_an_empty_queue_has_no_oldest() -> None:
    queue = EvictionQueue("lru", 10)
    with pytest.raises(InternalError, match="nothing to evict"):
        queue.oldest()
    only = node(1)
    queue.park(only)
    assert queue.oldest() is only
    queue.unpark(only)
    with pytest.raises(InternalError, match="nothing to evict"):
        queue.oldest()


def test_least_recently_used_goes_first_however_often_it_was_used() -> None:
    queue = queue_of("lru", [node(3, num_hits=9), node(1), node(2)])
    assert (order(queue), len(queue), queue.oldest().block) == ([3, 1, 2], 3, 3)


def test_what_is_held_meanwhile_comes_back_at_the_end() -> None:
    one, two = node(1), node(2)
    queue = queue_of("lru", [one, two])
    queue.unpark(one)
    assert (one.rank, order(queue), len(queue)) == (None, [2], 1)
    queue.unpark(one)  # nothing happens
    assert len(queue) == 1
    queue.park(one)
    assert order(queue) == [2, 1]


def test_the_lowest_priority_goes_first() -> None:
    priorities = {1: 50, 2: 100, 3: 0, 4: 50, 5: 51, 6: 0}
    queue = queue_of("lru", [node(b, priority=p) for b, p in priorities.items()])
    assert order(queue) == [3, 6, 1, 4, 5, 2]
    assert queue.oldest().rank == (0, False)


def test_segmented_what_was_never_reused_goes_before_what_was() -> None:
    nodes = [node(1, num_hits=1), node(2), node(3, num_hits=5), node(4)]
    queue = queue_of("slru", nodes)
    assert order(queue) == [2, 4, 1, 3]
    assert [n.rank for n in nodes] == [(50, True), (50, False), (50, True), (50, False)]


def test_segmented_a_priority_is_worth_more_than_a_reuse() -> None:
    queue = queue_of("slru", [node(1, priority=51), node(2, num_hits=1), node(3, priority=49)])
    assert order(queue) == [3, 2, 1]


@pytest.mark.parametrize(("num_blocks", "max_protected"), [(1, 0), (2, 1), (5, 4), (9, 7)])
def test_segmented_reused_blocks_take_four_fifths_at_the_most(
    num_blocks: int, max_protected: int
) -> None:
    nodes = [node(block, num_hits=1) for block in range(1, num_blocks + 1)]
    queue = queue_of("slru", nodes, num_blocks=num_blocks)
    num_demoted = num_blocks - max_protected
    assert [n.rank == (50, True) for n in nodes] == [
        *[False] * num_demoted,
        *[True] * max_protected,
    ]
    assert order(queue) == list(range(1, num_blocks + 1))


def test_segmented_a_demoted_block_is_the_youngest_of_those_never_reused() -> None:
    reused = [node(block, num_hits=1) for block in range(1, 5)]
    queue = queue_of("slru", [*reused, node(8), node(9)], num_blocks=5)
    assert order(queue) == [8, 9, 1, 2, 3, 4]
    queue.park(last := node(5, num_hits=1))
    assert order(queue) == [8, 9, 1, 2, 3, 4, 5]
    assert [n.rank for n in (reused[0], reused[1], last)] == [
        (50, False),
        (50, True),
        (50, True),
    ]
    # Held and given back it counts as reused again, and the next one is demoted.
    queue.unpark(reused[0])
    queue.park(reused[0])
    assert order(queue) == [8, 9, 2, 3, 4, 5, 1]
    assert (reused[0].rank, reused[1].rank) == ((50, True), (50, False))


def test_segmented_the_lowest_priority_is_demoted_first() -> None:
    nodes = [node(1, priority=60, num_hits=1), node(2, priority=40, num_hits=1)]
    queue = queue_of("slru", nodes, num_blocks=3)  # two may be protected
    queue.park(node(3, priority=80, num_hits=1))
    assert [n.rank for n in nodes] == [(60, True), (40, False)]
    assert order(queue) == [2, 1, 3]


def test_segmented_room_among_the_protected_is_given_back() -> None:
    nodes = [node(block, num_hits=1) for block in (1, 2, 3)]
    queue = queue_of("slru", nodes[:2], num_blocks=3)
    queue.unpark(nodes[0])
    queue.park(nodes[2])
    assert [n.rank for n in nodes] == [None, (50, True), (50, True)]


# -- whole caches -------------------------------------------------------------------------------

CAPACITY = 40  # blocks
SYSTEM = range(1000, 1034)  # 34 tokens: eight blocks and a tail


def one_off(number: int) -> list[int]:
    """A prompt of 16 tokens, which no other prompt begins like: four blocks."""
    return [10_000 + number, *range(15)]


def priorities(cache: CacheManager) -> dict[int, int]:
    """By block."""
    return {int(indexed.block): indexed.priority for indexed in cache.index}


def hit_tokens(cache: CacheManager, tokens: Sequence[int]) -> int:
    """Serve a prompt; how much of it was cached."""
    before = cache.counters.hit_tokens
    serve(cache, tokens)
    return cache.counters.hit_tokens - before


def stream(cache: CacheManager, *, num_blocks: int) -> None:
    """One-off prompts that fill so many blocks."""
    for number in range(num_blocks // 4):
        assert hit_tokens(cache, one_off(number)) == 0


@pytest.mark.parametrize(("policy", "num_left"), [("slru", 34), ("lru", 0)])
def test_a_prompt_used_twice_outlives_three_times_the_capacity_of_one_off_prompts(
    make_cache: MakeCache, policy: EvictionPolicy, num_left: int
) -> None:
    cache = make_cache(CAPACITY + 1, eviction=policy)
    serve(cache, [*SYSTEM, 1])
    assert hit_tokens(cache, [*SYSTEM, 2]) == 34
    stream(cache, num_blocks=3 * CAPACITY)
    assert num_cached(cache, SYSTEM) == num_left


def test_segmented_a_prompt_used_once_does_not(make_cache: MakeCache) -> None:
    cache = make_cache(CAPACITY + 1, eviction="slru")
    serve(cache, [*SYSTEM, 1])
    stream(cache, num_blocks=3 * CAPACITY)
    assert num_cached(cache, SYSTEM) == 0


@pytest.mark.parametrize(
    ("period", "num_hits"),
    [
        (1, 29),  # after every other prompt
        (5, 5),  # 20 blocks of others between two uses
        (7, 4),  # 28 blocks, its own 9, and one to copy into: just within 40
    ],
)
def test_lru_a_prompt_touched_often_enough_is_always_there(
    make_cache: MakeCache, period: int, num_hits: int
) -> None:
    cache = make_cache(CAPACITY + 1)
    hits = []
    for number in range(30):
        if number % period == 0:
            hits.append(hit_tokens(cache, SYSTEM))
        assert hit_tokens(cache, one_off(number)) == 0
    assert hits == [0, *[33] * num_hits]
    counters = cache.counters
    assert counters.queried_tokens == 30 * 16 + (num_hits + 1) * 34
    assert counters.hit_tokens == num_hits * 33
    assert counters.reuses == num_hits


def test_lru_a_prompt_touched_too_seldom_is_gone_tail_first(make_cache: MakeCache) -> None:
    cache = make_cache(CAPACITY + 1)
    serve(cache, SYSTEM)  # nine of 40 blocks
    stream(cache, num_blocks=28)
    assert num_cached(cache, SYSTEM) == 34
    for number, num_left in [(7, 32), (8, 16), (9, 0)]:
        serve(cache, one_off(number))
        assert num_cached(cache, SYSTEM) == num_left, number


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_high_priority_outlives_any_stream(make_cache: MakeCache, policy: EvictionPolicy) -> None:
    cache = make_cache(CAPACITY + 1, eviction=policy)
    serve(cache, SYSTEM, priority=51)
    stream(cache, num_blocks=3 * CAPACITY)
    assert num_cached(cache, SYSTEM) == 34


def test_a_low_priority_goes_first_although_it_was_used_last(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    serve(cache, range(10, 18), priority=49)
    serve(cache, range(20, 24))
    assert parked_blocks(cache) == [3, 2, 1, 4]
    desk.plan_blocks(cache, 2).carry_out(cache)
    assert [num_cached(cache, t) for t in (range(4), range(10, 18))] == [4, 0]


def test_a_request_lifts_all_that_it_uses_and_nothing_lowers_it(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(12))  # 1, 2, 3
    serve(cache, [*range(8), 50], priority=70)  # 4 behind 2
    assert parked_blocks(cache) == [3, 4, 2, 1]
    assert priorities(cache) == {1: 70, 2: 70, 3: 50, 4: 70}
    serve(cache, [*range(8), 60], priority=10)  # 5 behind 2
    assert priorities(cache) == {1: 70, 2: 70, 3: 50, 4: 70, 5: 10}
    assert parked_blocks(cache) == [5, 3, 4, 2, 1]


def test_a_copied_block_is_lifted_with_those_before_it(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(8))  # 1, 2
    table = admitted(cache, [*range(6), 60], priority=80)
    cache.release(table)
    assert priorities(cache) == {1: 80, 2: 80}
    assert parked_blocks(cache) == [2, 1]


@pytest.mark.parametrize(("num_common", "is_reuse"), [(5, False), (6, True), (7, True)])
def test_less_than_half_of_a_block_copied_is_no_reuse_of_it(
    make_cache: MakeCache, num_common: int, is_reuse: bool
) -> None:
    cache = make_cache(12)
    serve(cache, range(8))  # 1, 2
    cache.now_s = 5.0
    cache.release(admitted(cache, [*range(num_common), 60], priority=80))
    assert priorities(cache) == {1: 80, 2: 80 if is_reuse else 50}
    reuses = {int(n.block): (n.num_hits, n.last_used_s) for n in cache.index}
    assert reuses == {1: (1, 5.0), 2: (1, 5.0) if is_reuse else (0, 0.0)}
    assert cache.counters.copied_tokens == num_common - 4


def test_what_a_preempted_request_finds_of_its_own_is_no_reuse(make_cache: MakeCache) -> None:
    cache = make_cache(12, eviction="slru")
    serve(cache, range(7))
    cache.release(admitted(cache, range(8), is_retry=True))
    assert [(n.num_hits, n.rank) for n in cache.index] == [(0, (50, False))] * 2


def test_a_block_computed_twice_has_the_higher_priority(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    late = admitted(cache, range(4), priority=80)
    serve(cache, range(4))
    commit(cache, late, range(4))
    cache.release(late)
    assert priorities(cache) == {2: 80}


def test_segmented_a_tail_of_a_system_prompt_lives_on_in_the_block_that_goes_on(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(CAPACITY + 1, eviction="slru")
    serve(cache, SYSTEM)
    assert hit_tokens(cache, [*SYSTEM, 1, 1]) == 34  # its block is full, the tail alone is not kept
    assert cache.counters.superseded_blocks == 1
    stream(cache, num_blocks=3 * CAPACITY)
    assert num_cached(cache, SYSTEM) == 34


def test_segmented_the_protected_are_capped_in_a_full_cache(make_cache: MakeCache) -> None:
    cache = make_cache(11, eviction="slru")  # ten blocks, eight of them protected
    first, second = range(20), range(100, 120)  # five blocks each
    for tokens in (first, first, second):
        serve(cache, tokens)
    assert parked_blocks(cache) == [6, 10, 9, 8, 7, 5, 4, 3, 2, 1]
    serve(cache, second)  # to copy into a block it needs one of the first
    assert (parked_blocks(cache), free_blocks(cache)) == ([4, 3, 2, 1, 6, 10, 9, 8, 7], [5])
    ranks = [n.rank for n in cache.index.parked]
    assert ranks == [(50, False), *[(50, True)] * 8]
    serve(cache, range(200, 204))
    assert parked_blocks(cache) == [4, 5, 3, 2, 1, 6, 10, 9, 8, 7]
