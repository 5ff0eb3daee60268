"""Streams and events: work that happens later, in order, on a thread of its own.

Nothing submitted takes effect before its turn. Failures of queued work stay with the stream until
somebody synchronises, and later work goes on ("continue on failure", the default of cards).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from runtime_cache.aclsim import faults
from runtime_cache.aclsim.codes import (
    EVENT_SYNC,
    RT_EVENT_SYNC_TIMEOUT,
    RT_INTERNAL_ERROR,
    RT_PARAM_INVALID,
    RT_STREAM_CONTEXT,
    RT_STREAM_SYNC_TIMEOUT,
)
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger

Work = Callable[[], None]
_FENCE = ""


def _nothing() -> None:
    """Work of no effect."""


class Stream:
    """A FIFO of work and the thread that does it.

    Args:
        name: for the thread list.
        on_failure: told of every failure, on the stream's thread, before it is kept.
        lost: returns the failure that took the device away, or None; lost devices do no work.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[AclFailure], None],
        lost: Callable[[], AclFailure | None],
    ) -> None:
        self._on_failure = on_failure
        self._lost = lost
        self._queue: SimpleQueue[tuple[str, Work, Work] | None] = SimpleQueue()
        self._submit_lock = threading.Lock()
        self._submitted = 0
        self._completed = 0
        self._is_closed = False
        self._failure: AclFailure | None = None
        self._thread = threading.Thread(target=self._work_off, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted has happened."""
        return self._completed == self._submitted

    def submit(self, function: str, work: Work, on_done: Work = _nothing) -> None:
        """Queues work for its turn.

        Args:
            function: the pyACL call it came from.
            work: what happens at its turn, unless the device is lost or a failure is scripted.
            on_done: called after the turn in any case; must not fail.

        Raises:
            AclFailure: 107003 if the stream was destroyed meanwhile.
        """
        scripted = faults.script.strike(function, "run")
        with self._submit_lock:
            self._require_open()
            self._submitted += 1
            self._queue.put((function, work if scripted is None else _raising(scripted), on_done))

    def fence(self) -> threading.Lock:
        """Returns a held lock that is released once all that was queued so far has happened.

        Raises:
            AclFailure: 107003 if the stream was destroyed meanwhile.
        """
        lock = threading.Lock()
        lock.acquire()
        with self._submit_lock:
            self._require_open()
            self._queue.put((_FENCE, lock.release, _nothing))
        return lock

    def _require_open(self) -> None:
        """Nothing may follow the end of the queue: it would never have its turn."""
        if self._is_closed:
            raise AclFailure(RT_STREAM_CONTEXT, "the stream was destroyed by another thread")

    def synchronize(self, timeout_s: float = -1) -> None:
        """Blocks, without the GIL, until all that was queued so far has happened.

        Raises:
            AclFailure: the first failure since the last synchronise; 507046 on expiry, in which
                case the work goes on.
        """
        if not self.is_idle and not self.fence().acquire(timeout=timeout_s):
            raise AclFailure(RT_STREAM_SYNC_TIMEOUT, "stream synchronise expired; work goes on")
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises and forgets the first failure since the last synchronise, if there is one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise AclFailure(failure.code, failure.sentence)

    def close(self) -> None:
        """Waits for the queued work and ends the thread."""
        with self._submit_lock:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def _work_off(self) -> None:
        while (item := self._queue.get()) is not None:
            function, work, on_done = item
            if function is _FENCE:
                work()
                continue
            self._do(function, work)
            on_done()
            self._completed += 1

    def _do(self, function: str, work: Work) -> None:
        """One piece of work. Whatever goes wrong is kept for synchronise."""
        try:
            lost = self._lost()
            if lost is not None:
                raise lost
            work()
        except AclFailure as failure:
            self._keep(function, failure)
        except Exception as error:  # A bug of the simulation must not leave waiters hanging.
            self._keep(function, AclFailure(RT_INTERNAL_ERROR, f"simulation bug: {error!r}"))

    def _keep(self, function: str, failure: AclFailure) -> None:
        ledger.note_failure(f"queued {function}", failure.code, failure.sentence)
        self._on_failure(failure)
        if self._failure is None:
            self._failure = AclFailure(failure.code, f"{function}: {failure.sentence}")


def _raising(failure: AclFailure) -> Work:
    def work() -> None:
        raise failure

    return work


class Mark:
    """One recording of an event: reached when the stream gets there."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.time_ns = 0

    @property
    def is_reached(self) -> bool:
        """Whether the stream got there."""
        return self._reached.is_set()

    def reach(self) -> None:
        """Called on the stream's thread."""
        self.time_ns = time.perf_counter_ns()
        self._reached.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks without the GIL; False on expiry."""
        return self._reached.wait(timeout_s)


class Event:
    """A point in a stream that others can wait for.

    Args:
        flags: ACL_EVENT_*; without SYNC no stream can wait for it.
        is_complete_unrecorded: what a query says before the first record (True for events of
            `create_event_ex_with_flag`).
    """

    def __init__(self, flags: int, *, is_complete_unrecorded: bool) -> None:
        self._flags = flags
        self._is_complete_unrecorded = is_complete_unrecorded
        self._mark: Mark | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last recording was reached."""
        if self._mark is None:
            return self._is_complete_unrecorded
        return self._mark.is_reached

    def record(self, stream: Stream) -> None:
        """Marks the current end of the stream's queue."""
        mark = Mark()
        self._mark = mark
        stream.submit("acl.rt.record_event", mark.reach)

    def hold_back(self, stream: Stream) -> None:
        """Queues a wait: the stream's later work waits for the last recording so far.

        Raises:
            AclFailure: 107000 if the event was made without SYNC.
        """
        if not self._flags & EVENT_SYNC:
            raise AclFailure(RT_PARAM_INVALID, "the event was created without ACL_EVENT_SYNC")
        mark = self._mark
        if mark is not None:
            stream.submit("acl.rt.stream_wait_event", lambda: _wait_for(mark))

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Blocks, without the GIL, until the last recording so far is reached.

        Raises:
            AclFailure: 507047 on expiry.
        """
        if self._mark is not None and not self._mark.wait(timeout_s):
            raise AclFailure(RT_EVENT_SYNC_TIMEOUT, "event synchronise expired; work goes on")

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds from this event to `end`.

        Raises:
            AclFailure: 107000 if one of them was not reached yet.
        """
        first, last = self._mark, end._mark
        if first is None or last is None or not (first.is_reached and last.is_reached):
            raise AclFailure(RT_PARAM_INVALID, "both events must be recorded and synchronised")
        return (last.time_ns - first.time_ns) / 1e6


def _wait_for(mark: Mark) -> None:
    mark.wait()
