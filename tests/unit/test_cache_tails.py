"""Hits to the token: copied rows, and blocks that are only partly filled."""

from __future__ import annotations

import pytest

from runtime_cache.cache import children, desk, invariants
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import common_tokens
from runtime_cache.cache.manager import CacheManager
from runtime_cache.ids import BlockId, PrefixId
from tests.support.caching import (
    MakeCache,
    RowPool,
    admit,
    admitted,
    chain_of,
    commit,
    computed,
    entries,
    free_blocks,
    gauges,
    num_cached,
    parked_blocks,
    register,
    serve,
)


def commit_first(
    cache: CacheManager, table: BlockTable, tokens: list[int], num_tokens: int
) -> None:
    """Only so many of the tokens are computed."""
    cache.commit(table, chain_of(tokens), num_tokens, is_tail=True)


# -- hits of every length -----------------------------------------------------------------------


@pytest.mark.parametrize("num_common", range(15))
def test_a_hit_is_as_long_as_what_is_in_common(make_cache: MakeCache, num_common: int) -> None:
    cache = make_cache(12)
    assert serve(cache, range(14)) == [1, 2, 3, 4]
    table = admitted(cache, [*range(num_common), 90, 91])
    num_full, num_rows = divmod(num_common, 4)
    assert (table.num_hit_tokens, table.num_committed) == (num_common, num_full)
    assert table.copy == ((num_full + 1, num_rows) if num_rows else None)
    own = range(5, 5 + cache.num_blocks_for(num_common + 2) - num_full)
    assert table.blocks == [*range(1, num_full + 1), *own]
    assert cache.counters.copied_tokens == num_rows
    invariants.check(cache, [table])


@pytest.mark.parametrize("num_tokens", range(1, 15))
def test_the_last_prompt_token_is_always_computed(make_cache: MakeCache, num_tokens: int) -> None:
    cache = make_cache(12)
    serve(cache, range(14))
    table = admitted(cache, range(num_tokens))
    assert table.num_hit_tokens == num_tokens - 1
    assert table.report is not None
    assert table.report.reason == ("hit" if num_tokens > 1 else "too_short")


@pytest.mark.parametrize("num_tokens", [4, 8, 12])
def test_a_prompt_of_whole_blocks_twice(make_cache: MakeCache, num_tokens: int) -> None:
    cache = make_cache(12)
    first = serve(cache, range(num_tokens))
    table = admitted(cache, range(num_tokens))
    last, own = first[-1], len(first) + 1
    assert (table.num_hit_tokens, table.copy) == (num_tokens - 1, (last, 3))
    assert table.blocks == [*first[:-1], own]
    commit(cache, table, range(num_tokens))
    assert table.blocks == first  # its own is given up for the same block
    assert cache.counters.duplicate_blocks == 1
    cache.release(table)
    assert parked_blocks(cache) == first[::-1]
    assert free_blocks(cache) == [*range(own + 1, 12), own]


def test_a_prompt_of_one_token_is_never_a_hit_but_a_longer_one_is(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    assert serve(cache, [7]) == [1]
    assert serve(cache, [7]) == [2]
    assert (parked_blocks(cache), free_blocks(cache)) == ([1], [3, 4, 5, 2])
    table = admitted(cache, [7, 8])
    assert (table.num_hit_tokens, table.copy) == (1, (1, 1))


def test_copied_rows_are_the_right_ones(make_cache: MakeCache) -> None:
    cache, pool = make_cache(12), RowPool()
    first = admitted(cache, range(10))
    pool.write(first, range(10), 0, 10)
    commit(cache, first, range(10))
    tokens = [*range(7), 70, 71]
    second = admitted(cache, tokens)
    pool.copy(second)
    pool.write(second, tokens, 7, 9)
    pool.expect(second, tokens, 9)
    pool.expect(first, range(10), 10)
    commit(cache, second, tokens)
    # A third one has most in common with the copy.
    third = admitted(cache, [*tokens[:8], 80])
    assert third.blocks[:2] == second.blocks[:2]
    pool.expect(third, tokens, 8)
    invariants.check(cache, [first, second, third])


def test_the_closest_of_many_siblings_is_copied(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, [*range(4), 5, 5, 5])  # 1, 2
    serve(cache, [*range(4), 5, 6, 6])  # 1, 3
    serve(cache, [*range(4), 6, 6, 6])  # 1, 4
    assert admitted(cache, [*range(4), 5, 6, 7]).copy == (3, 2)
    assert admitted(cache, [*range(4), 6, 7]).copy == (4, 1)
    assert admitted(cache, [*range(4), 5, 5, 5, 9]).copy == (2, 3)
    assert admitted(cache, [*range(4), 9, 9]).copy is None


# -- the hold on the source ---------------------------------------------------------------------


def test_the_source_of_a_copy_is_held_until_it_is_copied(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    serve(cache, range(9))  # 1, 2, 3
    table = admitted(cache, [*range(6), 50])
    assert (table.blocks, table.copy) == ([1, 4], (2, 2))
    assert [cache.pool.num_holds(BlockId(b)) for b in range(1, 6)] == [1, 1, 0, 1, 0]
    assert desk.plan_blocks(cache, None).carry_out(cache) == (1, 2, 0)
    assert gauges(cache) == (3, 0, 2)
    invariants.check(cache, [table])
    cache.copied(table)
    assert table.copy is None
    assert (gauges(cache), parked_blocks(cache)) == ((2, 1, 2), [2])
    cache.copied(table)  # there is none any more
    assert gauges(cache) == (2, 1, 2)
    cache.release(table)
    assert gauges(cache) == (0, 2, 3)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_request_that_ends_before_its_copy_gives_the_source_back(
    make_cache: MakeCache, is_dropped: bool
) -> None:
    cache = make_cache(6)
    serve(cache, range(7))
    table = admitted(cache, [*range(6), 50])
    if is_dropped:
        cache.drop(table)
    else:
        cache.release(table)
    assert (gauges(cache), parked_blocks(cache)) == ((0, 2, 3), [2, 1])


def test_with_a_pending_copy_nothing_is_indexed(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(7))
    tokens = [*range(6), 50, 51, 52]
    table = admitted(cache, tokens)
    before = list(cache.index), cache.counters.copy()
    commit_first(cache, table, tokens, 6)  # as a cancel before the first step does
    assert (list(cache.index), cache.counters) == before
    assert table.tail is list(cache.index)[1]  # the source has these tokens
    cache.release(table)
    assert num_cached(cache, tokens) == 6


def test_the_copy_is_left_out_where_its_source_is_the_room_that_is_missing(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(5)
    serve(cache, range(15))
    table = admitted(cache, range(16))  # needs all four blocks
    assert (table.num_hit_tokens, table.copy, table.blocks) == (12, None, [1, 2, 3, 4])
    assert table.report is not None
    assert (table.report.cached_tokens, table.report.reason) == (12, "evicted")
    assert (cache.counters.hit_tokens, cache.counters.copied_tokens) == (12, 0)
    assert cache.counters.evicted_by == {"need": 1}


def test_with_one_block_more_there_is_room_for_the_copy(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    serve(cache, range(15))
    table = admitted(cache, range(16))
    assert (table.num_hit_tokens, table.copy, table.blocks) == (15, (4, 3), [1, 2, 3, 5])
    assert gauges(cache) == (5, 0, 0)


def test_a_source_that_another_request_holds_costs_no_room(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    computed(cache, range(15))
    assert admitted(cache, range(16)).copy == (4, 3)
    assert admit(cache, range(16)) is None


# -- partly filled blocks -----------------------------------------------------------------------


def test_a_tail_is_published_grows_and_becomes_a_full_block(make_cache: MakeCache) -> None:
    cache, tokens = make_cache(8), list(range(9))
    table = admitted(cache, tokens)
    for num_tokens in (5, 6, 7, 8):
        commit_first(cache, table, tokens, num_tokens)
        assert num_cached(cache, tokens) == num_tokens
        assert (len(cache.index), cache.counters.inserted_blocks) == (2, 2)
    node = list(cache.index)[1]
    assert (node.block, node.num_tokens, len(node.earlier)) == (2, 8, 3)
    assert table.num_committed == 2
    assert table.tail is None
    commit_first(cache, table, tokens, 9)
    assert table.tail is list(cache.index)[2]
    invariants.check(cache, [table])


def test_without_is_tail_only_full_blocks_are_published(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = admitted(cache, range(7))
    cache.commit(table, chain_of(range(7)), 7)
    assert num_cached(cache, range(7)) == 4
    assert table.tail is None
    commit(cache, table, range(7))
    assert num_cached(cache, range(7)) == 7
    assert table.tail is list(cache.index)[1]
    cache.commit(table, chain_of(range(7)), 7)
    assert num_cached(cache, range(7)) == 7


def test_the_writer_goes_on_in_a_block_that_others_copy_from(make_cache: MakeCache) -> None:
    cache, pool = make_cache(10), RowPool()
    writer_tokens = list(range(8))
    writer = admitted(cache, writer_tokens)
    pool.write(writer, writer_tokens, 0, 6)
    commit_first(cache, writer, writer_tokens, 6)
    reader_tokens = [*range(6), 60, 61]
    reader = admitted(cache, reader_tokens)
    assert reader.copy == (2, 2)
    pool.write(writer, writer_tokens, 6, 8)
    commit(cache, writer, writer_tokens)  # the block is full while the copy is pending
    cache.release(writer)
    assert gauges(cache) == (3, 0, 6)
    pool.copy(reader)
    pool.write(reader, reader_tokens, 6, 8)
    commit(cache, reader, reader_tokens)
    pool.expect(reader, reader_tokens, 8)
    assert (num_cached(cache, writer_tokens), num_cached(cache, reader_tokens)) == (8, 8)
    assert parked_blocks(cache) == [2]


def test_a_shorter_tail_gives_way_to_a_longer_one(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(6))  # 1, 2
    assert serve(cache, range(7)) == [1, 3]
    assert (parked_blocks(cache), free_blocks(cache)) == ([3, 1], [4, 5, 6, 7, 2])
    assert cache.counters.superseded_blocks == 1
    assert serve(cache, range(8)) == [1, 4]
    assert (parked_blocks(cache), cache.counters.superseded_blocks) == ([4, 1], 2)


def test_a_held_tail_gives_way_when_it_is_released(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    short = computed(cache, range(6))  # 1, 2
    serve(cache, range(8))  # 1, 3
    assert (len(cache.index), cache.counters.superseded_blocks) == (3, 0)
    invariants.check(cache, [short])
    cache.release(short)
    assert (parked_blocks(cache), free_blocks(cache)) == ([3, 1], [4, 5, 6, 7, 2])
    assert cache.counters.superseded_blocks == 1


@pytest.mark.parametrize("priority", [50, 60])
def test_the_longer_one_counts_as_used_when_it_takes_over(
    make_cache: MakeCache, priority: int
) -> None:
    cache = make_cache(10)
    short = computed(cache, [1, 2], priority=priority)  # 1
    serve(cache, [1, 2, 3])  # 2
    serve(cache, [7])  # 3
    assert parked_blocks(cache) == [2, 3]
    cache.release(short)
    assert parked_blocks(cache) == [3, 2]
    node = cache.index.node_of(BlockId(2))
    assert node is not None
    assert (node.priority, node.num_hits, node.rank) == (priority, 1, (priority, False))


def test_a_tail_that_grows_is_used_then(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = computed(cache, [1, 2], room=2)
    cache.now_s = 5.0
    commit(cache, table, [1, 2, 3])
    cache.now_s = 9.0
    cache.release(table)
    (entry,) = entries(cache)[0]
    assert (entry.created_s, entry.last_used_s) == (0.0, 5.0)


def test_a_tail_that_a_keep_holds_gives_way_when_it_is_given_up(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    register(cache, "p", range(6))  # 1, 2
    serve(cache, range(8))  # 1, 3
    assert (gauges(cache), parked_blocks(cache)) == ((2, 1, 6), [3])
    assert admitted(cache, [*range(6), 60]).copy in ((2, 2), (3, 2))
    assert cache.unregister(PrefixId("p"))
    assert cache.counters.superseded_blocks == 1
    assert cache.index.node_of(BlockId(2)) is None


def test_a_tail_with_a_longer_sibling_is_not_kept_twice(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    late = admitted(cache, range(6))  # 1, 2
    serve(cache, range(7))  # 3, 4
    commit(cache, late, range(6))
    assert (late.blocks, late.tail) == ([3, 2], cache.index.node_of(BlockId(4)))
    assert cache.index.node_of(BlockId(2)) is None
    cache.release(late)
    assert parked_blocks(cache) == [4, 3]
    assert cache.counters.inserted_blocks == 2


def test_the_same_tail_computed_twice_is_kept_once(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    late = admitted(cache, range(6))
    serve(cache, range(6))
    commit(cache, late, range(6))
    assert late.tail is cache.index.node_of(BlockId(4))
    cache.release(late)
    assert (parked_blocks(cache), len(cache.index)) == ([4, 3], 2)


def test_a_full_block_takes_the_place_of_its_twin_and_of_its_own_tail(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(8)
    late = admitted(cache, range(8))  # 1, 2
    commit_first(cache, late, list(range(8)), 6)
    serve(cache, [*range(7), 70])  # 1, 3: another end
    serve(cache, range(8))  # 1, 4: copies from 3
    assert free_blocks(cache) == [5, 6, 7]
    commit(cache, late, range(8))
    assert late.blocks == [1, 4]
    assert free_blocks(cache) == [5, 6, 7, 2]  # known by six tokens until now
    assert cache.counters.duplicate_blocks == 1
    invariants.check(cache, [late])


def test_a_twin_of_a_block_whose_tail_is_pinned(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    late = admitted(cache, range(8))  # 1, 2
    commit_first(cache, late, list(range(8)), 6)
    tail = late.tail
    assert tail is not None
    assert desk.pin(cache, tail.digest.hex(), None) is not None
    serve(cache, range(8))  # 1, 3
    commit(cache, late, range(8))
    assert late.blocks == [1, 3]
    cache.release(late)
    # The pin still has its six tokens in block 2, which nobody writes any more.
    assert (gauges(cache), cache.index.node_of(BlockId(2))) == ((2, 1, 4), tail)
    assert num_cached(cache, range(6)) == 6
    desk.unpin(cache, tail.digest.hex())
    assert (parked_blocks(cache), cache.counters.superseded_blocks) == ([3, 1], 1)


def test_a_twin_of_a_block_whose_tail_is_to_be_copied(make_cache: MakeCache) -> None:
    cache, pool = make_cache(10), RowPool()
    tokens, other = list(range(8)), [*range(6), 60]
    late = admitted(cache, tokens)  # 1, 2
    pool.write(late, tokens, 0, 8)
    commit_first(cache, late, tokens, 6)
    reader = admitted(cache, other)  # 1, 3
    assert reader.copy == (2, 2)
    serve(cache, tokens)  # 1, 4
    commit(cache, late, tokens)
    cache.release(late)
    assert late.blocks == []
    pool.copy(reader)
    pool.expect(reader, other, 6)
    cache.copied(reader)
    assert cache.index.node_of(BlockId(2)) is None
    assert cache.counters.superseded_blocks == 1
    invariants.check(cache, [reader])


# -- 10 000 continuations -----------------------------------------------------------------------


def test_the_closest_of_10_000_continuations_is_found_by_two_comparisons(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(10_010)
    system = range(8)
    for number in range(10_000):
        serve(cache, [*system, number % 100, number // 100, 7])
    assert len(cache.index) == 10_002
    calls: list[int] = []

    def counting(one: bytes, other: bytes) -> int:
        calls.append(1)
        return common_tokens(one, other)

    monkeypatch.setattr(children, "common_tokens", counting)
    for continuation, num_common in [
        ([33, 44, 7], 2),
        ([33, 44, 8], 2),
        ([33, 144], 1),
        ([133], 0),
    ]:
        calls.clear()
        match = cache.match(chain_of([*system, *continuation]), 8 + len(continuation) - 1)
        assert match.num_tokens == 8 + num_common
        assert len(calls) <= 2
