"""The engine's loop when a step has failed or hangs: what clients hear, and when it is the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from runtime_cache.engine.commands import FailRequest
from runtime_cache.engine.recovery import MAX_FAILURES, Recovery
from runtime_cache.errors import (
    AclError,
    DeviceHung,
    DeviceLost,
    InternalError,
    OutOfDeviceMemory,
    StepTimeout,
)
from tests.support.engine_rig import expected_answer
from tests.support.loop_rig import Heard, LoopRig

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

PROMPT, OTHER = list(range(10, 16)), list(range(30, 36))
FAILURE = AclError("acl.mdl.execute_async", 507015, "ACL_ERROR_RT_AICORE_EXCEPTION")
FULL = OutOfDeviceMemory("acl.mdl.execute_async", 207001, "ACL_ERROR_RT_MEMORY_ALLOCATION")
LATE = StepTimeout("acl.rt.synchronize_stream_with_timeout", 507046, "ACL_ERROR_RT_STREAM_SYNC")
LOST = DeviceLost("acl.rt.query_device_status", 1, "abnormal")


class Device:
    """Recovers when it is told to, once for each time it is asked."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def recover(self, timeout_ms: int) -> None:
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(told)
        await told

    async def say(self, error: Exception | None = None) -> None:
        """Its next answer, as soon as it is asked."""
        told = await self._asked.get()
        if error is None:
            told.set_result(None)
        else:
            told.set_exception(error)


NewRig = Callable[..., LoopRig]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def new_rig(device: Device) -> Iterator[NewRig]:
    rigs: list[LoopRig] = []

    def make(**changes: object) -> LoopRig:
        recovery = Recovery(device.recover, hang_limit_ms=10**9)
        rigs.append(LoopRig(recovery=recovery, on_failed_step="recompute", **changes))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        assert rig.problems == []


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [FAILURE, FULL])
async def test_no_step_is_begun_before_the_device_works(
    new_rig: NewRig, device: Device, error: AclError
) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT)
    (await rig.step()).fail(error)
    await until(lambda: rig.engine.condition == "recovering")
    late = rig.ask(OTHER)
    assert rig.is_idle
    assert rig.cache.num_live == 2  # what the step wrote to
    await device.say()
    await rig.run(heard, late)
    assert heard.token_ids == expected_answer(PROMPT, 3)
    assert late.token_ids == expected_answer(OTHER, 3)
    assert rig.engine.condition == "serving"


async def test_while_a_step_hangs_questions_are_answered(new_rig: NewRig, device: Device) -> None:
    rig = new_rig()
    heard, doomed = rig.ask(PROMPT), rig.ask(OTHER)
    (await rig.step()).fail(LATE)
    await until(lambda: rig.engine.condition == "hung")
    await device.say(LATE)
    rig.engine.cancel(doomed.request_id, "client")
    assert (await doomed.finished()).reason == "cancelled"
    assert rig.engine.evict(None).num_evicted == 0
    assert (rig.cache.num_live, len(rig.cache.index)) == (2, 0)
    assert rig.engine.state.snapshot().engine.hung_steps == 1
    await device.say()
    await rig.run(heard)
    assert heard.token_ids == expected_answer(PROMPT, 3)


@pytest.mark.parametrize(
    ("error", "code"),
    [(LOST, "device_lost"), (DeviceHung(*LATE.args, 1, ""), "device_hung")],
)
async def test_a_device_that_does_not_recover_answers_everyone_once(
    new_rig: NewRig, device: Device, error: DeviceLost, code: str
) -> None:
    rig = new_rig(max_running=1)
    asked = [rig.ask(PROMPT), rig.ask(OTHER), rig.register("p", OTHER)]
    (await rig.step()).fail(FAILURE)
    await device.say(error)
    assert await rig.engine.fatal is error
    for heard in asked:
        failure = FailRequest(heard.request_id, code, error.message, retryable=True)
        assert heard.answers == [failure]
    assert rig.engine.condition == "lost"
    assert await rig.engine.drain(0) == 0
    assert (await rig.ask(PROMPT).failed()).code == code


async def test_a_bug_of_the_recovery_is_the_end_too(new_rig: NewRig, device: Device) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT)
    (await rig.step()).fail(FAILURE)
    await device.say(ZeroDivisionError("oh"))
    assert isinstance(await rig.engine.fatal, InternalError)
    assert (await heard.failed()).code == "internal"
    assert rig.engine.condition == "broken"


async def test_a_drain_gives_a_hung_step_up(new_rig: NewRig, device: Device) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT)
    (await rig.step()).fail(LATE)
    draining = asyncio.ensure_future(rig.engine.drain(0))
    assert (await heard.finished()).reason == "shutdown"
    assert not draining.done()
    await device.say(LATE)
    assert await draining == 1
    assert isinstance(rig.engine.fatal.result(), DeviceHung)


async def test_a_drain_lets_what_is_computed_again_end(new_rig: NewRig, device: Device) -> None:
    rig = new_rig()
    heard = rig.ask(PROMPT)
    (await rig.step()).fail(FAILURE)
    draining = asyncio.ensure_future(rig.engine.drain(1e6))
    await until(lambda: rig.engine.state.is_draining)
    await device.say()
    await rig.run(heard)
    assert await draining == 0
    assert heard.token_ids == expected_answer(PROMPT, 3)
    assert rig.engine.condition == "draining"


async def test_a_request_is_failed_by_its_second_failure(new_rig: NewRig, device: Device) -> None:
    rig = new_rig()
    heard: Heard = rig.ask(PROMPT)
    for _ in range(2):
        (await rig.step()).fail(FULL)
        await device.say()
    failure = await heard.failed()
    assert (failure.code, failure.retryable) == ("device_out_of_memory", True)
    assert not rig.engine.fatal.done()


async def test_a_bug_that_fails_every_step_is_the_end(new_rig: NewRig) -> None:
    rig = new_rig(max_running=1)
    for _ in range(MAX_FAILURES):
        assert not rig.engine.fatal.done()
        heard = rig.ask(PROMPT)
        (await rig.step()).fail(ZeroDivisionError("a bug"))
        assert (await heard.failed()).code == "internal"
    error = await rig.engine.fatal
    assert isinstance(error, InternalError)
    assert str(error).endswith("failed: a bug")
