"""Devices and streams beyond the plain case: forced ends, aborts, stop on failure, questions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import faults, inspect
from tests.support.aclsim import device_bytes, fresh_process, ok, upload

pytestmark = pytest.mark.usefixtures("fresh_device")

ABORTED, EXPIRED = 107023, 507046


def zeros() -> int:
    """64 bytes of device memory that hold 0."""
    return upload(np.zeros(64, np.uint8))


class Waiter:
    """Calls something in a thread of its own, in the current context."""

    def __init__(self, call: Callable[[], Any]) -> None:
        context, self._results = ok(acl.rt.get_context()), []
        self._calling = threading.Event()

        def work() -> None:
            ok(acl.rt.set_context(context))
            self._calling.set()
            self._results.append(call())

        self._thread = threading.Thread(target=work)
        self._thread.start()
        self._calling.wait()

    def is_over(self) -> bool:
        """Whether the call returned; gives other threads a moment."""
        self._thread.join(0.001)
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join()
        return self._results[0]


# --- ends that do not wait ---


def test_reset_device_force_closes_a_device_for_all_its_users(stream: int) -> None:
    ok(acl.rt.set_device(0))
    own = ok(acl.rt.create_context(0))
    ok(acl.rt.create_stream())
    zeros()
    assert acl.rt.reset_device_force(0) == 0
    assert acl.rt.get_context() == (0, 107002)
    assert acl.rt.set_context(own) == 107002
    report = inspect.report()
    assert (report.device_allocations, report.streams, report.contexts) == (0, 0, 0)
    assert acl.rt.reset_device_force(0) == 107000
    assert acl.rt.set_device(0) == 0


def test_reset_device_force_does_not_wait_for_a_hang(stream: int) -> None:
    faults.inject("acl.rt.memset_async", hang_ms=3_600_000, when="run")
    ok(acl.rt.memset_async(zeros(), 64, 1, 64, stream))
    assert acl.rt.reset_device_force(0) == 0


def test_destroy_stream_force_drops_what_is_queued(stream: int) -> None:
    device = zeros()
    faults.inject("acl.rt.memset_async", hang_ms=3_600_000, when="run")
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    ok(acl.rt.memset_async(device, 64, 2, 64, stream))
    assert acl.rt.destroy_stream_force(stream) == 0
    assert acl.rt.synchronize_stream(stream) == 107003
    assert inspect.report().streams == 0
    assert device_bytes(device, 1) == b"\0"


# --- abort ---


def test_abort_drops_what_is_queued_and_the_stream_goes_on(stream: int) -> None:
    device = zeros()
    with inspect.hold(stream):
        ok(acl.rt.memset_async(device, 64, 1, 64, stream))
        ok(acl.rt.stream_abort(stream))
    assert acl.rt.synchronize_stream(stream) == 0
    assert device_bytes(device, 1) == b"\0"
    ok(acl.rt.memset_async(device, 64, 2, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 0
    assert device_bytes(device, 1) == b"\x02"


@pytest.mark.parametrize("waits_for", ["stream", "device"])
def test_who_waits_for_an_aborted_stream_gets_107023(stream: int, waits_for: str) -> None:
    def wait() -> int:
        if waits_for == "device":
            return int(acl.rt.synchronize_device_with_timeout(-1))
        return int(acl.rt.synchronize_stream(stream))

    with inspect.hold(stream):
        waiter = Waiter(wait)
        while not waiter.is_over():  # it may not be waiting yet
            ok(acl.rt.stream_abort(stream))
    assert waiter.result() == ABORTED


# --- failure mode ---


def test_stop_on_failure_stops_the_whole_context(stream: int) -> None:
    other, device = ok(acl.rt.create_stream()), zeros()
    assert acl.rt.set_stream_failure_mode(stream, 1) == 0
    faults.inject("acl.rt.memset_async", code=507015, when="run")
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507015
    assert acl.rt.memset_async(device, 64, 2, 64, stream) == 507015
    assert acl.rt.memset_async(device, 64, 2, 64, other) == 507015
    assert acl.rt.memset_async(device, 64, 2, 64, 0) == 507015
    assert device_bytes(device, 1) == b"\0"
    ok(acl.rt.create_context(0))
    assert acl.rt.memset_async(device, 64, 3, 64, 0) == 0


def test_continue_on_failure_goes_on(stream: int) -> None:
    device = zeros()
    assert acl.rt.set_stream_failure_mode(stream, 0) == 0
    faults.inject("acl.rt.memset_async", code=507015, when="run")
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    ok(acl.rt.memset_async(device, 64, 2, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507015
    assert device_bytes(device, 1) == b"\x02"


@pytest.mark.parametrize("mode", [0, 1])
def test_the_failure_mode_is_set_once(stream: int, mode: int) -> None:
    assert acl.rt.set_stream_failure_mode(stream, mode) == 0
    assert acl.rt.set_stream_failure_mode(stream, mode) == 107000


# --- waiting for a device ---


def test_a_device_synchronise_expires_and_the_work_goes_on(stream: int) -> None:
    device = zeros()
    with inspect.hold(stream):
        ok(acl.rt.memset_async(device, 64, 1, 64, stream))
        assert acl.rt.synchronize_device_with_timeout(0) == EXPIRED
        assert acl.rt.synchronize_device_with_timeout(1) == EXPIRED
    assert acl.rt.synchronize_device_with_timeout(-1) == 0
    assert device_bytes(device, 1) == b"\x01"


@pytest.mark.parametrize("timeout_ms", [-1, 30_000])
def test_a_device_synchronise_gives_the_failure_of_any_stream(stream: int, timeout_ms: int) -> None:
    faults.inject("acl.rt.memset_async", code=507015, when="run")
    ok(acl.rt.memset_async(zeros(), 64, 1, 64, stream))
    assert acl.rt.synchronize_device_with_timeout(timeout_ms) == 507015
    assert acl.rt.synchronize_device_with_timeout(timeout_ms) == 0


# --- questions ---


def test_the_utilization_says_busy_or_idle(stream: int) -> None:
    with inspect.hold(stream):
        busy = ok(acl.rt.get_device_utilization_rate(0))
    ok(acl.rt.synchronize_stream(stream))
    idle = ok(acl.rt.get_device_utilization_rate(0))
    assert (busy["cube_utilization"], idle["cube_utilization"]) == (100, 0)
    assert (busy["vector_utilization"], idle["vector_utilization"]) == (100, 0)
    assert idle["memory_utilization"] == -1
    assert idle["utilization_extend"] == 0


def test_the_primary_context_exists_while_the_device_is_set() -> None:
    assert acl.rt.get_primary_ctx_state(0) == (1, 0, 0)
    ok(acl.rt.reset_device(0))
    assert acl.rt.get_primary_ctx_state(0) == (0, 0, 0)


def test_devices_have_no_links() -> None:
    with fresh_process(device_count=2):
        assert acl.rt.device_can_access_peer(0, 1) == (0, 0)
        assert acl.rt.device_enable_peer_access(1, 0) == 207000


def test_streams_have_ids_of_their_own(stream: int) -> None:
    ids = [ok(acl.rt.stream_get_id(each)) for each in (0, stream, ok(acl.rt.create_stream()))]
    assert len(set(ids)) == 3


def test_a_lost_device_is_abnormal_and_answers_nothing_else(stream: int) -> None:
    assert acl.rt.query_device_status(0) == (0, 0)
    faults.inject("acl.rt.memset_async", code=507901, when="run")
    ok(acl.rt.memset_async(zeros(), 64, 1, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507901
    assert acl.rt.query_device_status(0) == (1, 0)
    assert acl.rt.get_device() == (0, 507901)
    assert acl.rt.get_device_utilization_rate(0)[1] == 507901
    assert acl.rt.malloc(64, 0) == (0, 507901)
