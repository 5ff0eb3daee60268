"""Who is told that the daemon lives: nobody while the device thread or the event loop is stuck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from runtime_cache.device.thread import DeviceThread
from runtime_cache.notify import Notifier
from runtime_cache.watchdog import Watchdog
from tests.support.service_manager import ServiceManager

ALIVE = {"WATCHDOG": "1"}
STUCK = {"STATUS": "Stuck: a call of the driver does not return"}
SERVING = {"STATUS": "Serving"}


@dataclass
class Thread:
    """A device thread that is as a test wants it."""

    is_alive: bool = True
    overdue_s: float = 0.0


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    with ServiceManager() as manager:
        yield manager


@pytest.fixture
def thread() -> Thread:
    return Thread()


Make = Callable[..., Watchdog]


@pytest.fixture
def make(manager: ServiceManager) -> Iterator[Make]:
    """Makes a watchdog that tells the manager."""
    with ExitStack() as notifiers:

        def make(thread: Thread | DeviceThread, watchdog_s: float | None = 2.0) -> Watchdog:
            notifier = notifiers.enter_context(closing(Notifier(manager.address, watchdog_s)))
            return Watchdog(notifier, thread, lambda: "Serving")

        yield make


def test_all_is_well(manager: ServiceManager, make: Make, thread: Thread) -> None:
    watchdog = make(thread)
    watchdog.look()
    watchdog.look()
    assert manager.rest() == [SERVING, ALIVE, ALIVE]


def test_the_device_thread_is_overdue_by_as_much_as_the_manager_waits(
    manager: ServiceManager, make: Make, thread: Thread
) -> None:
    watchdog = make(thread)
    with capture_logs() as lines:
        for thread.overdue_s in (2.0, 2.1, 9.0, 0.0):
            watchdog.look()
    assert manager.rest() == [SERVING, ALIVE, STUCK, SERVING, ALIVE]
    assert [line["event"] for line in lines] == ["watchdog_withheld", "watchdog_resumed"]
    assert lines[0]["device_thread_overdue_s"] == 2.1


def test_the_device_thread_has_ended(manager: ServiceManager, make: Make, thread: Thread) -> None:
    thread.is_alive = False
    make(thread).look()
    assert manager.rest() == [STUCK]


def test_a_manager_without_a_watchdog_hears_the_status(
    manager: ServiceManager, make: Make, thread: Thread
) -> None:
    thread.overdue_s = 1e6
    make(thread, None).look()
    assert manager.rest() == [SERVING]


async def test_it_goes_on_until_it_is_stopped(
    manager: ServiceManager, make: Make, thread: Thread
) -> None:
    watchdog = make(thread, 0.01)
    watchdog.start()
    await asyncio.to_thread(lambda: [manager.until(ALIVE.__eq__) for _ in range(3)])
    watchdog.stop()
    watchdog.stop()
    await asyncio.sleep(0)  # the task ends
    manager.rest()
    assert len(asyncio.all_tasks()) == 1


async def test_a_loop_that_is_stuck_says_nothing(
    manager: ServiceManager, make: Make, thread: Thread
) -> None:
    watchdog = make(thread, 0.01)
    watchdog.start()
    await asyncio.to_thread(manager.until, ALIVE.__eq__)
    manager.rest()
    threading.Event().wait(0.05)  # what keeps the loop; five times the limit
    assert manager.rest() == []
    await asyncio.to_thread(manager.until, ALIVE.__eq__)
    watchdog.stop()


@pytest.mark.parametrize(("limit_s", "period_s"), [(None, 5.0), (3.0, 1.0), (60.0, 5.0)])
async def test_how_often_it_looks(
    make: Make,
    thread: Thread,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float | None,
    period_s: float,
) -> None:
    waits, is_waiting = [], asyncio.Event()

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        is_waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("runtime_cache.watchdog.asyncio.sleep", sleep)
    watchdog = make(thread, limit_s)
    watchdog.start()
    await is_waiting.wait()
    watchdog.stop()
    assert waits == [period_s]


async def test_nothing_runs_without_a_manager(thread: Thread) -> None:
    watchdog = Watchdog(Notifier(), thread, lambda: "Serving")
    watchdog.start()
    assert len(asyncio.all_tasks()) == 1


async def test_a_promise_of_the_device_thread_is_waited_for(
    manager: ServiceManager, make: Make
) -> None:
    now_s = 100.0
    thread = DeviceThread(clock=lambda: now_s)
    watchdog = make(thread)
    begun, may_go_on, may_end = threading.Event(), threading.Event(), threading.Event()

    def synchronise() -> None:
        thread.promise(30.0)
        begun.set()
        may_go_on.wait()
        thread.promise(0.0)
        begun.set()
        may_end.wait()

    running = thread.start(synchronise)
    await asyncio.to_thread(begun.wait)
    for late_s in (-1.0, 2.0, 3.0):
        now_s = 130.0 + late_s
        watchdog.look()
    begun.clear()
    may_go_on.set()
    await asyncio.to_thread(begun.wait)
    for late_s in (2.0, 3.0):
        now_s = 133.0 + late_s
        watchdog.look()
    may_end.set()
    await running
    await thread.close()
    assert manager.rest() == [SERVING, ALIVE, ALIVE, STUCK, SERVING, ALIVE, STUCK]


async def test_a_look_that_fails_is_logged_and_not_the_last(manager: ServiceManager) -> None:
    turns = iter(["", *["Serving"] * 1000])

    def status() -> str:
        if text := next(turns):
            return text
        raise RuntimeError("no status")

    with closing(Notifier(manager.address, 0.03)) as notifier, capture_logs() as logs:
        watchdog = Watchdog(notifier, Thread(), status)
        watchdog.start()
        assert await asyncio.to_thread(manager.next) == SERVING
        watchdog.stop()
    assert [line["event"] for line in logs] == ["watchdog_failed"]
