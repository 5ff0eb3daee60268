"""Steps that fail or do not end: who is computed again, who fails, and what becomes of blocks."""

from __future__ import annotations

import pytest

from runtime_cache.cache.policy import CachePolicy
from runtime_cache.engine.commands import FailRequest
from runtime_cache.engine.events import StepHung
from runtime_cache.engine.sequence import Sequence
from runtime_cache.errors import InternalError
from runtime_cache.ids import RequestId, StepId
from tests.support.engine_rig import EngineRig, expected_answer, limits, small_gears

#: Two blocks and a half: a chunk of 8 and one of 2.
PROMPT = list(range(10, 20))
NUM_TOKENS = 6
FAILED = FailRequest(RequestId(1), "device", "broken", True)


def new_rig(**changes: object) -> EngineRig:
    return EngineRig(config=limits(on_failed_step="recompute"), **changes)  # type: ignore[arg-type]


def sequence_of(rig: EngineRig, request_id: int) -> Sequence:
    return rig.state._unanswered[RequestId(request_id)]


# -- computed again -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_done", range(7))
def test_a_step_that_fails_anywhere_costs_no_token(num_done: int) -> None:
    rig = new_rig()
    rig.arrive(PROMPT, NUM_TOKENS)
    for _ in range(num_done):
        rig.step_done()
    before = list(rig.token_ids[1])
    rig.step_failed()
    assert rig.token_ids[1] == before  # nothing is said twice, nothing taken back
    assert not any(isinstance(command, FailRequest) for command in rig.commands)
    rig.run()
    assert rig.token_ids[1] == expected_answer(PROMPT, NUM_TOKENS)
    assert len(rig.texts[1]) == NUM_TOKENS
    assert rig.finished(1).usage.completion_tokens == NUM_TOKENS
    counters = rig.state.snapshot().engine
    assert (counters.failed_steps, counters.recomputed, counters.failed) == (1, 1, 0)
    assert counters.recomputed_by == {"failed_step": 1}


def test_whole_blocks_of_earlier_steps_are_reused_and_nothing_else() -> None:
    rig = new_rig()
    rig.arrive(PROMPT, NUM_TOKENS)
    for _ in range(4):
        rig.step_done()
    assert rig.rows() == [(1, 12, 1)]  # the third block is full, and was written before
    rig.step_done()
    assert rig.rows() == [(1, 13, 1)]
    rig.step_failed()
    assert rig.rows() == [(1, 12, 2)]
    assert rig.cache.counters.dropped_blocks == 1
    rig.run()
    assert rig.finished(1).usage.prefilled_tokens == 10 + 2


def test_the_partly_filled_block_of_the_prompt_is_dropped_with_the_step_behind_it() -> None:
    rig = new_rig()
    rig.arrive(PROMPT, NUM_TOKENS)
    rig.step_done()
    rig.step_done()
    assert rig.cache.report(sequence_of(rig, 1).chain, 10).cached_tokens == 10
    rig.step_failed()
    assert rig.rows() == [(1, 8, 3)]  # two tokens of the prompt, one of the answer


def test_a_second_failure_is_told() -> None:
    rig = new_rig()
    rig.arrive(PROMPT, NUM_TOKENS)
    rig.step_failed()
    rig.step_done()
    rig.step_failed()
    assert rig.commands == [FAILED]
    assert rig.gauges() == (0, 2, 21)
    counters = rig.state.snapshot().engine
    assert (counters.failed_steps, counters.recomputed, counters.failed) == (2, 1, 1)


def test_what_would_fail_again_is_not_tried_again() -> None:
    rig = new_rig()
    rig.arrive(PROMPT)
    rig.step_failed(retryable=False)
    assert rig.commands == [FailRequest(RequestId(1), "device", "broken", False)]
    assert rig.state.snapshot().engine.recomputed == 0


def test_all_requests_of_a_step_are_computed_again_oldest_first() -> None:
    rig = new_rig()
    prompts = [list(range(start, start + 6)) for start in (10, 30, 50)]
    for prompt in prompts:
        rig.arrive(prompt, 9)
    while len(rig.rows()) < 3:
        rig.step_done()
    rig.step_failed()
    assert [s.request.request_id for s in rig.state._scheduler.waiting] == [2, 3]
    assert [s.request.request_id for s in rig.state._scheduler.running] == [1]
    rig.run()
    for request_id, prompt in enumerate(prompts, start=1):
        assert rig.token_ids[request_id] == expected_answer(prompt, 9)
    assert rig.state.snapshot().engine.recomputed == 3


def test_who_is_computed_again_goes_before_who_waits() -> None:
    rig = EngineRig(config=limits(on_failed_step="recompute", max_running=1))
    rig.arrive(PROMPT)
    rig.arrive(range(30, 35))
    rig.step_failed()
    assert rig.rows()[0][0] == 1


def test_a_cancelled_request_is_not_computed_again() -> None:
    rig = new_rig()
    rig.arrive(PROMPT)
    rig.cancel(1)
    rig.step_failed()
    assert (rig.batch, rig.gauges()) == (None, (0, 0, 23))
    assert rig.state.snapshot().engine.recomputed == 0


def test_who_is_computed_again_can_be_cancelled_and_run_out_of_time() -> None:
    rig = EngineRig(config=limits(on_failed_step="recompute", max_running=1))
    rig.arrive(PROMPT, deadline_s=rig.now_s + 5)
    rig.step_failed()
    rig.tick(5)
    assert rig.finished(1).reason == "deadline"
    rig.step_failed()
    assert rig.batch is None


def test_a_registration_is_computed_again() -> None:
    rig = new_rig()
    rig.register("p", PROMPT)
    rig.step_done()
    rig.step_failed()
    assert rig.rows() == [(1, 8, 2)]
    rig.run()
    assert rig.finished(1).num_kept_blocks == 3
    assert rig.gauges() == (3, 0, 20)


def test_who_had_bad_logits_before_still_goes_on_without_the_cache() -> None:
    rig = new_rig()
    for last in (50, 51):  # so that another's blocks go on from the damaged ones
        rig.arrive([*PROMPT, last], 2)
        rig.run()
    rig.arrive([*PROMPT, 52], 2)
    rig.step_done(bad=3)
    rig.step_failed()
    assert rig.rows() == [(3, 0, 8)]
    rig.run()
    assert rig.token_ids[3] == expected_answer([*PROMPT, 52], 2)
    counters = rig.state.snapshot().engine
    assert counters.recomputed_by == {"bad_logits": 1, "failed_step": 1}
    assert rig.cache.counters.damaged_blocks > 0  # its suspects are remembered


@pytest.mark.parametrize("num_done", range(6))
def test_deterministic_mode_computes_again_as_at_first(num_done: int) -> None:
    gears = small_gears().fixed(4)
    rig = EngineRig(
        gears=gears,
        policy=CachePolicy(grid_tokens=gears.chunk),
        config=limits(on_failed_step="recompute", is_deterministic=True),
    )
    rig.arrive(PROMPT, 4)
    for _ in range(num_done):
        rig.step_done()
    rig.step_failed()
    rig.run()  # the rig looks at how each row it reads was computed
    assert rig.token_ids[1] == expected_answer(PROMPT, 4)


def test_a_tenant_alone_with_a_full_pool_is_computed_again() -> None:
    rig = EngineRig(num_blocks=5, config=limits(on_failed_step="recompute"))
    rig.arrive(range(9), 8)
    rig.arrive(range(20, 29), 8)
    for _ in range(3):
        rig.step_done()
    rig.step_failed()
    rig.run()
    assert rig.token_ids[1] == expected_answer(range(9), 8)
    assert rig.token_ids[2] == expected_answer(range(20, 29), 8)


# -- a step that does not end -------------------------------------------------------------------


def test_the_blocks_of_a_hung_step_stay_until_it_is_over() -> None:
    rig = new_rig(num_blocks=4)
    rig.arrive(PROMPT, 2)
    rig.step_hung()
    assert (rig.gauges(), len(rig.cache.index)) == ((3, 0, 0), 0)
    rig.arrive(range(30, 36), 1)
    rig.cancel(1)
    rig.tick(1.0)
    rig.evict()
    assert rig.finished(1).reason == "cancelled"
    assert (rig.gauges(), len(rig.cache.index)) == ((3, 0, 0), 0)
    assert len(rig.batches) == 1
    rig.step_failed()
    assert rig.rows() == [(2, 0, 6)]
    rig.run()
    assert rig.token_ids[2] == expected_answer(range(30, 36), 1)
    counters = rig.state.snapshot().engine
    assert (counters.hung_steps, counters.failed_steps) == (1, 1)


def test_requests_of_a_hung_step_wait_and_are_computed_again() -> None:
    rig = new_rig()
    rig.arrive(PROMPT, 2)
    rig.step_hung()
    assert rig.commands == []
    rig.step_failed()
    rig.run()
    assert rig.token_ids[1] == expected_answer(PROMPT, 2)


def test_they_are_told_at_once_if_they_would_not_be_computed_again() -> None:
    rig = EngineRig()
    rig.arrive(PROMPT, 2)
    rig.step_hung()
    assert rig.commands == [FailRequest(RequestId(1), "step_timeout", "late", True)]
    assert rig.gauges() == (3, 0, 20)
    rig.step_failed()
    assert (rig.commands, rig.gauges()) == ([], (0, 0, 23))
    assert rig.state.snapshot().engine.failed == 1


def test_a_second_failure_is_told_as_soon_as_the_step_hangs() -> None:
    rig = new_rig()
    for start in (10, 30):
        rig.arrive(range(start, start + 4), 9)
    rig.step_failed()
    while len(rig.rows()) < 2:
        rig.step_done()
    rig.step_hung()
    assert [c.request_id for c in rig.commands if isinstance(c, FailRequest)] == [1]
    rig.step_failed()
    rig.run()
    assert rig.token_ids[2] == expected_answer(range(30, 34), 9)


def test_the_queue_fills_up_behind_a_hung_step() -> None:
    rig = EngineRig(config=limits(on_failed_step="recompute", max_waiting=2))
    rig.arrive(PROMPT)
    rig.step_hung()
    for _ in range(3):
        rig.arrive(PROMPT)
    refused = rig.failed(4)
    assert (refused.code, refused.retryable, refused.retry_after_ms) == ("queue_full", True, 1000)
    rig.step_failed()
    rig.run()
    assert [rig.token_ids[i] for i in (1, 2, 3)] == [expected_answer(PROMPT, 4)] * 3


def test_a_drain_waits_for_a_hung_step() -> None:
    rig = new_rig()
    rig.arrive(PROMPT)
    rig.step_hung()
    rig.drain()
    rig.cancel(1)
    assert not rig.state.is_drained
    rig.step_failed()
    assert rig.state.is_drained


def test_a_step_that_is_not_in_flight_cannot_hang() -> None:
    rig = new_rig()
    with pytest.raises(InternalError, match="step 1 has ended, but in flight is None"):
        rig.state.handle(StepHung(StepId(1), "late", "step_timeout", rig.now_s))
