"""The one thread that owns the device's context.

A context is current per thread, and one stream has one order: so every pyACL call of the daemon,
from `init` to `finalize`, runs here, one after the other.

Not a `ThreadPoolExecutor`: its threads are ended by the interpreter before anything that a program
registered with `atexit`, and a device that is to be given back then has no thread to do it on. For
the same reason closing starts no other thread.

A call of the driver may never return. So each function promises how long what it does next may
take beyond the usual, and others see how long the promise is overdue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class DeviceThread:
    """Runs functions on one thread, in the order they were asked for.

    The thread does not keep the process alive: whoever wants the device given back closes it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: seconds.
        """
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_closed = False
        self._clock = clock
        #: Until when the running function is not overdue; None while there is none.
        self._promised_s: float | None = None
        self._thread = threading.Thread(target=self._work_off, name="device")
        self._thread.daemon = True
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether there is a thread that takes what it is asked for."""
        return self._thread.is_alive()

    @property
    def overdue_s(self) -> float:
        """How long ago the running function should have come further; 0 if none runs.

        What a function does without a promise is overdue from its begin on: how much of that is
        usual is for the caller to say.
        """
        promised_s = self._promised_s
        return 0.0 if promised_s is None else max(0.0, self._clock() - promised_s)

    def promise(self, may_take_s: float) -> None:
        """For the running function: what it does next may take so long [seconds].

        It holds until the next promise, or the function's end.
        """
        self._promised_s = self._clock() + may_take_s

    def start(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """As `run`, but the function is on its way when this returns.

        Raises:
            RuntimeError: the thread is closed.
        """
        if self._is_closed:
            raise RuntimeError("the device thread is closed")
        future: Future[T] = Future()
        self._jobs.put((future, partial(function, *args, **kwargs)))
        return asyncio.wrap_future(future)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` on the device thread and returns what it returns.

        A cancelled wait does not stop a function that has started; it ends by itself and the next
        one waits for it.

        Raises:
            RuntimeError: the thread is closed.
            Exception: whatever the function raises.
        """
        return await self.start(function, *args, **kwargs)

    async def close(self) -> None:
        """Waits for what was asked for and ends the thread. Idempotent."""
        if self._is_closed:
            return
        last = self.start(_nothing)
        self._is_closed = True
        self._jobs.put(None)
        await last
        self._thread.join()

    def _work_off(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.promise(0.0)
            _do(*job)
            self._promised_s = None
            del job  # while it waits, it keeps nothing alive


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        del future  # or the error's traceback would keep the error itself alive
    else:
        future.set_result(result)


def _nothing() -> None:
    """The last thing that a device thread does."""
