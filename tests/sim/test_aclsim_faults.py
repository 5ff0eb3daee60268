"""Scripted failures, at the call and at the turn, and devices that are lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import faults, inspect
from runtime_cache.aclsim.faults import FaultScript
from runtime_cache.aclsim.process import current_stream
from tests.support.aclsim import device_bytes, fresh_process, ok, upload

pytestmark = pytest.mark.usefixtures("fresh_device")

STICKY = (507010, 507053, 507054, 507901)


def test_the_third_call_fails_once() -> None:
    fault = faults.inject("acl.rt.malloc", call=3, code=207018)
    codes = [acl.rt.malloc(64, 0)[1] for _ in range(5)]
    assert codes == [0, 0, 207018, 0, 0]
    assert fault.has_fired
    assert acl.get_recent_err_msg() == "acl.rt.malloc: injected fault: acl.rt.malloc gives 207018"
    assert inspect.report().misuses == ()


def test_faults_of_different_calls_do_not_disturb_each_other() -> None:
    faults.inject("acl.rt.malloc", call=1, code=1)
    faults.inject("acl.rt.malloc", call=3, code=3)
    other = faults.inject("acl.rt.malloc_host", code=2)
    assert [acl.rt.malloc(64, 0)[1] for _ in range(4)] == [1, 0, 3, 0]
    assert not other.has_fired


def test_a_queued_fault_drops_the_work_and_surfaces_at_synchronize(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", call=2, code=507015, when="run")
    ok(acl.rt.memset_async(device, 64, 1, 16, stream))
    ok(acl.rt.memset_async(device + 16, 48, 2, 16, stream))
    ok(acl.rt.memset_async(device + 32, 32, 3, 16, stream))
    assert acl.rt.synchronize_stream(stream) == 507015
    assert device_bytes(device, 64) == bytes([1] * 16 + [0] * 16 + [3] * 16 + [0] * 16)
    assert acl.rt.synchronize_stream(stream) == 0
    assert acl.rt.query_device_status(0) == (0, 0)


def test_clear_forgets_what_is_still_to_come() -> None:
    faults.inject("acl.rt.malloc", code=207001)
    faults.clear()
    assert acl.rt.malloc(64, 0)[1] == 0


@pytest.mark.parametrize("code", STICKY)
def test_a_sticky_code_at_a_call_takes_the_device_away(code: int, stream: int) -> None:
    ptr = ok(acl.rt.malloc(64, 0))
    faults.inject("acl.rt.memset", code=code)
    assert acl.rt.memset(ptr, 64, 0, 64) == code
    assert acl.rt.malloc(64, 0) == (0, code)
    assert acl.rt.free(ptr) == code
    assert acl.rt.synchronize_stream(stream) == code
    assert acl.rt.set_device(0) == code
    assert acl.rt.query_device_status(0) == (1, 0)


def test_a_sticky_code_in_a_queue_takes_the_device_away_and_drops_the_rest(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", code=507054, when="run")
    with inspect.hold(stream):
        ok(acl.rt.memset_async(device, 64, 1, 64, stream))
        ok(acl.rt.memset_async(device, 64, 2, 64, stream))
        assert acl.rt.query_device_status(0) == (0, 0)
    assert acl.rt.synchronize_stream(stream) == 507054
    assert acl.rt.query_device_status(0) == (1, 0)
    assert acl.rt.synchronize_stream(stream) == 507054


def test_a_fresh_process_has_the_device_back() -> None:
    faults.inject("acl.rt.malloc", code=507901)
    acl.rt.malloc(64, 0)
    with fresh_process():
        assert acl.rt.malloc(64, 0)[1] == 0


@pytest.mark.parametrize(
    ("function", "when"),
    [("acl.rt.maloc", "call"), ("acl.rt.malloc", "run"), ("memcpy_async", "run")],
)
def test_mistyped_functions_are_refused(function: str, when: faults.When) -> None:
    with pytest.raises(ValueError, match="is no function that can fail"):
        faults.inject(function, code=1, when=when)


@pytest.mark.parametrize(
    ("call", "code", "sentence"),
    [(0, 1, "counts from 1"), (-1, 1, "count from 1"), (1, 0, "0 is success"), (1, -1, "a code")],
)
def test_impossible_scripts_are_refused(call: int, code: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        faults.inject("acl.rt.malloc", call=call, code=code)


# --- late, and hanging ---

#: Longer than anything here waits; only a hanging test would reach it [ms].
FOR_EVER = 600_000
#: Longer than anything here takes; only a hanging test reaches it [seconds].
PATIENCE_S = 20


def test_a_hang_blocks_the_stream_until_it_is_over_and_the_work_goes_on(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    fault = faults.inject("acl.rt.memset_async", when="run", hang_ms=FOR_EVER)
    ok(acl.rt.memset_async(device, 64, 1, 32, stream))
    ok(acl.rt.memset_async(device + 32, 32, 2, 32, stream))
    assert acl.rt.synchronize_stream_with_timeout(stream, 1) == 507046
    assert acl.rt.stream_query(stream) == (1, 0)
    assert fault.has_fired
    assert device_bytes(device, 64) == bytes(64)
    assert acl.rt.query_device_status(0) == (0, 0)
    current_stream(stream).let_go()
    assert acl.rt.synchronize_stream_with_timeout(stream, FOR_EVER) == 0
    assert device_bytes(device, 64) == bytes([1] * 32 + [2] * 32)


def test_a_hang_may_end_in_a_failure(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", when="run", hang_ms=FOR_EVER, code=507014)
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    assert acl.rt.synchronize_stream_with_timeout(stream, 1) == 507046
    current_stream(stream).let_go()
    assert acl.rt.synchronize_stream(stream) == 507014
    assert device_bytes(device, 64) == bytes(64)


def test_a_reset_ends_a_hang(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", when="run", hang_ms=FOR_EVER)
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    inspect.reset()  # waits for the stream's thread


def test_late_work_is_in_order_and_not_lost(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", when="run", delay_ms=1)
    for value in (1, 2):
        ok(acl.rt.memset_async(device, 64, value, 64, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(device, 64) == bytes([2] * 64)


def test_a_call_comes_late_and_succeeds() -> None:
    fault = faults.inject("acl.rt.malloc", delay_ms=1)
    assert acl.rt.malloc(64, 0)[1] == 0
    assert fault.has_fired


def test_a_call_that_hangs_ends_when_the_faults_are_forgotten() -> None:
    faults.inject("acl.rt.get_device_count", hang_ms=FOR_EVER, code=507899)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(acl.rt.get_device_count()))
    thread.start()
    while inspect.report().calls.get("acl.rt.get_device_count", 0) == 0:
        thread.join(0.001)
    assert found == []
    while thread.is_alive():
        faults.clear()  # it counts its call a moment before it looks for its fault
        thread.join(0.001)
    assert found == [(0, 507899)]


class Forgetful(FaultScript):
    """Somebody else forgets each fault as soon as it has struck."""

    def find(self, function: str, when: faults.When) -> faults.Fault | None:
        found = super().find(function, when)
        self.clear()
        return found


def test_a_call_whose_fault_is_forgotten_before_it_waits_does_not_hang() -> None:
    script, found = Forgetful(), []
    script.add(faults.Fault("acl.rt.malloc", 207018, call=1, wait_ms=FOR_EVER))
    call = threading.Thread(
        target=lambda: found.append(script.strike("acl.rt.malloc", "call")), daemon=True
    )
    call.start()
    call.join(PATIENCE_S)
    assert [failure.code for failure in found if failure is not None] == [207018]


def test_a_hang_that_is_being_queued_is_let_go_too(
    stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lets go in the middle of a submit does it for what comes with it."""
    queued, find = current_stream(stream), faults.script.find
    letting_go = threading.Thread(target=queued.let_go)

    def find_slowly(function: str, when: faults.When) -> faults.Fault | None:
        found = find(function, when)
        if found is not None:
            letting_go.start()
            letting_go.join(0.01)  # it is not to be over before the work is queued
        return found

    monkeypatch.setattr(faults.script, "find", find_slowly)
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", when="run", hang_ms=FOR_EVER)
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    letting_go.join(PATIENCE_S)
    assert acl.rt.synchronize_stream_with_timeout(stream, PATIENCE_S * 1000) == 0


def test_ecc_takes_every_context_of_the_device_away(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    default = ok(acl.rt.get_context())
    own = ok(acl.rt.create_context(0))
    ok(acl.rt.set_context(default))
    faults.inject("acl.rt.memset_async", code=507054, when="run")
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507054
    ok(acl.rt.set_context(own))
    assert acl.rt.create_stream() == (0, 507054)
    assert acl.rt.query_device_status(0) == (1, 0)


def test_a_failed_run_is_told_once_and_leaves_the_device_well(stream: int) -> None:
    device = upload(np.zeros(64, np.uint8))
    faults.inject("acl.rt.memset_async", code=507015, when="run")
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    assert [acl.rt.synchronize_stream(stream) for _ in range(2)] == [507015, 0]
    assert acl.rt.query_device_status(0) == (0, 0)
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 0
