"""What is done with a device after a step that failed: waits, questions, giving it up."""

from __future__ import annotations

import asyncio

import pytest

from runtime_cache.engine.recovery import MAX_FAILURES, TURN_MS, Recovery
from runtime_cache.errors import AclError, DeviceHung, DeviceLost, StepTimeout

FAILURE = AclError("acl.mdl.execute_async", 507015, "ACL_ERROR_RT_AICORE_EXCEPTION", "bang")
LATE = StepTimeout("acl.rt.synchronize_stream_with_timeout", 507046, "ACL_ERROR_RT_STREAM_SYNC")
LOST = DeviceLost("acl.rt.query_device_status", 1, "abnormal")


class Device:
    """Runs on for a while, then works or not; its clock is that of the recovery.

    Attributes:
        waits: how long it was waited for, each time.
        states: what the recovery said of it meanwhile.
    """

    def __init__(self, busy_ms: int = 0, error: Exception | None = None) -> None:
        self.now_ms = 0
        self.waits: list[int] = []
        self.states: list[str] = []
        self.recovery: Recovery
        self._busy_ms = busy_ms
        self._error = error

    async def recover(self, timeout_ms: int) -> None:
        self.waits.append(timeout_ms)
        self.states.append(self.recovery.state)
        self.now_ms += min(timeout_ms, self._busy_ms)
        self._busy_ms -= min(timeout_ms, self._busy_ms)
        if self._busy_ms:
            raise LATE
        if self._error is not None:
            raise self._error

    def clock(self) -> float:
        return self.now_ms / 1000


def recovery_of(device: Device, hang_limit_ms: int = 2000) -> Recovery:
    device.recovery = Recovery(device.recover, hang_limit_ms=hang_limit_ms, clock=device.clock)
    return device.recovery


def recover(device: Device, error: AclError = FAILURE, hang_limit_ms: int = 2000) -> Recovery:
    recovery = recovery_of(device, hang_limit_ms)
    asyncio.run(recovery.run(error))
    return recovery


def test_a_device_that_works_is_asked_once() -> None:
    device = Device()
    assert recover(device).state == "serving"
    assert (device.waits, device.states) == ([TURN_MS], ["recovering"])


def test_a_hung_step_is_waited_for_in_turns() -> None:
    device = Device(busy_ms=1200)
    assert recover(device, LATE).state == "serving"
    assert device.waits == [500, 500, 500]
    assert device.states == ["hung"] * 3


@pytest.mark.parametrize(("busy_ms", "is_given_up"), [(1999, False), (2000, False), (2001, True)])
def test_a_step_may_take_as_long_as_the_limit(busy_ms: int, is_given_up: bool) -> None:
    device = Device(busy_ms)
    if not is_given_up:
        assert not recover(device, LATE).is_given_up
        return
    with pytest.raises(DeviceHung, match=r"507046.*work on the device does not end"):
        recover(device, LATE)
    assert (device.recovery.state, device.recovery.is_given_up) == ("lost", True)
    assert device.waits == [500] * 4


def test_the_last_turn_is_as_long_as_is_left() -> None:
    device = Device(10_000)
    with pytest.raises(DeviceHung):
        recover(device, LATE, hang_limit_ms=1100)
    assert device.waits == [500, 500, 100]


def test_without_any_time_left_it_is_asked_once() -> None:
    device = Device(10_000)
    with pytest.raises(DeviceHung):
        recover(device, LATE, hang_limit_ms=0)
    assert device.waits == [1]


def test_a_question_that_does_not_end_is_a_hang() -> None:
    device = Device(busy_ms=600)
    recover(device, FAILURE)
    assert device.states == ["recovering", "hung"]


def test_giving_up_ends_the_wait_with_the_turn() -> None:
    device = Device(busy_ms=1200)
    recovery_of(device).give_up()
    with pytest.raises(DeviceHung):
        asyncio.run(device.recovery.run(LATE))
    assert device.waits == [500]
    assert device.recovery.is_given_up


def test_giving_up_says_nothing_of_a_device_that_works() -> None:
    device = Device()
    recovery_of(device).give_up()
    asyncio.run(device.recovery.run(FAILURE))
    assert (device.recovery.state, device.recovery.is_given_up) == ("serving", False)


def test_a_lost_device_is_lost_and_waited_for_no_more() -> None:
    device = Device(error=LOST)
    with pytest.raises(DeviceLost, match="abnormal"):
        recover(device)
    assert (device.recovery.state, device.recovery.is_given_up) == ("lost", False)


@pytest.mark.parametrize("num_before_a_good_step", [0, 1, MAX_FAILURES - 1])
def test_many_failures_in_a_row_are_a_lost_device(num_before_a_good_step: int) -> None:
    async def scene() -> None:
        for _ in range(num_before_a_good_step):
            await recovery.run(FAILURE)
        recovery.note_done()
        for _ in range(MAX_FAILURES - 1):
            await recovery.run(FAILURE)
        assert recovery.state == "serving"
        with pytest.raises(DeviceLost, match=r"507015.*: 8 steps in a row have failed, this one"):
            await recovery.run(FAILURE)

    recovery = recovery_of(Device())
    asyncio.run(scene())
    assert recovery.state == "lost"


def test_a_device_that_needs_no_recovery() -> None:
    recovery = Recovery()
    asyncio.run(recovery.run(FAILURE))
    assert recovery.state == "serving"
    recovery.note_lost()
    assert (recovery.state, recovery.is_given_up) == ("lost", False)
