"""Threads that a program starts through `acl.util`, and what they raised."""

from __future__ import annotations

import ctypes
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

_SIG_DFL = ctypes.c_void_p(0)


class Started:
    """One thread. A program joins it once; until then its id is not given to another thread.

    Attributes:
        raised: what the function raised; read it after `join`.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        self._function = function
        self._args = args
        self.raised: BaseException | None = None
        self._is_over = threading.Event()
        self._is_joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="acl-thread", daemon=True)

    def _run(self) -> None:
        try:
            self._function(*self._args)
        except BaseException as error:
            self.raised = error
            traceback.print_exception(error)
        self._is_over.set()
        self._is_joined.wait()  # Python's threads, once over, leave their id to others

    def start(self) -> int:
        """Runs the function; returns the thread's id, as `threading.get_ident` gives it there."""
        self._thread.start()
        assert self._thread.ident is not None
        return self._thread.ident

    def join(self) -> None:
        """Waits, without the GIL, until the function returned or raised."""
        self._is_over.wait()
        self._is_joined.set()
        self._thread.join()


_started: dict[int, Started] = {}


def start(function: Callable[..., Any], args: tuple[object, ...]) -> int:
    """Starts a thread and resets SIGINT to the default action, as pyACL does.

    Ctrl-C ends the process from then on, and raises no KeyboardInterrupt, whatever Python's own
    `signal.getsignal` says; the C library is told, so that this works from every thread.
    """
    thread = Started(function, args)
    ident = thread.start()
    _started[ident] = thread
    libc = ctypes.CDLL(None)
    libc.signal(int(signal.SIGINT), _SIG_DFL)
    return ident


def stop(ident: int) -> Started | None:
    """Waits for a thread and forgets it; None for an id that was not started, or joined before."""
    thread = _started.pop(ident, None)
    if thread is not None:
        thread.join()
    return thread
