"""Who runs next: exact rows, gears and blocks of every step.

Blocks hold four tokens; prefill chunks are 4 or 8, decode batches 1, 2 or 4. Rows are written as
(request, past tokens, fed tokens).
"""

from __future__ import annotations

import pytest

from om_models.manifest import Gear
from runtime_cache.engine.gears import GearTable
from tests.support.caching import free_blocks, parked_blocks
from tests.support.engine_rig import EngineRig, expected_answer, limits, small_gears

Rows = list[tuple[int, int, int]]


def roles_and_rows(rig: EngineRig) -> list[tuple[str, Rows]]:
    """Run to the end; every step as its role and rows."""
    start = max(0, len(rig.batches) - 1)
    rig.run()
    return [
        (b.role, [(int(r.request_id), r.num_past, len(r.token_ids)) for r in b.rows])
        for b in rig.batches[start:]
    ]


# -- one request --------------------------------------------------------------------------------


def test_a_prompt_is_prefilled_in_chunks_then_answered_token_by_token() -> None:
    rig = EngineRig()
    rig.arrive(range(10), max_tokens=3)
    assert roles_and_rows(rig) == [
        ("prefill", [(1, 0, 8)]),
        ("prefill", [(1, 8, 2)]),
        ("decode", [(1, 10, 1)]),
        ("decode", [(1, 11, 1)]),
    ]
    assert [batch.gear for batch in rig.batches] == [
        Gear(1, 8, 8),
        Gear(1, 4, 8),
        Gear(1, 1, 32),
        Gear(1, 1, 32),
    ]
    assert [batch.step_id for batch in rig.batches] == [1, 2, 3, 4]


def test_rows_say_where_the_past_is_and_where_the_new_kv_goes() -> None:
    rig = EngineRig()
    rig.arrive(range(50, 60), max_tokens=2)
    rig.step_done()
    (row,) = rig.batches[1].rows
    assert row.token_ids.tolist() == [58, 59]
    assert row.past_slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert row.appends == ((12, 2),)
    (first,) = rig.batches[0].rows
    assert first.appends == ((4, 4), (8, 4))
    assert first.sampler is None
    assert row.sampler is not None


def test_a_hit_prefills_only_what_is_new() -> None:
    rig = EngineRig()
    rig.arrive(range(10), max_tokens=1)
    rig.run()
    rows_before = rig.pool.num_rows_written
    second = rig.arrive([*range(8), 40, 41, 42], max_tokens=1)
    assert rig.rows() == [(second, 8, 3)]
    rig.run()
    assert rig.pool.num_rows_written - rows_before == 3
    usage = rig.finished(second).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens) == (11, 8, 3)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 8, 9, 12])
def test_a_full_hit_still_computes_the_last_token(num_tokens: int) -> None:
    rig = EngineRig()
    first = rig.arrive(range(num_tokens), max_tokens=2)
    rig.run()
    second = rig.arrive(range(num_tokens), max_tokens=2)
    assert rig.rows() == [(second, num_tokens - 1, 1)]
    rig.run()
    assert rig.finished(second).usage.cached_tokens == num_tokens - 1
    assert rig.token_ids[first] == rig.token_ids[second] == expected_answer(range(num_tokens), 2)


def test_a_single_new_token_joins_a_decode_step() -> None:
    rig = EngineRig()
    rig.arrive(range(9), max_tokens=1)
    rig.run()
    rig.arrive([50], max_tokens=1)
    assert (rig.batches[-1].role, rig.rows()) == ("decode", [(2, 0, 1)])
    rig.arrive([*range(8), 60], max_tokens=1)
    rig.arrive([61], max_tokens=1)
    rig.step_done()
    assert (rig.batches[-1].role, rig.rows()) == ("decode", [(3, 8, 1), (4, 0, 1)])
    rig.run()
    assert rig.finished(3).usage.prefilled_tokens == 1
    assert rig.state.snapshot().engine.decode_tokens == 0


# -- answers and prompts together ---------------------------------------------------------------


def test_requests_join_the_decode_batch_at_any_step() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=6)
    rig.step_done()
    rig.arrive([4, 5, 6], max_tokens=2)
    rig.step_done()
    assert roles_and_rows(rig) == [
        ("prefill", [(2, 0, 3)]),
        ("decode", [(1, 4, 1), (2, 3, 1)]),
        ("decode", [(1, 5, 1)]),
        ("decode", [(1, 6, 1)]),
        ("decode", [(1, 7, 1)]),
    ]


def test_chunks_and_decode_steps_alternate_and_chunks_are_capped() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=5)
    rig.step_done()
    rig.arrive(range(18), max_tokens=1)
    assert roles_and_rows(rig) == [
        ("decode", [(1, 3, 1)]),
        ("prefill", [(2, 0, 4)]),
        ("decode", [(1, 4, 1)]),
        ("prefill", [(2, 4, 4)]),
        ("decode", [(1, 5, 1)]),
        ("prefill", [(2, 8, 4)]),
        ("decode", [(1, 6, 1)]),  # the last of 5: from here on nobody waits, so chunks are large
        ("prefill", [(2, 12, 6)]),
    ]


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    rig = EngineRig(gears=small_gears(max_batch=8))
    ids = [rig.arrive(range(17), max_tokens=1) for _ in range(8)]
    rig.run()
    assert rig.pool.num_rows_written == 17 + 7
    assert [rig.finished(i).usage.cached_tokens for i in ids] == [0] + [16] * 7


def test_the_next_waiter_takes_over_a_cancelled_prefill() -> None:
    rig = EngineRig()
    first, second = rig.arrive(range(17), max_tokens=1), rig.arrive(range(17), max_tokens=1)
    rig.step_done()
    rig.cancel(first)
    rig.step_done()
    assert rig.rows() == [(second, 16, 1)]


def test_first_come_first_served() -> None:
    rig = EngineRig(config=limits(interleave_chunk_tokens=4, max_running=1))
    for start in (0, 20, 40):
        rig.arrive(range(start, start + 6), max_tokens=1)
    assert [rows for _, rows in roles_and_rows(rig)] == [[(1, 0, 6)], [(2, 0, 6)], [(3, 0, 6)]]


@pytest.mark.parametrize(("num_requests", "num_rows"), [(3, 3), (4, 4), (5, 4)])
def test_a_decode_step_feeds_up_to_the_largest_batch(num_requests: int, num_rows: int) -> None:
    rig = EngineRig()
    for token in range(num_requests):
        rig.arrive([token], max_tokens=2)
    rig.run()
    assert max(len(batch.rows) for batch in rig.batches) == num_rows


def test_answers_take_turns_if_more_run_than_a_step_can_feed() -> None:
    rig = EngineRig(config=limits(max_running=3), gears=small_gears(max_batch=2))
    for token in (10, 20, 30):
        rig.arrive([token], max_tokens=3)
    assert [rows for _, rows in roles_and_rows(rig)] == [
        [(1, 0, 1)],
        [(2, 0, 1), (3, 0, 1)],
        [(1, 1, 1), (2, 1, 1)],
        [(3, 1, 1), (1, 2, 1)],
        [(2, 2, 1), (3, 2, 1)],
    ]


def test_a_long_past_narrows_the_batch_but_starves_nobody() -> None:
    gears = GearTable([Gear(1, 8, 32)], [Gear(2, 1, 8), Gear(1, 1, 32)])
    rig = EngineRig(gears=gears)
    rig.arrive(range(8), max_tokens=3)
    rig.step_done()
    rig.arrive([50], max_tokens=3)
    assert [rows for _, rows in roles_and_rows(rig)] == [
        [(1, 8, 1)],
        [(2, 0, 1)],
        [(1, 9, 1)],
        [(2, 1, 1)],
        [(2, 2, 1)],
    ]


# -- a short pool -------------------------------------------------------------------------------


def test_a_prompt_waits_until_all_its_blocks_are_there() -> None:
    rig = EngineRig(num_blocks=5)
    rig.arrive(range(9), max_tokens=2)
    rig.arrive(range(20, 25), max_tokens=1)
    rig.step_done()
    rig.step_done()
    assert rig.rows() == [(1, 9, 1)]  # three of four blocks are held, two more are needed
    rig.step_done()
    assert rig.rows() == [(2, 0, 5)]


def test_the_youngest_gives_way_and_goes_on_later() -> None:
    rig = EngineRig(num_blocks=4)  # three usable
    rig.arrive([10, 11, 12], max_tokens=6)
    rig.arrive([20, 21, 22], max_tokens=6)
    assert roles_and_rows(rig) == [
        ("prefill", [(1, 0, 3)]),
        ("decode", [(1, 3, 1)]),
        ("prefill", [(2, 0, 3)]),
        ("decode", [(1, 4, 1), (2, 3, 1)]),  # 1 holds two blocks, 2 one
        ("decode", [(1, 5, 1)]),  # 2 needs a second block and gives way
        ("decode", [(1, 6, 1)]),
        ("decode", [(1, 7, 1)]),
        ("decode", [(2, 4, 1)]),  # its first block was committed and is still cached
        ("decode", [(2, 5, 1)]),
        ("decode", [(2, 6, 1)]),
        ("decode", [(2, 7, 1)]),
    ]
    assert rig.state.snapshot().engine.preemptions == 1
    assert rig.token_ids[1] == expected_answer([10, 11, 12], 6)
    assert rig.token_ids[2] == expected_answer([20, 21, 22], 6)
    assert len(rig.texts[2]) == 6


def test_an_older_answer_takes_the_blocks_of_a_younger_prompt() -> None:
    rig = EngineRig(num_blocks=5)
    rig.arrive(range(7), max_tokens=5)
    rig.arrive(range(20, 27), max_tokens=4)
    rig.step_done()
    assert (rig.rows(), rig.gauges()) == ([(1, 7, 1)], (4, 0, 0))
    rig.step_done()
    assert (rig.rows(), rig.gauges()) == ([(1, 8, 1)], (3, 0, 1))
    assert rig.state.snapshot().num_waiting == 1
    rig.run()
    assert rig.finished(2).usage.prefilled_tokens == 7


def test_the_oldest_never_gives_way() -> None:
    rig = EngineRig(num_blocks=4)
    for start in (10, 20, 30):
        rig.arrive([start, start + 1, start + 2], max_tokens=9)
    while 1 not in rig.finals:
        assert rig.state._scheduler.running[0].request.request_id == 1
        rig.step_done()
    rig.run()
    assert rig.state.snapshot().engine.preemptions >= 2
    assert [len(rig.token_ids[i]) for i in (1, 2, 3)] == [9, 9, 9]


def test_a_preempted_request_counts_once_in_the_hit_counters() -> None:
    rig = EngineRig(num_blocks=4)
    rig.arrive([10, 11, 12], max_tokens=6)
    rig.arrive([20, 21, 22], max_tokens=6)
    rig.run()
    snapshot = rig.state.snapshot()
    assert snapshot.engine.preemptions == 1
    assert snapshot.cache.queried_tokens == 6
    assert rig.finished(2).usage.cached_tokens == 0
    assert rig.finished(2).usage.completion_tokens == 6


def test_eviction_follows_the_order_of_use() -> None:
    rig = EngineRig(num_blocks=6)
    rig.arrive(range(5), max_tokens=1)
    rig.run()
    rig.arrive(range(20, 25), max_tokens=1)
    rig.run()
    assert (parked_blocks(rig.cache), free_blocks(rig.cache)) == ([2, 1, 4, 3], [5])
    rig.arrive(range(40, 54), max_tokens=1)
    assert (rig.gauges(), parked_blocks(rig.cache)) == ((4, 1, 0), [3])
    rig.run()
    assert rig.arrive(range(5), max_tokens=1) == 4
    assert rig.rows() == [(4, 0, 5)]
