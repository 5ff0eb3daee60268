"""Streams, events, contexts: nothing happens before its turn, failures surface at synchronise."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.streams import Stream
from tests.support.aclsim import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    MIB,
    POISON,
    Array,
    device_bytes,
    fresh_process,
    ok,
    pinned,
    upload,
)

pytestmark = pytest.mark.usefixtures("fresh_device")

HOST_TO_HOST = 0


def in_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in a new thread and returns its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="other")
    thread.start()
    thread.join()
    return results[0]


def filled(value: int, size: int = 64) -> Array:
    return np.full(size, value, np.uint8)


# --- order ---


def test_a_queued_copy_takes_effect_only_at_its_turn(stream: int) -> None:
    host, view = pinned(64)
    view[:] = 1
    device = ok(acl.rt.malloc(64, 0))
    with inspect.hold(stream):
        ok(acl.rt.memcpy_async(device, 64, host, 64, HOST_TO_DEVICE, stream))
        assert acl.rt.stream_query(stream) == (1, 0)
        assert device_bytes(device, 64) == POISON * 16
    ok(acl.rt.synchronize_stream(stream))
    assert acl.rt.stream_query(stream) == (0, 0)
    assert device_bytes(device, 64) == bytes([1] * 64)


def test_a_pinned_buffer_rewritten_too_early_corrupts_the_copy(stream: int) -> None:
    host, view = pinned(64)
    view[:] = 1
    device = ok(acl.rt.malloc(64, 0))
    with inspect.hold(stream):
        ok(acl.rt.memcpy_async(device, 64, host, 64, HOST_TO_DEVICE, stream))
        view[:] = 2
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(device, 64) == bytes([2] * 64)


def test_a_pageable_buffer_is_read_at_the_call(stream: int) -> None:
    host = filled(1)
    device = ok(acl.rt.malloc(64, 0))
    with inspect.hold(stream):
        ok(acl.rt.memcpy_async(device, 64, host.ctypes.data, 64, HOST_TO_DEVICE, stream))
        host[:] = 2
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(device, 64) == bytes([1] * 64)


def test_done_work_is_let_go_although_nobody_synchronised() -> None:
    class Work:
        def __call__(self) -> None: ...

    works = [Work(), Work()]
    gone = [weakref.ref(work) for work in works]
    stream = Stream("stream", lambda failure: None, lambda: None)
    stream.submit("acl.rt.memcpy_async", works.pop(), works.pop(), writes=((1 << 60, 64),))
    stream.close()
    assert [ref() for ref in gone] == [None, None]


def test_a_copy_to_pageable_memory_has_happened_on_return(stream: int) -> None:
    host = filled(0)
    device = upload(filled(5))
    ok(acl.rt.memcpy_async(host.ctypes.data, 64, device, 64, DEVICE_TO_HOST, stream))
    assert host.tolist() == [5] * 64


def test_work_of_one_stream_happens_in_order(stream: int) -> None:
    a, b, c = upload(filled(1)), upload(filled(2)), upload(filled(3))
    ok(acl.rt.memcpy_async(b, 64, a, 64, DEVICE_TO_DEVICE, stream))
    ok(acl.rt.memcpy_async(c, 64, b, 64, DEVICE_TO_DEVICE, stream))
    ok(acl.rt.memset_async(a, 64, 9, 32, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(c, 64) == bytes([1] * 64)
    assert device_bytes(a, 64) == bytes([9] * 32 + [1] * 32)


def test_large_copies_arrive_whole(stream: int) -> None:
    host, view = pinned(3 * MIB)
    view[:] = np.arange(3 * MIB, dtype=np.uint32).astype(np.uint8)
    device = ok(acl.rt.malloc(3 * MIB, 0))
    ok(acl.rt.memcpy_async(device, 3 * MIB, host, 3 * MIB, HOST_TO_DEVICE, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(device, 3 * MIB) == view.tobytes()


def test_streams_do_not_wait_for_each_other_or_the_default_stream(stream: int) -> None:
    device = upload(filled(0))
    with inspect.hold(stream), inspect.hold(0):
        other = ok(acl.rt.create_stream())
        ok(acl.rt.memset_async(device, 64, 4, 64, other))
        ok(acl.rt.synchronize_stream(other))
        assert device_bytes(device, 64) == bytes([4] * 64)


def test_synchronize_device_waits_for_every_stream(stream: int) -> None:
    device = upload(filled(0))
    ok(acl.rt.memset_async(device, 64, 1, 32, stream))
    ok(acl.rt.memset_async(device + 32, 32, 2, 32, 0))
    ok(acl.rt.synchronize_device())
    assert device_bytes(device, 64) == bytes([1] * 32 + [2] * 32)


def test_destroy_stream_waits_for_its_work(stream: int) -> None:
    device = upload(filled(0))
    ok(acl.rt.memset_async(device, 64, 1, 64, stream))
    ok(acl.rt.destroy_stream(stream))
    assert device_bytes(device, 64) == bytes([1] * 64)
    assert acl.rt.destroy_stream(stream) == 107003
    assert acl.rt.destroy_stream(0) == 100000


def test_expired_synchronize_leaves_the_work_running(stream: int) -> None:
    device = upload(filled(0))
    with inspect.hold(stream):
        ok(acl.rt.memset_async(device, 64, 1, 64, stream))
        assert acl.rt.synchronize_stream_with_timeout(stream, 0) == 507046
        assert acl.rt.synchronize_stream_with_timeout(stream, -2) == 107000
    assert acl.rt.synchronize_stream_with_timeout(stream, -1) == 0
    assert device_bytes(device, 64) == bytes([1] * 64)


def test_synchronize_lets_other_threads_run(stream: int) -> None:
    with inspect.hold(stream):
        context = ok(acl.rt.get_context())

        def wait() -> int:
            ok(acl.rt.set_context(context))
            code: int = acl.rt.synchronize_stream(stream)
            return code

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waiter.is_alive()
    waiter.join()


def test_of_two_threads_that_destroy_a_stream_one_does(stream: int) -> None:
    results: list[int] = []

    def destroy() -> None:
        ok(acl.rt.set_device(0))
        results.append(acl.rt.destroy_stream(stream))

    threads = [threading.Thread(target=destroy) for _ in range(2)]
    with inspect.hold(stream):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 107003]


def test_a_thread_that_still_holds_a_destroyed_stream_is_refused_and_does_not_hang() -> None:
    stream = Stream("test", on_failure=lambda failure: None, lost=lambda: None)
    stream.submit("acl.rt.memset_async", lambda: None)
    stream.close()
    with pytest.raises(AclFailure, match="107003"):
        stream.fence()
    with pytest.raises(AclFailure, match="107003"):
        stream.submit("acl.rt.memset_async", lambda: None)


def test_a_bug_in_the_simulation_surfaces_instead_of_hanging() -> None:
    stream = Stream("test", on_failure=lambda failure: None, lost=lambda: None)
    stream.submit("acl.rt.memset_async", lambda: print(1 / 0))
    with pytest.raises(AclFailure, match=r"507000.*ZeroDivisionError"):
        stream.synchronize()
    stream.close()


# --- failures of queued work ---


def test_use_after_free_in_a_queue_surfaces_at_synchronize(stream: int) -> None:
    source, target = upload(filled(1)), upload(filled(2))
    with inspect.hold(stream):
        assert acl.rt.memcpy_async(target, 64, source, 64, DEVICE_TO_DEVICE, stream) == 0
        assert acl.rt.free(source) == 0
        assert acl.get_recent_err_msg() is None
    assert acl.rt.synchronize_stream(stream) == 507013
    assert acl.get_recent_err_msg() == (
        "acl.rt.synchronize_stream: acl.rt.memcpy_async: "
        f"use after free of device address {source:#x}"
    )
    assert device_bytes(target, 64) == bytes([2] * 64)
    assert acl.rt.synchronize_stream(stream) == 0


def test_out_of_bounds_in_a_queue_surfaces_at_synchronize(stream: int) -> None:
    host, _ = pinned(128)
    device = ok(acl.rt.malloc(64, 0))
    assert acl.rt.memcpy_async(device, 128, host, 65, HOST_TO_DEVICE, stream) == 0
    assert acl.rt.synchronize_stream(stream) == 507013
    assert "run 1 bytes past their allocation" in acl.get_recent_err_msg()


def test_an_overlapping_copy_in_a_queue_surfaces_at_synchronize(stream: int) -> None:
    ptr = upload(np.ones(192, np.uint8))
    assert acl.rt.memcpy_async(ptr + 64, 128, ptr, 128, DEVICE_TO_DEVICE, stream) == 0
    assert acl.rt.synchronize_stream(stream) == 507013
    assert "overlaps itself" in acl.get_recent_err_msg()


def test_later_work_goes_on_after_a_failure_and_the_first_code_is_kept(stream: int) -> None:
    device = upload(filled(0))
    ok(acl.rt.memset_async(device + 64, 64, 1, 64, stream))
    ok(acl.rt.memset_async(device, 64, 7, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507013
    assert device_bytes(device, 64) == bytes([7] * 64)


def test_misaligned_device_end_is_refused_at_the_call(stream: int) -> None:
    host, _ = pinned(128)
    device = ok(acl.rt.malloc(256, 0))
    assert acl.rt.memcpy_async(device + 32, 64, host, 64, HOST_TO_DEVICE, stream) == 107000
    assert "is not 64-byte aligned" in acl.get_recent_err_msg()
    assert acl.rt.memcpy_async(host, 64, device + 8, 8, DEVICE_TO_HOST, stream) == 107000
    assert acl.rt.memcpy_async(device + 64, 64, host + 4, 60, HOST_TO_DEVICE, stream) == 0


def test_host_to_host_is_not_supported(stream: int) -> None:
    a, _ = pinned(64)
    assert acl.rt.memcpy_async(a, 64, a, 64, HOST_TO_HOST, stream) == 207000


# --- contexts and threads ---


def test_a_thread_without_a_context_can_do_nothing(stream: int) -> None:
    assert in_thread(acl.rt.get_context) == (0, 107002)
    assert in_thread(lambda: acl.rt.malloc(64, 0)) == (0, 107002)
    assert in_thread(lambda: acl.rt.synchronize_stream(stream)) == 107002
    assert in_thread(lambda: (acl.rt.create_stream(), acl.get_recent_err_msg())) == (
        (0, 107002),
        "acl.rt.create_stream: thread other has no context",
    )


def test_another_thread_works_after_set_context(stream: int) -> None:
    context = ok(acl.rt.get_context())

    def work() -> tuple[int, int]:
        return acl.rt.set_context(context), acl.rt.synchronize_stream(stream)

    assert in_thread(work) == (0, 0)


def test_set_device_in_two_threads_shares_the_default_context() -> None:
    def work() -> int:
        ok(acl.rt.set_device(0))
        return int(ok(acl.rt.get_context()))

    assert in_thread(work) == ok(acl.rt.get_context())


def test_a_stream_of_another_context_is_107003(stream: int) -> None:
    ok(acl.rt.create_context(0))
    assert acl.rt.synchronize_stream(stream) == 107003
    host, _ = pinned(64)
    device = ok(acl.rt.malloc(64, 0))
    assert acl.rt.memcpy_async(device, 64, host, 64, HOST_TO_DEVICE, stream) == 107003


def test_context_life() -> None:
    default = ok(acl.rt.get_context())
    own = ok(acl.rt.create_context(0))
    assert ok(acl.rt.get_context()) == own
    stream = ok(acl.rt.create_stream())
    assert acl.rt.destroy_context(own) == 107000
    ok(acl.rt.destroy_stream(stream))
    assert acl.rt.destroy_context(own) == 0
    assert acl.rt.get_context() == (0, 107002)
    assert acl.rt.set_context(own) == 107002
    assert acl.rt.set_context(0) == 100000
    assert acl.rt.destroy_context(0) == 100000
    assert acl.rt.set_context(default) == 0
    assert acl.rt.destroy_context(default) == 107000


def test_reset_device_frees_everything_at_the_last_user(stream: int) -> None:
    ok(acl.rt.set_device(0))
    ok(acl.rt.malloc(64, 0))
    assert acl.rt.reset_device(0) == 0
    assert inspect.report().device_allocations == 1
    assert acl.rt.reset_device(0) == 107000  # the stream is alive
    ok(acl.rt.destroy_stream(stream))
    assert acl.rt.reset_device(0) == 0
    assert inspect.report().num_alive == 0
    assert acl.rt.get_context() == (0, 107002)
    assert acl.rt.reset_device(0) == 107000


def test_devices_are_counted_and_have_memory_of_their_own() -> None:
    with fresh_process(device_count=2):
        assert acl.rt.get_device_count() == (2, 0)
        assert acl.rt.set_device(2) == 107001
        assert acl.rt.set_device(-1) == 107001
        first = ok(acl.rt.malloc(64, 0))
        ok(acl.rt.set_device(1))
        assert acl.rt.get_device() == (1, 0)
        assert acl.rt.free(first) == 107000


def test_stream_flags() -> None:
    assert acl.rt.create_stream_with_config(0, 3)[1] == 0
    assert acl.rt.create_stream_with_config(-1, 0) == (0, 107000)
    assert acl.rt.create_stream_with_config(0, 64) == (0, 107000)


# --- events ---


def test_an_event_holds_another_stream_back(stream: int) -> None:
    other = ok(acl.rt.create_stream())
    event = ok(acl.rt.create_event())
    device = upload(filled(0))
    with inspect.hold(stream):
        ok(acl.rt.record_event(event, stream))
        ok(acl.rt.stream_wait_event(other, event))
        ok(acl.rt.memset_async(device, 64, 1, 64, other))
        assert acl.rt.query_event_status(event) == (0, 0)
        assert acl.rt.stream_query(other) == (1, 0)
        assert device_bytes(device, 64) == bytes(64)
    ok(acl.rt.synchronize_stream(other))
    assert acl.rt.query_event_status(event) == (1, 0)
    assert device_bytes(device, 64) == bytes([1] * 64)


def test_synchronize_event_waits_for_the_recording_only(stream: int) -> None:
    event = ok(acl.rt.create_event())
    ok(acl.rt.record_event(event, stream))
    with inspect.hold(stream):
        ok(acl.rt.synchronize_event(event))
        ok(acl.rt.record_event(event, stream))
        assert acl.rt.synchronize_event_with_timeout(event, 0) == 507047
        assert acl.rt.synchronize_event_with_timeout(event, -2) == 107000
    assert acl.rt.synchronize_event_with_timeout(event, -1) == 0


def test_elapsed_time_needs_both_ends(stream: int) -> None:
    start, end = ok(acl.rt.create_event()), ok(acl.rt.create_event())
    ok(acl.rt.record_event(start, stream))
    assert acl.rt.event_elapsed_time(start, end) == (0.0, 107000)
    ok(acl.rt.record_event(end, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert ok(acl.rt.event_elapsed_time(start, end)) >= 0


def test_event_flags(stream: int) -> None:
    plain = ok(acl.rt.create_event_with_flag(8))
    assert acl.rt.query_event_status(plain) == (0, 0)
    assert acl.rt.stream_wait_event(stream, plain) == 107000
    again = ok(acl.rt.create_event_ex_with_flag(1))
    assert acl.rt.query_event_status(again) == (1, 0)
    assert acl.rt.stream_wait_event(stream, again) == 0
    assert acl.rt.destroy_event(again) == 0
    assert acl.rt.record_event(again, stream) == 107000
    assert acl.rt.record_event(stream, stream) == 107000  # a handle of another kind
