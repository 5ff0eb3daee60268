"""What a reading of cached KV says, and what leaves the cache then. Blocks hold four tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime_cache.cache import desk, invariants
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.verification import Reading, Verdict, blocks_to_read, judge
from runtime_cache.errors import InvalidRequest, UnknownEntry
from runtime_cache.ids import BlockId, PrefixId
from tests.support.caching import (
    MakeCache,
    admitted,
    chain_of,
    commit,
    computed,
    digests_of,
    entries,
    free_blocks,
    gauges,
    num_cached,
    register,
    serve,
)

RIGHT, WRONG = b"right", b"wrong"


def to_read(cache: CacheManager, digest: str | None = None, first_block: int = 0) -> list[int]:
    return [int(node.block) for node in blocks_to_read(cache, digest, first_block)]


def reading(
    cache: CacheManager, block: int, checksum: bytes = RIGHT, *, is_finite: bool = True
) -> Reading:
    """A reading of a cached block, begun and over now."""
    node = cache.index.node_of(BlockId(block))
    assert node is not None
    return Reading(node, node.num_rows, cache.now_s, checksum, is_finite)


def found(
    cache: CacheManager, block: int, checksum: bytes = RIGHT, tables: Sequence[BlockTable] = ()
) -> Verdict:
    """Read a block and have it judged."""
    verdict = judge(cache, reading(cache, block, checksum), tables)
    invariants.check(cache, tables)
    return verdict


def verify_all(cache: CacheManager) -> None:
    """Every block is what it is to be."""
    for block in to_read(cache):
        found(cache, block)


# -- what to read -------------------------------------------------------------------------------


def test_nothing_is_read_of_an_empty_cache(make_cache: MakeCache) -> None:
    assert to_read(make_cache(8)) == []


def test_blocks_are_read_in_the_order_of_their_numbers(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(100, 103))
    assert serve(cache, range(10)) == [2, 3, 4]
    table = computed(cache, range(200, 205))
    assert to_read(cache) == [1, 2, 3, 4, 5, 6]  # held ones as well
    assert to_read(cache, first_block=3) == [3, 4, 5, 6]
    assert to_read(cache, first_block=6) == [6]
    assert to_read(cache, first_block=7) == []
    cache.release(table)


def test_the_blocks_of_one_prefix(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(4))
    serve(cache, range(100, 104))
    assert serve(cache, [*range(8), 50]) == [1, 3, 4]
    digest = digests_of(range(8))[1]
    assert to_read(cache, digest) == to_read(cache, digest[:8]) == [1, 3]
    assert to_read(cache, digest, first_block=2) == [3]
    assert to_read(cache, digest, first_block=4) == []
    with pytest.raises(UnknownEntry):
        to_read(cache, "0" * 64)
    with pytest.raises(InvalidRequest):
        to_read(cache, "")


# -- what a reading says ------------------------------------------------------------------------


def test_the_first_reading_is_remembered_and_the_next_ones_compared(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    assert [found(cache, 1) for _ in range(3)] == [Verdict("new"), Verdict("same"), Verdict("same")]
    assert found(cache, 1, WRONG) == Verdict("changed", num_dropped=1)
    assert gauges(cache) == (0, 0, 7)
    assert cache.counters.damaged_blocks == 1
    assert cache.counters.evicted_blocks == cache.counters.dropped_blocks == 0


def test_what_is_not_finite_was_never_right(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    serve(cache, range(100, 104))
    found(cache, 2)
    for block in (1, 2):  # never read before, and read before
        verdict = judge(cache, reading(cache, block, is_finite=False), ())
        assert verdict == Verdict("not_finite", num_dropped=1)
    assert gauges(cache) == (0, 0, 7)


def test_what_has_left_the_cache_is_not_judged(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    found(cache, 1)
    late = reading(cache, 1, WRONG)
    desk.plan_blocks(cache, None).carry_out(cache)
    serve(cache, range(100, 128))  # the block holds something else now
    serve(cache, range(4))
    assert judge(cache, late, ()) == Verdict("gone")
    assert cache.counters.damaged_blocks == 0


def test_the_same_tokens_computed_again_are_another_block(make_cache: MakeCache) -> None:
    cache = make_cache(3)
    for checksum in (RIGHT, WRONG):  # another kind of step may round in another way
        (block,) = serve(cache, range(4))
        assert found(cache, block, checksum) == Verdict("new")
        desk.plan_blocks(cache, None).carry_out(cache)


def test_a_block_that_has_got_more_tokens_is_new_again(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = admitted(cache, range(4))
    cache.commit(table, chain_of(range(4)), 3, is_tail=True)
    assert found(cache, 1, RIGHT, [table]) == Verdict("new")
    late = reading(cache, 1, RIGHT)
    commit(cache, table, range(4))
    assert judge(cache, late, [table]) == Verdict("gone")  # it read three rows of four
    assert found(cache, 1, WRONG, [table]) == Verdict("new")
    assert found(cache, 1, WRONG, [table]) == Verdict("same")
    cache.release(table)


# -- what leaves with a damaged block -----------------------------------------------------------


def test_all_that_goes_on_from_it_leaves_and_nothing_else(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(14))  # blocks 1 to 4
    serve(cache, [*range(8), 50, 51, 52, 53])  # block 5 behind 2
    serve(cache, range(100, 109))  # blocks 6 to 8
    verify_all(cache)
    assert found(cache, 2, WRONG) == Verdict("changed", num_dropped=4)
    assert to_read(cache) == [1, 6, 7, 8]
    assert (num_cached(cache, range(14)), num_cached(cache, range(100, 109))) == (4, 9)
    assert sorted(free_blocks(cache)) == [2, 3, 4, 5, 9, 10, 11]


def test_what_was_lost_is_computed_and_cached_again(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    verify_all(cache)
    found(cache, 1, WRONG)
    table = admitted(cache, range(8))
    assert table.report is not None
    assert (table.num_hit_tokens, table.report.reason) == (0, "cold")
    commit(cache, table, range(8))
    cache.release(table)
    assert num_cached(cache, range(8)) == 8


@pytest.mark.parametrize(("seconds_after", "is_suspect"), [(-1, False), (0, True), (1, True)])
def test_a_sibling_made_since_it_was_right_may_be_a_copy_of_it(
    make_cache: MakeCache, seconds_after: int, is_suspect: bool
) -> None:
    cache = make_cache(12)
    serve(cache, [1, 2, 3, 4])
    serve(cache, [9, 9, 9, 9])  # shares no token, so no row of it was copied
    cache.now_s = 100.0 + seconds_after
    serve(cache, [1, 2, 3, 5, 6])  # blocks 3 and 4
    cache.now_s = 100.0
    found(cache, 1)
    cache.now_s = 200.0
    verdict = found(cache, 1, WRONG)
    assert verdict == Verdict("changed", num_dropped=3 if is_suspect else 1)
    assert to_read(cache) == ([2] if is_suspect else [2, 3, 4])


def test_each_good_reading_clears_what_was_copied_before_it(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, [1, 2, 3, 4])
    found(cache, 1)
    cache.now_s += 1
    serve(cache, [1, 2, 3, 5])
    cache.now_s += 1
    assert found(cache, 1) == Verdict("same")
    cache.now_s += 1
    assert found(cache, 1, WRONG) == Verdict("changed", num_dropped=1)
    assert to_read(cache) == [2]


def test_every_sibling_is_suspect_if_it_was_never_right(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, [1, 2, 3, 4])
    serve(cache, [1, 2, 3, 5])
    serve(cache, [2, 2, 3, 5])
    assert judge(cache, reading(cache, 1, is_finite=False), ()).num_dropped == 2
    assert to_read(cache) == [3]


# -- who holds it, goes on ----------------------------------------------------------------------


def test_a_request_keeps_its_damaged_block_and_leaves_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    serve(cache, range(8))
    verify_all(cache)
    table = computed(cache, range(12), room=8)
    other = computed(cache, range(200, 204))
    tables = [table, other]
    assert found(cache, 2, WRONG, tables) == Verdict("changed", num_dropped=2, num_in_use=2)
    assert (table.blocks, table.num_committed) == ([1, 2, 3], 1)
    assert to_read(cache) == [1, 4]
    # It goes on: what it computes is for nobody else.
    assert cache.reserve(table, 20)
    commit(cache, table, range(20))
    assert num_cached(cache, range(20)) == 4
    # A newcomer computes the same anew, into blocks of its own.
    assert serve(cache, range(8)) == [1, 7]
    cache.release(table)
    invariants.check(cache, [other])
    assert num_cached(cache, range(8)) == 8
    assert other.is_caching
    cache.release(other)
    assert gauges(cache) == (0, 3, 8)


def test_a_partly_filled_block_that_its_owner_fills_up_stays_out(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    table = computed(cache, range(6), room=4)
    for checksum in (RIGHT, WRONG):
        found(cache, 2, checksum, [table])
    commit(cache, table, range(9))
    assert to_read(cache) == [1]
    cache.release(table)
    assert gauges(cache) == (0, 1, 6)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_request_that_copies_from_it_leaves_nothing(
    make_cache: MakeCache, is_copied: bool
) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    found(cache, 1)
    table = admitted(cache, [0, 1, 9])
    assert table.copy == (1, 2)
    if is_copied:
        cache.copied(table)
    cache.now_s += 1
    assert found(cache, 1, WRONG, [table]).num_in_use == (not is_copied)
    commit(cache, table, [0, 1, 9])
    assert to_read(cache) == []
    cache.release(table)
    assert gauges(cache) == (0, 0, 7)


def test_a_failed_step_of_a_request_with_a_damaged_block(make_cache: MakeCache) -> None:
    for is_all_suspect in (False, True):
        cache = make_cache(8)
        table = computed(cache, range(10), room=4)
        for checksum in (RIGHT, WRONG):
            found(cache, 2, checksum, [table])
        cache.drop(table, is_all_suspect=is_all_suspect)
        assert to_read(cache) == ([] if is_all_suspect else [1])


def test_a_registration_keeps_it_until_it_is_made_again(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    keep = register(cache, "p", range(10))
    assert keep is not None
    verify_all(cache)
    assert found(cache, 2, WRONG) == Verdict("changed", num_dropped=2, num_in_use=2)
    assert gauges(cache) == (3, 0, 8)
    ((entry,), total) = entries(cache)
    assert (entry.num_tokens, total) == (4, 1)
    again = register(cache, "p", range(10))
    assert again is not None
    assert (again.num_tokens, num_cached(cache, range(10))) == (10, 10)
    assert gauges(cache) == (3, 0, 8)
    assert cache.unregister(PrefixId("p"))
    assert gauges(cache) == (0, 3, 8)


def test_a_registration_in_work_keeps_what_is_right(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    table = computed(cache, range(10))
    for checksum in (RIGHT, WRONG):
        found(cache, 2, checksum, [table])
    commit(cache, table, range(10))
    keep = cache.register(PrefixId("p"), table)
    assert keep is not None
    assert (keep.num_tokens, keep.blocks) == (4, (1,))
    cache.release(table)
    assert gauges(cache) == (1, 0, 10)


def test_a_pin_ends_as_it_began(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(8))
    digest = digests_of(range(8))[1]
    assert desk.pin(cache, digest, None) is not None
    for checksum in (RIGHT, WRONG):
        found(cache, 1, checksum)
    assert gauges(cache) == (2, 0, 5)
    assert to_read(cache) == []
    assert desk.unpin(cache, digest[:8]).digest == digest
    assert gauges(cache) == (0, 0, 7)
