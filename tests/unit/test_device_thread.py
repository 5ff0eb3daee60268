"""One thread, calls in order, errors come back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime_cache.device.thread import DeviceThread


async def test_every_call_runs_on_the_same_other_thread() -> None:
    thread = DeviceThread()
    names = {await thread.run(threading.get_ident) for _ in range(3)}
    await thread.close()
    assert len(names) == 1
    assert threading.get_ident() not in names


async def test_calls_run_in_the_order_they_were_asked_for() -> None:
    thread = DeviceThread()
    log: list[int] = []
    await asyncio.gather(*(thread.run(log.append, number) for number in range(50)))
    await thread.close()
    assert log == list(range(50))


async def test_results_and_errors_come_back() -> None:
    thread = DeviceThread()
    assert await thread.run(int, "12", base=16) == 18
    with pytest.raises(ValueError, match="invalid literal"):
        await thread.run(int, "x")
    assert await thread.run(int, "3") == 3
    await thread.close()


async def test_a_cancelled_wait_leaves_the_call_to_its_end() -> None:
    thread = DeviceThread()
    started, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        started.set()
        may_end.wait()
        ended.set()

    task = asyncio.ensure_future(thread.run(step))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert await thread.run(ended.is_set)
    await thread.close()


async def test_closed_twice_and_not_used_again() -> None:
    thread = DeviceThread()
    await thread.close()
    await thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        await thread.run(int)


async def test_what_is_started_runs_before_the_loop_goes_on() -> None:
    thread = DeviceThread()
    has_run = threading.Event()
    running = thread.start(has_run.set)
    assert has_run.wait(10)  # nothing has been awaited yet
    await running
    await thread.close()


async def test_closing_ends_the_thread_and_needs_no_other() -> None:
    thread = DeviceThread()
    own = await thread.run(threading.current_thread)
    # Whoever does not close it does not hang either.
    assert (own.name, own.daemon) == ("device", True)
    with pytest.MonkeyPatch.context() as patch:  # as after the end of the main program
        patch.setattr(threading.Thread, "start", None)
        await thread.close()
    assert not own.is_alive()


async def test_nothing_is_overdue_while_nothing_runs() -> None:
    now_s = 10.0
    thread = DeviceThread(clock=lambda: now_s)
    await thread.run(int)
    await thread.run(thread.promise, -5.0)
    now_s = 1000.0
    # The last function has returned before its end is noted, so another one is waited for.
    await thread.close()
    assert (thread.overdue_s, thread.is_alive) == (0.0, False)


async def test_a_function_is_overdue_from_its_begin_unless_it_promises() -> None:
    now_s = 10.0
    thread = DeviceThread(clock=lambda: now_s)
    begun, may_end = threading.Event(), threading.Event()

    def load(may_take_s: float | None) -> None:
        if may_take_s is not None:
            thread.promise(may_take_s)
        begun.set()
        may_end.wait()

    overdue = []
    for may_take_s in (None, 7.0):
        running = thread.start(load, may_take_s)
        await asyncio.to_thread(begun.wait)
        now_s += 8.0
        overdue.append(thread.overdue_s)
        begun.clear()
        may_end.set()
        await running
        may_end.clear()
    await thread.close()
    assert overdue == [8.0, 1.0]
