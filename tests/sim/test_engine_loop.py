"""The engine's shell, on a device that ends its steps when told to; on asyncio and uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from runtime_cache.cache.results import CacheReport, Evicted
from runtime_cache.engine.commands import (
    EmitTokens,
    FailRequest,
    ReportExplained,
)
from runtime_cache.engine.loop import Answer
from runtime_cache.engine.request import NewRequest, Sampled, SamplingParams
from runtime_cache.errors import (
    AclError,
    CapacityError,
    DeviceLost,
    InternalError,
    InvalidRequest,
    UnknownEntry,
)
from runtime_cache.ids import DEFAULT_TENANT, PrefixId, RequestId, TenantName
from tests.support.caching import digests_of
from tests.support.engine_rig import Letters, expected_answer
from tests.support.loop_rig import Heard, LoopRig

PROMPT, OTHER = [1, 2, 3], [4, 5, 6, 7, 8, 9]
LOST = DeviceLost("acl.rt.synchronize_stream", 507010, "ACL_ERROR_RT_LOST_HEARTBEAT")
BROKEN = "the engine is broken; the daemon's log has the details"


NewRig = Callable[..., LoopRig]


@pytest.fixture
def new_rig() -> Iterator[NewRig]:
    """Makes rigs; at the end their sinks have found nothing wrong."""
    rigs: list[LoopRig] = []

    def make(**options: Any) -> LoopRig:
        rigs.append(LoopRig(**options))
        return rigs[-1]

    yield make
    assert [rig.problems for rig in rigs] == [[] for _ in rigs]


class BadText(Letters):
    """A detokenizer with a bug."""

    def flush(self) -> str:
        raise ValueError("no text")


async def test_a_request_is_answered_token_by_token(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT, 3)
    assert rig.engine.num_unanswered == 1
    await rig.run(heard)
    assert heard.token_ids == expected_answer(PROMPT, 3)
    assert [type(answer).__name__ for answer in heard.answers] == [
        "EmitTokens",
        "EmitTokens",
        "EmitTokens",
        "FinishRequest",
    ]
    assert (await heard.finished()).reason == "length"
    assert rig.engine.num_unanswered == 0
    assert rig.is_idle


async def test_the_device_starts_before_the_answers_of_the_step_before_are_sent(
    new_rig: NewRig,
) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT, 2)
    assert rig.journal == ["step 1"]
    await rig.run(heard)
    assert rig.journal == ["step 1", "step 2", "EmitTokens 1", "EmitTokens 1", "FinishRequest 1"]


async def test_a_request_that_cannot_be_served_is_answered_within_submit(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask([1] * 99)
    assert heard.answers == [
        FailRequest(
            heard.request_id,
            "too_long",
            "the prompt has 99 tokens; with room for one answer token, context and pool take "
            "prompts of at most 31",
            retryable=False,
        )
    ]
    assert rig.is_idle


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(new_rig: NewRig) -> None:
    rig = new_rig()
    first = rig.ask(PROMPT)
    rig._next_id = 1
    with pytest.raises(InternalError, match="request id 1 is in use"):
        rig.ask(OTHER)
    await rig.run(first)
    assert first.token_ids == expected_answer(PROMPT, 3)
    assert not rig.engine.fatal.done()


# --- failures of steps --------------------------------------------------------------------------


async def test_a_failed_step_fails_its_requests_and_the_others_go_on(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    first, second = rig.ask(PROMPT), rig.ask(OTHER)
    step = await rig.step()
    assert step.request_ids == [1]
    step.fail(AclError("acl.mdl.execute_async", 507015, "ACL_ERROR_RT_AICORE_EXCEPTION"))
    assert await first.failed() == FailRequest(
        first.request_id,
        "acl",
        "acl.mdl.execute_async failed: 507015 (ACL_ERROR_RT_AICORE_EXCEPTION)",
        retryable=True,
    )
    await rig.run(second)
    assert second.token_ids == expected_answer(OTHER, 3)
    assert not rig.engine.fatal.done()
    assert rig.cache.num_live == 0


async def test_a_bug_in_a_step_costs_the_requests_of_that_step(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    first, second = rig.ask(PROMPT), rig.ask(OTHER)
    (await rig.step()).fail(ZeroDivisionError("oh"))
    failure = await first.failed()
    assert (failure.code, failure.message, failure.retryable) == (
        "internal",
        "step 1 failed: oh",
        False,
    )
    await rig.run(second)
    assert second.token_ids == expected_answer(OTHER, 3)


# --- the end of everything ----------------------------------------------------------------------


async def test_a_lost_device_answers_every_request_at_once(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    running, waiting = rig.ask(PROMPT), rig.ask(OTHER, deadline_s=1e6)
    (await rig.step()).fail(LOST)
    assert await rig.engine.fatal is LOST
    for heard in (running, waiting):
        failure = FailRequest(heard.request_id, "device_lost", LOST.message, retryable=True)
        assert heard.answers == [failure]
    assert await rig.engine.drain(0) == 0
    assert rig.engine.num_unanswered == 0
    assert rig.is_idle


async def test_after_a_lost_device_every_call_says_so(new_rig: NewRig) -> None:
    rig = new_rig()
    rig.ask(PROMPT)
    (await rig.step()).fail(LOST)
    await rig.engine.fatal
    late = rig.ask(OTHER)
    assert (await late.failed()).code == "device_lost"
    rig.engine.cancel(late.request_id, "client")
    with pytest.raises(DeviceLost):
        rig.engine.release_prefix(PrefixId("p"))
    with pytest.raises(DeviceLost):
        rig.engine.evict(None)
    assert rig.engine.num_unanswered == 0


async def test_a_broken_state_leaves_no_request_without_an_answer(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    running, waiting = rig.ask(PROMPT), rig.ask(OTHER)
    (await rig.step()).finish_with()  # a sample is missing
    error = await rig.engine.fatal
    assert isinstance(error, InternalError)
    assert error.message == "step 1 has 0 samples for 1 rows"
    for heard in (running, waiting, rig.ask(PROMPT)):
        assert heard.answers == [FailRequest(heard.request_id, "internal", BROKEN, retryable=False)]
    assert await rig.engine.drain(1e6) == 0


async def test_a_bug_in_the_state_is_noticed_as_well(new_rig: NewRig) -> None:
    """While a step is in flight, which `drain` waits for."""
    rig = new_rig()
    running = rig.ask(PROMPT, detokenizer=BadText())
    other = rig.ask(OTHER)
    step = await rig.step()
    rig.engine.cancel(running.request_id, "client")
    assert isinstance(rig.engine.fatal.result(), InternalError)
    assert str(rig.engine.fatal.result()) == "CancelRequested failed: ValueError('no text')"
    assert [(await heard.failed()).message for heard in (running, other)] == [BROKEN, BROKEN]
    draining = asyncio.ensure_future(rig.engine.drain(0))
    waited, _ = await asyncio.wait({draining}, timeout=0)
    assert not waited
    step.finish()
    assert await draining == 0
    assert rig.is_idle


# --- sinks that call back -----------------------------------------------------------------------


async def two_in_one_step(rig: LoopRig) -> tuple[Heard, Heard]:
    """Two requests, both in the decode step that is about to end."""
    first, second = rig.ask(PROMPT, 8), rig.ask(OTHER, 8)
    while (step := await rig.step()).request_ids != [1, 2]:
        step.finish()
    step.finish()
    return first, second


async def test_a_sink_may_cancel_another_request_of_the_same_step(new_rig: NewRig) -> None:
    rig = new_rig()
    first, second = await two_in_one_step(rig)

    def cancel_other(answer: Answer) -> None:
        if isinstance(answer, EmitTokens):
            rig.engine.cancel(second.request_id, "client")

    first.then = cancel_other
    assert (await second.finished()).reason == "cancelled"
    # What the step gave it had been decided before, and comes before.
    assert second.token_ids == expected_answer(OTHER, 2)
    await rig.run(first)
    assert first.token_ids == expected_answer(PROMPT, 8)
    assert rig.cache.num_live == 0


async def test_a_sink_may_cancel_its_own_request_and_submit_a_new_one(new_rig: NewRig) -> None:
    rig = new_rig()
    first, second = await two_in_one_step(rig)
    late: list[Heard] = []

    def replace(answer: Answer) -> None:
        if not late:
            late.append(rig.ask([1] * 99))
            rig.engine.cancel(first.request_id, "client")

    first.then = replace
    assert (await first.finished()).reason == "cancelled"
    assert rig.journal[-4:] == ["EmitTokens 1", "EmitTokens 2", "FailRequest 3", "FinishRequest 1"]
    await rig.run(second)
    assert second.token_ids == expected_answer(OTHER, 8)


async def test_a_sink_that_fails_costs_no_one_else_an_answer(new_rig: NewRig) -> None:
    rig = new_rig()
    first, second = await two_in_one_step(rig)

    def fail(answer: Answer) -> None:
        raise ValueError("cannot send")

    first.then = fail
    await rig.run(first, second)
    assert first.token_ids == expected_answer(PROMPT, 8)
    assert second.token_ids == expected_answer(OTHER, 8)
    assert not rig.engine.fatal.done()


# --- time ---------------------------------------------------------------------------------------


async def test_a_deadline_ends_a_waiting_and_a_running_request(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    running = rig.ask(PROMPT, 9, deadline_s=100.001)
    waiting = rig.ask(OTHER, 9, deadline_s=100.002)
    step = await rig.step()
    rig.clock.now_s = 101.0
    for heard in (running, waiting):
        assert (await heard.finished()).reason == "deadline"
    step.finish()
    assert await rig.engine.drain(1e6) == 0
    assert rig.cache.num_live == 0
    assert rig.is_idle


async def test_a_timer_that_fires_early_is_set_again(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT, 9, deadline_s=100.001)
    ticks: list[float] = []

    def slow_clock() -> float:
        ticks.append(rig.clock.now_s)
        rig.clock.now_s += 0.0002
        return ticks[-1]

    rig.engine._clock = slow_clock
    assert (await heard.finished()).reason == "deadline"
    assert ticks[0] < 100.001 <= ticks[-1]


async def test_an_answered_request_needs_no_timer(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT, 1, deadline_s=1e9)
    assert rig.engine._timer is not None
    await rig.run(heard)
    assert rig.engine._timer is None


# --- drain --------------------------------------------------------------------------------------


async def test_an_idle_engine_drains_at_once_and_refuses_what_comes_later(new_rig: NewRig) -> None:
    rig = new_rig()
    assert await rig.engine.drain(1e6) == 0
    failure = await rig.ask(PROMPT).failed()
    assert (failure.code, failure.message) == ("draining", "the daemon is shutting down")
    assert failure.retry_after_ms is not None


async def test_an_operator_stops_new_work_and_takes_it_again(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT)
    assert rig.engine.condition == "serving"
    assert [rig.engine.start_drain() for _ in range(2)] == [1, 1]
    assert (rig.engine.condition, rig.engine.state.is_draining) == ("draining", True)
    failure = await rig.ask(OTHER).failed()
    assert (failure.code, failure.retryable) == ("draining", True)
    assert failure.message.startswith("the daemon is being drained: an operator")
    await rig.run(heard)
    assert heard.token_ids == expected_answer(PROMPT, 3)
    assert rig.engine.start_drain() == 0
    for _ in range(2):
        rig.engine.end_drain()
        assert rig.engine.condition == "serving"
    again = rig.ask(OTHER)
    await rig.run(again)
    assert again.token_ids == expected_answer(OTHER, 3)


async def test_the_last_drain_waits_whatever_was_drained_before(new_rig: NewRig) -> None:
    """Neither a finished drain of an operator ends the daemon's own early, nor a resume late."""
    rig = new_rig()
    rig.engine.start_drain()
    rig.engine.end_drain()
    heard = rig.ask(PROMPT)
    rig.engine.start_drain()
    draining = asyncio.ensure_future(rig.engine.drain(1e6))
    waited, _ = await asyncio.wait({draining}, timeout=0)
    assert not waited
    with pytest.raises(InvalidRequest, match="shutting down"):
        rig.engine.end_drain()
    assert rig.engine.start_drain() == 1
    await rig.run(heard)
    assert await draining == 0
    failure = await rig.ask(OTHER).failed()
    assert failure.message == "the daemon is shutting down"


async def test_drain_lets_admitted_requests_end(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    heard = [rig.ask(PROMPT), rig.ask(OTHER)]
    draining = asyncio.ensure_future(rig.engine.drain(1e6))
    await rig.run(*heard)
    assert await draining == 0
    assert heard[0].token_ids == expected_answer(PROMPT, 3)
    assert heard[1].token_ids == expected_answer(OTHER, 3)


async def test_drain_cancels_what_is_left_and_waits_for_the_step(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    heard = [rig.ask(PROMPT), rig.ask(OTHER)]
    step = await rig.step()
    draining = asyncio.ensure_future(rig.engine.drain(0))
    for one in heard:
        assert (await one.finished()).reason == "shutdown"
    assert not draining.done()
    assert rig.cache.num_live > 0  # the step still writes into them
    step.finish()
    assert await draining == 2
    assert rig.cache.num_live == 0
    assert rig.is_idle


async def test_a_step_that_fails_while_draining_ends_the_drain(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT)
    draining = asyncio.ensure_future(rig.engine.drain(1e6))
    (await rig.step()).fail(AclError("acl.rt.memcpy_async", 507015, "x"))
    assert (await heard.failed()).code == "acl"
    assert await draining == 0


# --- prefixes -----------------------------------------------------------------------------------


async def test_register_evict_and_release(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.register("p", range(8))
    await rig.run(heard)
    assert (await heard.finished()).prefix_id == "p"
    assert rig.engine.evict(None) == Evicted(0, 0, 2)
    assert rig.engine.release_prefix(PrefixId("p"))
    assert not rig.engine.release_prefix(PrefixId("p"))
    assert rig.engine.evict(None, max_blocks=1) == Evicted(1, 0, 0)
    assert rig.engine.evict(None) == Evicted(1, 0, 0)


async def test_pin_explain_and_unpin(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(range(9), 1)
    await rig.run(heard)
    digest = digests_of(range(9))[1]
    keep = rig.engine.pin(DEFAULT_TENANT, digest)
    assert (keep.kind, keep.digest, keep.num_tokens) == ("pin", digest, 8)
    assert rig.engine.evict(DEFAULT_TENANT) == Evicted(1, 0, 2)
    prompt = np.array([*range(8), 50, 51], dtype=np.int32)
    explained = rig.engine.explain(DEFAULT_TENANT, prompt)
    assert explained == ReportExplained(CacheReport(8, "extended", 8, 8), prompt_tokens=10)
    assert rig.engine.unpin(DEFAULT_TENANT, digest[:8]) == keep
    assert rig.engine.evict(DEFAULT_TENANT, digest=digest) == Evicted(2, 0, 0)
    assert rig.engine.evict(DEFAULT_TENANT, used_until_s=0.0) == Evicted(0, 0, 0)


async def test_a_lease_is_given_up_by_the_timer(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(range(9), 1)
    await rig.run(heard)
    keep = rig.engine.pin(DEFAULT_TENANT, digests_of(range(9))[0], ttl_s=500.0)
    assert (keep.kind, keep.expires_s) == ("lease", 600.0)
    assert rig.engine._timer is not None
    rig.clock.now_s = 600.0
    rig.engine._tick()
    assert rig.engine._timer is None
    assert rig.cache.num_live == 0


async def test_a_refused_question_is_raised_as_what_it_is(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = [rig.ask(range(start, start + 40), 1) for start in (0, 10)]
    assert all([(await one.failed()).code == "too_long" for one in heard])
    heard = [rig.ask(range(start, start + 30), 1) for start in (0, 10)]
    await rig.run(*heard)
    digests = digests_of(range(30))
    rig.engine.pin(DEFAULT_TENANT, digests[6])
    with pytest.raises(CapacityError, match="neither number may exceed 11") as full:
        rig.engine.pin(DEFAULT_TENANT, digests_of(range(10, 40))[6])
    assert full.value.retry_after_ms == 10
    with pytest.raises(UnknownEntry, match="nothing cached"):
        rig.engine.pin(DEFAULT_TENANT, "ff" * 32)
    with pytest.raises(InvalidRequest, match="no tenant `x`"):
        rig.engine.unpin(TenantName("x"), digests[0])
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        rig.engine.explain(DEFAULT_TENANT, np.array([], dtype=np.int32))
    assert not rig.engine.fatal.done()


async def test_a_request_of_no_tenant_breaks_nothing(new_rig: NewRig) -> None:
    rig = new_rig()
    request = NewRequest(
        RequestId(1), np.array([1, 2], dtype=np.int32), SamplingParams(), tenant=TenantName("x")
    )
    with pytest.raises(InternalError, match="no tenant `x`"):
        rig.engine.submit(request, print)
    assert (rig.engine.num_unanswered, rig.engine.fatal.done()) == (0, False)


async def test_samples_reach_the_request_they_are_of(new_rig: NewRig) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT, 1)
    (await rig.step()).finish_with(Sampled(25))
    await heard.final
    assert heard.token_ids == [25]
