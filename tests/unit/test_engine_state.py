"""Events in, commands out: arrivals, ends, cancels, deadlines, failures, drain.

The rig checks after every event that holds have owners, gauges add up, nobody is answered twice
and every request ends in one counter.
"""

from __future__ import annotations

import pytest

from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.results import CacheReport
from runtime_cache.engine.commands import EmitTokens, FailRequest, FinishRequest, RunStep
from runtime_cache.engine.events import RequestArrived, StepDone, StepFailed
from runtime_cache.engine.limits import EngineLimits
from runtime_cache.engine.request import (
    BadLogits,
    NewRequest,
    Sampled,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from runtime_cache.engine.sequence import TRANSITIONS, Happening, Sequence, Status
from runtime_cache.engine.state import EngineState
from runtime_cache.errors import ConfigError, InternalError
from runtime_cache.ids import RequestId, StepId
from tests.support.engine_rig import (
    EngineRig,
    expected_answer,
    limits,
    make_caches,
    next_token,
    small_gears,
)

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


# -- a whole answer -----------------------------------------------------------------------------


def test_an_answer_is_streamed_and_ends_once() -> None:
    rig = EngineRig()
    request_id = rig.arrive([1, 2, 3], max_tokens=2)
    one, two = expected_answer([1, 2, 3], 2)
    assert rig.commands == [RunStep(rig.batches[0])]
    rig.step_done()
    assert rig.commands == [EmitTokens(request_id, (one,), letters([one])), RunStep(rig.batches[1])]
    rig.step_done()
    usage = Usage(
        prompt_tokens=3,
        cached_tokens=0,
        prefilled_tokens=3,
        completion_tokens=2,
        queue_s=0.0,
        ttft_s=1.0,
        total_s=2.0,
        cache=CacheReport(0, "cold"),
    )
    assert rig.commands == [
        EmitTokens(request_id, (two,), letters([two])),
        FinishRequest(request_id, "length", "", usage),
    ]


def test_times_are_counted_from_arrival() -> None:
    rig = EngineRig(config=limits(max_running=1))
    rig.arrive([1, 2, 3], max_tokens=2)
    second = rig.arrive([4, 5, 6], max_tokens=3)
    rig.run()
    usage = rig.finished(second).usage
    assert (usage.queue_s, usage.ttft_s, usage.total_s) == (2.0, 3.0, 5.0)


def test_logprobs_travel_with_their_token() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=1)
    logprobs = TokenLogprobs(9, -0.5, ((9, -0.5), (3, -1.0)))
    rig.step_done(samples=(Sampled(9, logprobs),))
    assert rig.commands[0] == EmitTokens(RequestId(1), (9,), "J", (logprobs,))


def test_an_end_token_ends_the_answer_without_its_text() -> None:
    prompt = [5, 6, 7]
    one, two, three = expected_answer(prompt, 3)
    assert three not in (one, two)
    rig = EngineRig()
    rig.arrive(prompt, max_tokens=10, eos=frozenset({three}))
    rig.run()
    assert rig.token_ids[1] == [one, two, three]
    assert rig.texts[1] == letters([one, two])
    final = rig.finished(1)
    assert (final.reason, final.stop, final.usage.completion_tokens) == ("stop", f"<{three}>", 3)


def test_ignore_eos_goes_on() -> None:
    prompt = [1, 2, 3]
    rig = EngineRig()
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    rig.arrive(prompt, params=params, eos=frozenset(expected_answer(prompt, 3)))
    rig.run()
    assert rig.finished(1).reason == "length"
    assert len(rig.token_ids[1]) == 3


def test_a_stop_string_ends_the_answer_and_is_cut_off() -> None:
    prompt = [1, 2, 3]
    text = letters(expected_answer(prompt, 4))
    rig = EngineRig()
    rig.arrive(prompt, params=SamplingParams(max_tokens=9, temperature=0.0, stop=(text[1:3],)))
    rig.run()
    final = rig.finished(1)
    assert (final.reason, final.stop, rig.texts[1]) == ("stop", text[1:3], text[:1])
    assert final.usage.completion_tokens == 3


def test_text_held_back_comes_with_the_final_answer() -> None:
    prompt = [1, 2, 3]
    text = letters(expected_answer(prompt, 2))
    rig = EngineRig()
    rig.arrive(prompt, params=SamplingParams(max_tokens=2, temperature=0.0, stop=(text[1] + "!",)))
    rig.run()
    final = rig.finished(1)
    assert (final.reason, final.text, final.stop) == ("length", text[1], None)
    assert rig.texts[1] == text


def test_a_sampler_belongs_to_the_request_through_preemption() -> None:
    rig = EngineRig(num_blocks=4)
    rig.arrive([10, 11, 12], max_tokens=6)
    rig.arrive([20, 21, 22], max_tokens=6)
    rig.run()
    samplers = {id(r.sampler) for b in rig.batches for r in b.rows if r.request_id == 2}
    assert rig.state.snapshot().engine.preemptions == 1
    assert len(samplers) == 1


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "limit"),
    [(24, 32, 32), (9, 32, 32), (8, 32, 29), (4, 32, 13), (24, 16, 16)],
)
def test_a_sequence_is_limited_by_context_and_pool(
    num_blocks: int, max_model_len: int, limit: int
) -> None:
    state = EngineState(make_caches(num_blocks), small_gears(max_model_len), limits())
    assert state.max_sequence_tokens == limit


@pytest.mark.parametrize("num_blocks", [24, 5])
@pytest.mark.parametrize("over", [-2, -1, 0])
def test_prompts_up_to_one_below_the_limit_are_served(num_blocks: int, over: int) -> None:
    rig = EngineRig(num_blocks=num_blocks)
    limit = rig.state.max_sequence_tokens
    prompt = [1] * (limit + over)
    request_id = rig.arrive(prompt, max_tokens=None)
    rig.run()
    if over < 0:
        final = rig.finished(request_id)
        assert (final.reason, final.usage.completion_tokens) == ("length", -over)
        assert rig.token_ids[request_id] == expected_answer(prompt, -over)
    else:
        failure = rig.failed(request_id)
        assert (failure.code, failure.retryable) == ("too_long", False)
        assert failure.message == (
            f"the prompt has {limit} tokens; with room for one answer token, context and pool "
            f"take prompts of at most {limit - 1}"
        )


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(1, 1), (9, 9), (10, 10), (11, 10)])
def test_max_tokens_is_clipped_by_the_context(max_tokens: int, num_tokens: int) -> None:
    rig = EngineRig()
    rig.arrive(range(22), max_tokens=max_tokens)
    rig.run()
    assert len(rig.token_ids[1]) == num_tokens
    assert rig.finished(1).reason == "length"


def test_the_largest_sequence_fits_the_last_gear() -> None:
    rig = EngineRig()
    rig.arrive([1], max_tokens=None)
    rig.run()
    assert len(rig.token_ids[1]) == 31
    (row,) = rig.batches[-1].rows
    assert row.num_past == 30


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [([], 4, "the prompt is empty"), ([1], 0, "`max_tokens` is 0, but an answer has at least 1")],
)
def test_what_contradicts_itself_is_refused(
    prompt: list[int], max_tokens: int, sentence: str
) -> None:
    rig = EngineRig()
    rig.arrive(prompt, max_tokens=max_tokens)
    assert rig.commands == [FailRequest(RequestId(1), "invalid_request", sentence, False)]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logit_bias=((1, float("nan")),)), SamplingParams(stop=("end", ""))],
)
def test_parameters_that_cannot_be_used_are_refused(params: SamplingParams) -> None:
    rig = EngineRig()
    rig.arrive([1], params=params)
    assert rig.failed(1).code == "invalid_request"


@pytest.mark.parametrize(("num_requests", "num_refused"), [(3, 0), (4, 0), (5, 1)])
def test_the_queue_is_bounded(num_requests: int, num_refused: int) -> None:
    rig = EngineRig(config=limits(max_waiting=3, max_running=1))
    for token in range(num_requests):
        rig.arrive([token, 1], max_tokens=1)
    failures = [final for final in rig.finals.values() if isinstance(final, FailRequest)]
    assert len(failures) == num_refused
    for failure in failures:
        assert (failure.code, failure.retryable) == ("queue_full", True)
        assert failure.message == "3 requests are waiting"
        assert failure.retry_after_ms == 1000


def test_retry_after_follows_the_recent_pace() -> None:
    rig = EngineRig(config=limits(max_waiting=1, max_running=1))
    for _ in range(3):
        rig.arrive([1, 2], max_tokens=1)
        rig.step_done(seconds=0.5)
    rig.arrive([1, 2], max_tokens=1)
    rig.arrive([1, 2], max_tokens=1)
    refused = rig.arrive([1, 2], max_tokens=1)
    assert rig.failed(refused).retry_after_ms == 333  # three ends within one second


@pytest.mark.parametrize(
    "config",
    [
        limits(max_waiting=0),
        limits(interleave_chunk_tokens=0),
        limits(max_running=0),
        limits(match_window=0),
        limits(max_overtakes=-1),
    ],
)
def test_limits_out_of_range_stop_the_start(config: EngineLimits) -> None:
    with pytest.raises(ConfigError, match="a limit of the engine is out of range"):
        EngineState(make_caches(8), small_gears(), config)


def test_no_overtaking_at_all_is_a_limit() -> None:
    EngineState(make_caches(8), small_gears(), limits(max_overtakes=0, match_window=1))


def test_an_engine_without_tenants_does_not_start() -> None:
    with pytest.raises(ConfigError, match="no tenant"):
        EngineState({}, small_gears(), limits())


# -- cancel and deadline ------------------------------------------------------------------------


def test_cancel_while_waiting() -> None:
    rig = EngineRig(config=limits(max_running=1))
    rig.arrive([1, 2, 3])
    waiting = rig.arrive([4, 5, 6])
    rig.cancel(waiting)
    final = rig.finished(waiting)
    assert (final.reason, final.usage.completion_tokens, final.usage.ttft_s) == (
        "cancelled",
        0,
        None,
    )
    rig.run()
    assert {row.request_id for batch in rig.batches for row in batch.rows} == {1}


def test_cancel_in_the_step_answers_at_once_and_frees_later() -> None:
    rig = EngineRig()
    rig.arrive(range(6))
    rig.cancel(1)
    assert rig.finished(1).reason == "cancelled"
    assert rig.gauges() == (2, 0, 21)
    assert rig.state.request_ids() == []
    rig.step_done()
    assert rig.commands == []
    assert rig.gauges() == (0, 2, 21)  # what the step computed is worth keeping


def test_cancel_of_an_answer_outside_the_step_frees_at_once() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=9)
    rig.step_done()
    rig.arrive([4, 5, 6])
    rig.step_done()
    assert rig.rows() == [(2, 0, 3)]
    rig.cancel(1)
    assert rig.gauges() == (1, 1, 21)
    final = rig.finished(1)
    assert (final.reason, final.usage.completion_tokens) == ("cancelled", 2)


def test_cancel_of_a_preempted_request() -> None:
    rig = EngineRig(num_blocks=4)
    rig.arrive([10, 11, 12], max_tokens=6)
    rig.arrive([20, 21, 22], max_tokens=6)
    while rig.state.snapshot().engine.preemptions == 0:
        rig.step_done()
    rig.cancel(2)
    assert rig.finished(2).usage.completion_tokens == 2
    rig.run()
    assert rig.cache.num_live == 0


def test_late_and_unknown_cancels_are_counted() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=1)
    rig.run()
    rig.cancel(1)
    rig.cancel(77)
    assert rig.commands == []
    assert rig.state.snapshot().engine.late == 2


def test_a_failed_step_of_a_cancelled_request_frees_its_blocks() -> None:
    rig = EngineRig()
    rig.arrive(range(6))
    rig.cancel(1)
    rig.step_failed()
    assert rig.commands == []
    assert rig.gauges() == (0, 0, 23)


@pytest.mark.parametrize(("seconds", "is_over"), [(4.0, False), (5.0, True), (6.0, True)])
def test_a_deadline_ends_a_request(seconds: float, is_over: bool) -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], deadline_s=rig.now_s + 5.0)
    assert rig.state.next_deadline_s == rig.now_s + 5.0
    rig.tick(seconds)
    assert (1 in rig.finals) == is_over
    if is_over:
        assert rig.finished(1).reason == "deadline"
        assert rig.state.next_deadline_s is None


def test_deadlines_are_looked_at_on_any_event() -> None:
    rig = EngineRig(config=limits(max_running=1))
    rig.arrive([1, 2, 3], max_tokens=9)
    rig.arrive([4, 5, 6], deadline_s=rig.now_s + 2.0)
    rig.step_done()
    assert 2 not in rig.finals
    rig.step_done()
    assert rig.finished(2).reason == "deadline"


def test_a_deadline_in_the_past_ends_a_request_before_it_runs() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], deadline_s=rig.now_s)
    assert rig.finished(1).reason == "deadline"
    assert rig.batches == []


def test_an_answer_that_ends_in_time_is_not_expired() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=1, deadline_s=rig.now_s + 1.0)
    rig.step_done(seconds=1.0)
    assert rig.finished(1).reason == "length"
    assert rig.state.next_deadline_s is None


# -- failures -----------------------------------------------------------------------------------


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    rig = EngineRig()
    rig.arrive(range(9), max_tokens=3)
    rig.arrive(range(20, 29), max_tokens=3)
    rig.step_done()
    assert rig.rows() == [(1, 8, 1)]
    rig.step_failed(retryable=True)
    assert rig.commands[0] == FailRequest(RequestId(1), "device", "broken", True)
    assert rig.cache.counters.dropped_blocks == 1
    assert rig.cache.num_evictable == 2  # committed before, by a step that was done
    rig.run()
    assert rig.token_ids[2] == expected_answer(range(20, 29), 3)
    assert rig.state.snapshot().engine.failed_steps == 1


def test_bad_logits_end_one_request_and_leave_nothing_it_computed() -> None:
    rig = EngineRig()
    for start in (0, 20):
        rig.arrive(range(start, start + 8), max_tokens=6)
    while len(rig.rows()) < 2:
        rig.step_done()
    before = rig.cache.counters.inserted_blocks
    good = Sampled(next_token([*range(20, 28), *rig.token_ids[2]]))
    rig.step_done(samples=(BadLogits("not a number"), good))
    assert rig.failed(1) == FailRequest(RequestId(1), "bad_logits", "not a number", False)
    assert rig.cache.counters.inserted_blocks == before
    assert rig.cache.counters.dropped_blocks == 3  # of this step, and before
    assert rig.cache.counters.evicted_blocks == 0
    again = rig.arrive(range(8), max_tokens=2)
    rig.run()
    assert rig.finished(again).usage.cached_tokens == 0
    assert rig.token_ids[2] == expected_answer(range(20, 28), 6)
    assert rig.state.snapshot().engine.failed_steps == 0


def test_what_a_failed_step_wrote_is_never_reused() -> None:
    rig = EngineRig()
    rig.arrive(range(8), max_tokens=1)
    rig.step_failed()
    assert rig.gauges() == (0, 0, 23)
    again = rig.arrive(range(8), max_tokens=2)
    rig.run()
    assert rig.finished(again).usage.cached_tokens == 0
    assert rig.token_ids[again] == expected_answer(range(8), 2)


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_step_that_is_not_in_flight_is_our_bug(is_failed: bool) -> None:
    rig = EngineRig()
    event = (
        StepFailed(StepId(1), "broken", "device", True, rig.now_s)
        if is_failed
        else StepDone(StepId(1), (), rig.now_s)
    )
    with pytest.raises(InternalError, match="step 1 has ended, but in flight is None"):
        rig.state.handle(event)


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_wrong_number_of_samples_is_our_bug(num_samples: int) -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3])
    samples = (Sampled(1),) * num_samples
    with pytest.raises(InternalError, match=f"step 1 has {num_samples} samples for 1 rows"):
        rig.state.handle(StepDone(StepId(1), samples, rig.now_s))


def test_a_request_id_is_used_once() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3])
    request = NewRequest(RequestId(1), rig.batches[0].rows[0].token_ids, GREEDY)
    with pytest.raises(InternalError, match=r"twice: request 1 is stepping: admitted → ready"):
        rig.state.handle(RequestArrived(request, rig.now_s))


# -- the status table ---------------------------------------------------------------------------

STATUSES: tuple[Status, ...] = ("waiting", "ready", "stepping", "leaving", "ended")
HAPPENINGS: tuple[Happening, ...] = (
    "admitted",
    "launched",
    "step_done",
    "step_failed",
    "preempted",
    "answered",
)


def a_sequence() -> Sequence:
    rig = EngineRig()
    rig.arrive([1, 2, 3])
    return rig.state._scheduler.running[0]


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("happening", HAPPENINGS)
def test_each_pair_is_in_the_table_or_raises_the_story(
    status: Status, happening: Happening
) -> None:
    sequence = a_sequence()
    sequence.status = status
    if (status, happening) in TRANSITIONS:
        sequence.move(happening)
        assert sequence.status == TRANSITIONS[status, happening]
        return
    with pytest.raises(
        InternalError, match=f"{happening} cannot happen now; request 1 is {status}"
    ):
        sequence.move(happening)
    assert sequence.status == status


def test_a_story_is_bounded() -> None:
    rig = EngineRig(gears=small_gears(256), num_blocks=80)
    rig.arrive([1, 2, 3], max_tokens=100)
    for _ in range(50):
        rig.step_done()
    story = rig.state._scheduler.running[0].story()
    assert story.startswith("request 1 is stepping: ")
    assert story.count("→") == 32
    assert story.endswith("launched → stepping (step 51)")


# -- drain --------------------------------------------------------------------------------------


def test_drain_refuses_new_requests_and_ends_the_admitted() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3], max_tokens=2)
    rig.drain()
    assert not rig.state.is_drained
    refused = rig.arrive([1, 2, 3])
    assert (rig.failed(refused).code, rig.failed(refused).retryable) == ("draining", True)
    rig.step_done()
    assert not rig.state.is_drained
    rig.step_done()
    assert rig.state.is_drained
    assert rig.finished(1).reason == "length"


def test_drain_waits_for_the_step_of_a_cancelled_request() -> None:
    rig = EngineRig()
    rig.arrive([1, 2, 3])
    rig.drain()
    rig.cancel(1)
    assert not rig.state.is_drained
    rig.step_done()
    assert rig.state.is_drained


def test_an_idle_engine_drains_at_once() -> None:
    rig = EngineRig()
    assert not rig.state.is_drained
    rig.drain()
    assert rig.state.is_drained


# -- what is told -------------------------------------------------------------------------------


def test_a_snapshot_is_a_copy_of_gauges_and_counters() -> None:
    rig = EngineRig(config=limits(max_running=1))
    rig.arrive(range(9), max_tokens=2)
    rig.arrive([1, 2, 3], max_tokens=1)
    before = rig.state.snapshot()
    assert (before.num_running, before.num_waiting) == (1, 1)
    assert (before.is_step_in_flight, before.is_draining) == (True, False)
    assert (before.num_live_blocks, before.num_evictable_blocks, before.num_free_blocks) == (
        3,
        0,
        20,
    )
    assert before.num_usable_blocks == 23
    rig.run()
    assert before.engine.finished == 0
    after = rig.state.snapshot()
    assert (after.engine.prefill_steps, after.engine.decode_steps) == (2, 2)
    assert (after.engine.prefill_tokens, after.engine.decode_tokens) == (12, 1)
    assert (after.engine.arrived, after.engine.finished) == (2, 2)
    assert (after.cache.queried_tokens, after.cache.hit_tokens) == (12, 0)
    assert (after.num_running, after.num_waiting, after.is_step_in_flight) == (0, 0, False)


def test_a_disabled_cache_answers_the_same() -> None:
    rig = EngineRig(policy=CachePolicy(is_enabled=False))
    for _ in range(2):
        rig.arrive(range(9), max_tokens=3)
    rig.run()
    assert rig.token_ids[1] == rig.token_ids[2] == expected_answer(range(9), 3)
    assert rig.pool.num_rows_written == 2 * (9 + 2)
    assert rig.gauges() == (0, 0, 23)


def test_the_fake_model_looks_at_every_token() -> None:
    assert next_token([1, 2, 3]) != next_token([1, 2, 4])
