"""After a step that failed the device is asked whether it works, and what follows."""

from __future__ import annotations

import pytest

from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.errors import AclError, DeviceLost, StepTimeout
from tests.sim.conftest import Opener
from tests.support.sum_chat import ONE, Chat, step
from tests.support.sum_model import VARIANTS

MODEL = VARIANTS[0]
COPY, EXECUTE = "acl.rt.memcpy_async", "acl.mdl.execute_async"
STATUS = "acl.rt.query_device_status"
SYNCHRONIZE = "acl.rt.synchronize_stream_with_timeout"
PATIENT_MS = 30_000


def fail_copies(*calls: int, code: int = 507013) -> None:
    for call in calls:
        faults.inject(COPY, code=code, call=call)


def test_a_probe_is_a_question_and_a_small_copy(open_executor: Opener) -> None:
    executor = open_executor(MODEL)
    inspect.clear()
    executor.recover(PATIENT_MS)
    report = inspect.report()
    assert report.calls == {STATUS: 1, COPY: 1, SYNCHRONIZE: 1}
    assert report.copied_bytes == {"D2H": executor.layout.group_token_bytes}


@pytest.mark.parametrize(
    ("step_timeout_ms", "waited_ms"), [(4999, 4999), (5000, 5000), (5001, 5000)]
)
def test_a_probe_is_waited_for_as_long_as_a_step_or_five_seconds(
    step_timeout_ms: int,
    waited_ms: int,
    open_executor: Opener,
    sum_device: AclDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = open_executor(MODEL, step_timeout_ms=step_timeout_ms)
    waited: list[int] = []
    synchronize = sum_device.synchronize

    def listen(timeout_ms: int) -> None:
        waited.append(timeout_ms)
        synchronize(timeout_ms)

    monkeypatch.setattr(sum_device, "synchronize", listen)
    executor.recover(PATIENT_MS)
    assert waited == [waited_ms]


def test_a_step_that_does_not_fail_asks_nothing(open_executor: Opener) -> None:
    executor = open_executor(MODEL)
    inspect.clear()
    executor.run(step(ONE, Chat(MODEL, [1]).feed(1)))
    assert inspect.report().calls == {COPY: 3, EXECUTE: 1, SYNCHRONIZE: 1}
    assert executor.probes.num_probes == 0


def test_a_build_that_cannot_be_asked_is_probed_by_the_copy_alone(
    open_executor: Opener, sum_device: AclDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(MODEL)
    monkeypatch.delattr(sum_device.acl.rt, "query_device_status")
    inspect.clear()
    executor.recover(PATIENT_MS)
    assert inspect.report().calls == {COPY: 1, SYNCHRONIZE: 1}


def test_a_device_for_which_the_question_is_not_made_is_probed_by_the_copy_alone(
    open_executor: Opener,
) -> None:
    executor = open_executor(MODEL)
    faults.inject(STATUS, code=207000)
    executor.recover(PATIENT_MS)
    assert (executor.probes.num_probes, executor.probes.num_failed) == (1, 0)


def test_a_device_that_is_not_in_order_is_lost(
    open_executor: Opener, sum_device: AclDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(MODEL)
    monkeypatch.setattr(sum_device.acl.rt, "query_device_status", lambda device_id: (1, 0))
    with pytest.raises(DeviceLost, match="the device is not in order"):
        executor.recover(PATIENT_MS)
    assert (executor.probes.num_probes, executor.probes.num_failed) == (1, 1)


@pytest.mark.parametrize(("num_failing", "is_lost"), [(1, False), (2, False), (3, True)])
def test_a_device_is_asked_three_times(
    num_failing: int, is_lost: bool, open_executor: Opener
) -> None:
    executor = open_executor(MODEL)
    fail_copies(*range(1, num_failing + 1))
    if is_lost:
        with pytest.raises(DeviceLost, match=r"507013 .*: 3 times in a row, when asked after"):
            executor.recover(PATIENT_MS)
    else:
        executor.recover(PATIENT_MS)
    probes = executor.probes
    assert (probes.num_probes, probes.num_failed) == (min(num_failing + 1, 3), num_failing)


def test_a_loss_is_not_asked_for_twice(open_executor: Opener) -> None:
    executor = open_executor(MODEL)
    fail_copies(1, code=507899)
    with pytest.raises(DeviceLost, match="507899"):
        executor.recover(PATIENT_MS)
    assert executor.probes.num_probes == 1


def test_a_null_block_that_is_not_zero_is_a_lost_device(
    open_executor: Opener, sum_device: AclDevice
) -> None:
    executor = open_executor(MODEL)
    null_ptr = executor._pool.group_ptr(0)
    assert sum_device.acl.rt.memset(null_ptr + 1, 1, 0xFF, 1) == 0
    with pytest.raises(DeviceLost, match="the null block of the KV pool is not zero"):
        executor.recover(PATIENT_MS)


def test_a_probe_that_does_not_end_keeps_the_device_busy(
    open_executor: Opener, sum_device: AclDevice
) -> None:
    executor = open_executor(MODEL, step_timeout_ms=1)
    with inspect.hold(sum_device.stream):
        with pytest.raises(StepTimeout):
            executor.recover(1)
        assert executor.is_in_flight
        with pytest.raises(StepTimeout):
            executor.recover(1)
    executor._step_timeout_ms = PATIENT_MS
    executor.recover(PATIENT_MS)
    assert not executor.is_in_flight
    inspect.clear()  # expired waits count as misuses


def test_what_still_runs_is_waited_for_first_and_its_failure_is_no_news(
    open_executor: Opener, sum_device: AclDevice
) -> None:
    executor = open_executor(MODEL, step_timeout_ms=1)
    faults.inject(EXECUTE, code=507015, when="run")
    with inspect.hold(sum_device.stream), pytest.raises(StepTimeout):
        executor.run(step(ONE, Chat(MODEL, [1]).feed(1)))
    executor._step_timeout_ms = PATIENT_MS
    executor.recover(PATIENT_MS)
    chat = Chat(MODEL, [2])
    assert executor.run(step(ONE, chat.feed(3))).tolist() == [chat.logits()]
    inspect.clear()


@pytest.mark.parametrize("code", [507015, 507046])
def test_a_call_that_fails_while_others_run_on_is_a_step_that_did_not_end(
    code: int, open_executor: Opener, sum_device: AclDevice
) -> None:
    executor = open_executor(MODEL, step_timeout_ms=1)
    faults.inject(COPY, code=code, call=3)
    with inspect.hold(sum_device.stream):
        with pytest.raises(StepTimeout) as caught:
            executor.run(step(ONE, Chat(MODEL, [1]).feed(1)))
        assert isinstance(caught.value.__context__, AclError)
        assert executor.is_in_flight
    executor._step_timeout_ms = PATIENT_MS
    executor.recover(PATIENT_MS)
    inspect.clear()
