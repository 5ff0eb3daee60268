"""Steps that fail, logits that are bad, digests that collide: what stays in the cache then."""

from __future__ import annotations

from runtime_cache.cache import desk, invariants
from runtime_cache.ids import BlockId
from tests.support.caching import (
    MakeCache,
    admitted,
    chain_of,
    computed,
    entries,
    free_blocks,
    gauges,
    num_cached,
    parked_blocks,
    register,
    serve,
)

# -- a failed step ------------------------------------------------------------------------------


def test_a_failed_step_leaves_only_free_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = admitted(cache, range(9))
    cache.commit(table, chain_of(range(9)), 4)
    cache.drop(table)
    assert num_cached(cache, range(9)) == 4
    assert cache.counters.dropped_blocks == 2
    assert (gauges(cache), free_blocks(cache)) == ((0, 1, 6), [4, 5, 6, 7, 3, 2])


def test_a_failed_step_takes_the_partly_filled_block_with_it(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = computed(cache, range(6), room=4)
    assert num_cached(cache, range(6)) == 6
    cache.drop(table)
    assert num_cached(cache, range(6)) == 4
    assert (gauges(cache), parked_blocks(cache)) == ((0, 1, 6), [1])
    assert cache.counters.dropped_blocks == 1


def test_a_failed_step_takes_that_block_from_who_keeps_it_too(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    table = computed(cache, range(6), room=4)
    assert table.tail is not None
    digest = table.tail.digest.hex()
    assert desk.pin(cache, digest, None) is not None
    cache.drop(table)
    # The pin goes on holding the block, which nobody finds any more.
    assert (num_cached(cache, range(6)), gauges(cache)) == (4, (2, 0, 7))
    (entry,) = entries(cache)[0]
    assert entry.keep is not None
    assert (entry.num_tokens, entry.keep.digest) == (4, digest)
    assert serve(cache, range(6)) == [1, 3]
    assert num_cached(cache, range(6)) == 6
    assert desk.unpin(cache, digest).num_tokens == 6
    assert gauges(cache) == (0, 2, 7)
    assert free_blocks(cache)[-1] == 2


def test_a_failed_step_of_a_writer_does_not_free_what_is_to_be_copied(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(8)
    writer = computed(cache, range(6), room=4)  # 1, 2
    reader = admitted(cache, [*range(6), 60])  # 1, 3, and 2 to copy from
    assert reader.copy == (2, 2)
    cache.drop(writer)
    assert cache.index.node_of(BlockId(2)) is None
    assert cache.pool.num_holds(BlockId(2)) == 1
    invariants.check(cache, [reader])
    # The engine takes the reader's blocks from it and admits it anew: it finds the tail no more.
    cache.commit(reader, chain_of([*range(6), 60]), 6, is_tail=True)
    assert reader.tail is None
    cache.release(reader)
    assert gauges(cache) == (0, 1, 6)
    again = admitted(cache, [*range(6), 60], is_retry=True)
    assert (again.num_hit_tokens, again.copy) == (4, None)


def test_a_failed_first_step_gives_the_source_of_its_copy_back(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(6))
    cache.drop(admitted(cache, [*range(6), 60]))
    assert num_cached(cache, range(6)) == 6
    assert (gauges(cache), cache.counters.dropped_blocks) == ((0, 2, 5), 1)


def test_what_was_copied_before_a_failure_stays(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    writer = computed(cache, range(6), room=4)
    tokens = [*range(6), 60]
    reader = computed(cache, tokens)
    cache.drop(writer)
    assert num_cached(cache, tokens) == 7
    cache.release(reader)
    assert gauges(cache) == (0, 2, 5)


# -- bad logits ---------------------------------------------------------------------------------


def test_a_suspect_chain_is_forgotten_as_far_as_it_is_nobody_elses(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(12))
    serve(cache, [*range(4), *range(50, 54)])  # continues the first block
    suspect = admitted(cache, range(13))
    assert suspect.num_committed == 3
    cache.drop(suspect, is_all_suspect=True)
    assert (cache.counters.dropped_blocks, cache.counters.evicted_blocks) == (3, 0)
    assert num_cached(cache, range(13)) == 4
    assert num_cached(cache, [*range(4), *range(50, 54)]) == 8


def test_a_suspect_chain_that_another_holds_stays(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(8))
    suspect, other = admitted(cache, range(9)), admitted(cache, range(9))
    cache.drop(suspect, is_all_suspect=True)
    assert num_cached(cache, range(9)) == 8
    cache.release(other)


def test_a_suspect_chain_that_is_kept_stays(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    register(cache, "p", range(4))
    suspect = computed(cache, range(9))
    cache.drop(suspect, is_all_suspect=True)
    assert (num_cached(cache, range(9)), gauges(cache)) == (4, (1, 0, 10))


def test_where_suspect_rows_were_copied_from_is_forgotten_too(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(7))  # 1, 2: bad rows
    for expected in (6, 0):
        table = admitted(cache, range(7))
        assert table.num_hit_tokens == expected  # a second request does not read them again
        cache.copied(table)
        cache.drop(table, is_all_suspect=True)
    assert gauges(cache) == (0, 0, 11)


def test_where_suspect_rows_were_copied_from_stays_if_it_is_anothers(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(12)
    serve(cache, range(12))  # 1, 2, 3
    table = admitted(cache, [*range(6), 60])  # of 2, which 3 continues
    cache.copied(table)
    cache.drop(table, is_all_suspect=True)
    assert num_cached(cache, range(12)) == 12
    held = computed(cache, [*range(4), 50, 51])  # 1, 5
    table = admitted(cache, [*range(4), 50, 60])
    assert table.copy == (5, 1)
    cache.copied(table)
    cache.drop(table, is_all_suspect=True)
    assert num_cached(cache, [*range(4), 50, 51]) == 6
    invariants.check(cache, [held])


def test_a_source_that_has_left_the_cache_is_not_forgotten_twice(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(6))
    table = admitted(cache, [*range(6), 60])
    cache.copied(table)
    desk.plan_blocks(cache, None).carry_out(cache)
    assert serve(cache, range(100, 136))[-1] == 2  # the block is another's now
    before = num_cached(cache, range(100, 136))
    cache.drop(table, is_all_suspect=True)
    assert num_cached(cache, range(100, 136)) == before == 36


def test_what_stays_is_told(make_cache: MakeCache) -> None:
    cache = make_cache(20)
    serve(cache, [*range(8), 50])  # 1, 2, 3
    others = [admitted(cache, [*range(8), 60]), admitted(cache, [*range(4), 70])]
    tables = [admitted(cache, [*range(8), last]) for last in (61, 62)]
    assert cache.drop(tables[0]) == []  # a failed step is nothing against what it only read
    stayed = cache.drop(tables[1], is_all_suspect=True)
    assert [node.block for node in stayed] == [1, 2]
    assert num_cached(cache, range(8)) == 8
    invariants.check(cache, others)


def test_a_source_that_stays_is_told_last(make_cache: MakeCache) -> None:
    cache = make_cache(20)
    serve(cache, range(12))  # 1, 2, 3
    table = admitted(cache, [*range(6), 60])  # copies from 2, which 3 continues
    stayed = cache.drop(table, is_all_suspect=True)
    assert [node.block for node in stayed] == [1, 2]
