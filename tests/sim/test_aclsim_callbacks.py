"""Callbacks: run in the subscribed thread's process_report, in stream order; news of failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import faults, inspect
from tests.support.aclsim import device_bytes, fresh_process, ok, upload

pytestmark = pytest.mark.usefixtures("fresh_device")

NO_BLOCK, BLOCK = 0, 1
NOT_SUBSCRIBED, STREAM_TAKEN, THREAD_UNKNOWN, EXPIRED = 107015, 107011, 107012, 507012
NO_ID = 0xFFFFFFFF


class Worker:
    """A thread that does what it is told, one thing after the other."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self.ident: int = self.do(threading.get_ident)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            self._results.put(order())

    def begin(self, order: Callable[[], Any]) -> None:
        """Has it do something, without waiting."""
        self._orders.put(order)

    def result(self) -> Any:
        """What the oldest order gave, once it is done."""
        return self._results.get()

    def do(self, order: Callable[[], Any]) -> Any:
        """Has it do something, and waits for what it gives."""
        self.begin(order)
        return self.result()

    def process(self, timeout_ms: int = 30_000) -> int:
        """Processes reports once; returns the code."""
        return int(self.do(lambda: acl.rt.process_report(timeout_ms)))

    def end(self) -> None:
        self._orders.put(None)
        self._thread.join()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.end()


# --- reports ---


def test_a_callback_runs_in_the_subscribed_thread_inside_process_report(
    stream: int, worker: Worker
) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    seen: list[tuple[int, object]] = []
    data = {"request": 7}

    def note(user_data: object) -> None:
        seen.append((threading.get_ident(), user_data))

    ok(acl.rt.launch_callback(note, data, NO_BLOCK, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert seen == []  # nobody has processed reports yet
    assert worker.process() == 0
    assert seen == [(worker.ident, data)]
    assert seen[0][1] is data


def test_a_callback_has_its_turn_after_what_was_queued_before_it(
    stream: int, worker: Worker
) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    device, seen = upload(np.zeros(64, np.uint8)), []
    context = ok(acl.rt.get_context())
    ok(worker.do(lambda: acl.rt.set_context(context)))
    with inspect.hold(stream):
        ok(acl.rt.memset_async(device, 64, 5, 64, stream))
        ok(acl.rt.launch_callback(lambda _: seen.append(device_bytes(device, 1)), 0, 0, stream))
        assert worker.process(1) == EXPIRED
    assert worker.process() == 0
    assert seen == [b"\x05"]


def test_a_blocking_callback_holds_the_stream_until_it_returned(
    stream: int, worker: Worker
) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    device, seen = upload(np.zeros(64, np.uint8)), []
    context = ok(acl.rt.get_context())
    ok(worker.do(lambda: acl.rt.set_context(context)))
    ok(acl.rt.launch_callback(lambda _: seen.append(device_bytes(device, 1)), 0, BLOCK, stream))
    ok(acl.rt.memset_async(device, 64, 5, 64, stream))
    assert acl.rt.stream_query(stream) == (1, 0)
    assert acl.rt.synchronize_stream_with_timeout(stream, 0) == 507046
    assert worker.process() == 0
    ok(acl.rt.synchronize_stream(stream))
    assert seen == [b"\0"]
    assert device_bytes(device, 1) == b"\x05"


def test_one_call_takes_all_reports_there_are_in_order(stream: int, worker: Worker) -> None:
    other, seen = ok(acl.rt.create_stream()), []
    for each in (stream, other):
        ok(acl.rt.subscribe_report(worker.ident, each))
    for number in range(3):
        ok(acl.rt.launch_callback(seen.append, number, NO_BLOCK, stream))
    ok(acl.rt.synchronize_stream(stream))
    ok(acl.rt.launch_callback(seen.append, "other", NO_BLOCK, other))
    ok(acl.rt.synchronize_stream(other))
    assert worker.process() == 0
    assert seen == [0, 1, 2, "other"]
    assert worker.process(1) == EXPIRED


def test_process_report_waits_for_ever_with_minus_one(stream: int, worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    seen: list[int] = []
    worker.begin(lambda: acl.rt.process_report(-1))
    ok(acl.rt.launch_callback(seen.append, 1, NO_BLOCK, stream))
    assert worker.result() == 0
    assert seen == [1]


def test_what_a_callback_raises_vanishes_but_for_a_note(stream: int, worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))

    def fail(user_data: object) -> None:
        raise LookupError(f"no {user_data}")

    ok(acl.rt.launch_callback(fail, "pages", BLOCK, stream))
    assert worker.process() == 0
    assert acl.rt.synchronize_stream(stream) == 0
    assert inspect.report().misuses == (
        "a callback raised LookupError('no pages'), which vanishes on a card",
    )


def test_the_function_must_be_callable(stream: int) -> None:
    with pytest.raises(TypeError, match="cannot be called"):
        acl.rt.launch_callback("print", None, NO_BLOCK, stream)


# --- subscriptions ---


def test_without_a_subscription_nothing_is_launched(stream: int, worker: Worker) -> None:
    assert acl.rt.launch_callback(print, None, NO_BLOCK, stream) == NOT_SUBSCRIBED
    assert worker.process(1) == THREAD_UNKNOWN
    ok(acl.rt.subscribe_report(worker.ident, 0))
    assert acl.rt.launch_callback(print, None, NO_BLOCK, stream) == NOT_SUBSCRIBED
    assert acl.rt.launch_callback(id, None, NO_BLOCK, 0) == 0


def test_a_stream_has_one_thread_and_a_thread_many_streams(stream: int, worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    assert acl.rt.subscribe_report(worker.ident, stream) == STREAM_TAKEN
    assert acl.rt.subscribe_report(worker.ident + 1, stream) == STREAM_TAKEN
    assert acl.rt.subscribe_report(worker.ident, 0) == 0


def test_unsubscribing_names_a_thread_and_its_stream(stream: int, worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    assert acl.rt.unsubscribe_report(worker.ident + 1, stream) == THREAD_UNKNOWN
    assert acl.rt.unsubscribe_report(worker.ident, 0) == STREAM_TAKEN
    ok(acl.rt.unsubscribe_report(worker.ident, stream))
    assert acl.rt.unsubscribe_report(worker.ident, stream) == THREAD_UNKNOWN
    assert acl.rt.launch_callback(print, None, NO_BLOCK, stream) == NOT_SUBSCRIBED
    assert acl.rt.subscribe_report(worker.ident + 1, stream) == 0


def test_unsubscribing_wakes_a_thread_that_waits_for_ever(stream: int, worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    worker.begin(lambda: acl.rt.process_report(-1))
    ok(acl.rt.unsubscribe_report(worker.ident, stream))
    assert worker.result() == THREAD_UNKNOWN


def test_polling_before_the_subscription_is_no_misuse(worker: Worker) -> None:
    worker.process(1)
    assert inspect.report().misuses == ()


@pytest.mark.parametrize("way", ["abort", "unsubscribe", "destroy_stream_force"])
def test_a_launched_callback_that_is_given_up_never_runs_and_frees_its_stream(
    stream: int, worker: Worker, way: str
) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    ok(acl.rt.subscribe_report(worker.ident, 0))  # keeps the thread subscribed
    seen: list[int] = []
    ok(acl.rt.launch_callback(seen.append, 1, BLOCK, stream))
    if way == "abort":
        ok(acl.rt.stream_abort(stream))
    elif way == "unsubscribe":
        ok(acl.rt.unsubscribe_report(worker.ident, stream))
    else:
        ok(acl.rt.destroy_stream_force(stream))
    if way != "destroy_stream_force":
        assert acl.rt.synchronize_stream(stream) == 0
    ok(acl.rt.launch_callback(seen.append, 2, NO_BLOCK, 0))
    ok(acl.rt.synchronize_stream(0))
    assert worker.process() == 0
    assert seen == [2]


@pytest.mark.parametrize("function", ["destroy_stream", "reset_device"])
def test_waiting_for_a_callback_with_the_gil_is_named(worker: Worker, function: str) -> None:
    stream = ok(acl.rt.create_stream()) if function == "destroy_stream" else 0
    ok(acl.rt.subscribe_report(worker.ident, stream))
    go_on = threading.Event()
    ok(acl.rt.launch_callback(lambda _: go_on.wait(), None, BLOCK, stream))
    worker.begin(lambda: acl.rt.process_report(30_000))
    context, codes = ok(acl.rt.get_context()), []

    def end() -> None:
        ok(acl.rt.set_context(context))
        codes.append(getattr(acl.rt, function)(stream))

    ending = threading.Thread(target=end)
    ending.start()
    while not inspect.report().misuses:
        ending.join(0.001)
    go_on.set()
    ending.join()
    assert (codes, worker.result()) == ([0], 0)
    assert inspect.report().misuses == (
        f"acl.rt.{function} waits for a callback that has not run: on a card neither would go on;"
        " synchronise and unsubscribe first",
    )


def test_a_callback_that_does_not_block_is_waited_for_by_nobody(
    stream: int, worker: Worker
) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    ok(acl.rt.launch_callback(print, None, NO_BLOCK, stream))
    ok(acl.rt.destroy_stream(stream))
    assert inspect.report().misuses == ()


def test_reset_device_force_gives_callbacks_up(worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, 0))
    ok(acl.rt.launch_callback(print, None, BLOCK, 0))
    ok(acl.rt.reset_device_force(0))
    assert worker.process(1) == THREAD_UNKNOWN


def test_a_scripted_fault_takes_a_callback_away(stream: int, worker: Worker) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    faults.inject("acl.rt.launch_callback", code=507000, when="run")
    ok(acl.rt.launch_callback(print, None, BLOCK, stream))
    assert acl.rt.synchronize_stream(stream) == 507000
    assert worker.process(1) == EXPIRED


# --- exception infos ---

GETTERS = ("error_code", "task_id", "stream_id", "thread_id", "device_id")


def details(info: int) -> tuple[int, ...]:
    """All that an exception info tells."""
    return tuple(getattr(acl.rt, f"get_{name}_from_exception_info")(info) for name in GETTERS)


def failing_copy(stream: int) -> None:
    """Queues a copy that runs past its allocation."""
    device = ok(acl.rt.malloc(64, 0))
    ok(acl.rt.memset_async(device + 64, 64, 0, 64, stream))


def test_the_exception_callback_is_told_of_failed_tasks(stream: int) -> None:
    seen: list[tuple[int, ...]] = []
    ok(acl.rt.set_exception_info_callback(lambda info: seen.append(details(info))))
    device = ok(acl.rt.malloc(64, 0))
    ok(acl.rt.memset_async(device, 64, 0, 64, stream))
    failing_copy(stream)
    assert acl.rt.synchronize_stream(stream) == 507013
    stream_id = ok(acl.rt.stream_get_id(stream))
    assert seen == [(507013, 1, stream_id, threading.get_native_id(), 0)]


def test_a_lost_device_has_no_task(stream: int) -> None:
    seen: list[tuple[int, ...]] = []
    ok(acl.rt.set_exception_info_callback(lambda info: seen.append(details(info))))
    faults.inject("acl.rt.memset_async", code=507054, when="run")
    failing_copy(stream)
    assert acl.rt.synchronize_stream(stream) == 507054
    assert seen == [(507054, NO_ID, NO_ID, NO_ID, 0)]


def test_an_info_is_good_inside_its_callback_only(stream: int) -> None:
    infos: list[int] = []
    ok(acl.rt.set_exception_info_callback(infos.append))
    failing_copy(stream)
    acl.rt.synchronize_stream(stream)
    assert details(infos[0]) == (NO_ID,) * 5


@pytest.mark.parametrize("args", [(), (None,)], ids=["none", "None"])
def test_the_exception_callback_can_be_replaced_and_cleared(
    stream: int, args: tuple[None, ...]
) -> None:
    first, second = [], []
    ok(acl.rt.set_exception_info_callback(first.append))
    ok(acl.rt.set_exception_info_callback(second.append))
    failing_copy(stream)
    assert acl.rt.synchronize_stream(stream) == 507013
    ok(acl.rt.set_exception_info_callback(*args))
    failing_copy(stream)
    assert acl.rt.synchronize_stream(stream) == 507013
    assert (len(first), len(second)) == (0, 1)


def test_an_exception_callback_that_raises_is_never_called_again(stream: int) -> None:
    calls: list[int] = []

    def fail(info: int) -> None:
        calls.append(info)
        raise ValueError("no")

    ok(acl.rt.set_exception_info_callback(fail))
    for _ in range(2):
        failing_copy(stream)
        assert acl.rt.synchronize_stream(stream) == 507013
    assert len(calls) == 1
    assert any(
        "the exception callback raised ValueError('no')" in m for m in inspect.report().misuses
    )


def test_a_callback_that_exits_ends_neither_its_thread_nor_the_stream(
    stream: int, worker: Worker
) -> None:
    ok(acl.rt.subscribe_report(worker.ident, stream))
    ok(acl.rt.launch_callback(sys.exit, 3, BLOCK, stream))
    assert worker.process() == 0
    ok(acl.rt.set_exception_info_callback(sys.exit))
    failing_copy(stream)
    assert acl.rt.synchronize_stream(stream) == 507013
    assert acl.rt.synchronize_stream(stream) == 0


def test_the_exception_callback_must_be_callable() -> None:
    complaint = "acl.rt.set_exception_info_callback args parse failed"
    with pytest.raises(TypeError, match=complaint):
        acl.rt.set_exception_info_callback(5)


def test_a_fresh_process_has_no_callback(stream: int) -> None:
    seen: list[int] = []
    ok(acl.rt.set_exception_info_callback(seen.append))
    with fresh_process():
        failing_copy(0)
        assert acl.rt.synchronize_stream(0) == 507013
    assert seen == []
