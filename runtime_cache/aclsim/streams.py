"""Streams and events: work that happens later, in order, on a thread of its own.

Nothing submitted takes effect before its turn. Failures of queued work stay with the stream until
somebody synchronises; then later work goes on ("continue on failure", the default of cards), or
nothing does any more ("stop on failure").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from runtime_cache.aclsim import faults
from runtime_cache.aclsim.codes import (
    EVENT_SYNC,
    RT_EVENT_SYNC_TIMEOUT,
    RT_INTERNAL_ERROR,
    RT_PARAM_INVALID,
    RT_STREAM_ABORT,
    RT_STREAM_CONTEXT,
    RT_STREAM_SYNC_TIMEOUT,
)
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import STOPPED, ledger

Work = Callable[[], None]
#: Memory that work uses: (address, bytes) of each range.
Ranges = tuple[tuple[int, int], ...]


def _nothing() -> None:
    """Work of no effect."""


def _forget(failure: AclFailure) -> None:
    """For streams whose failures nobody else has to know."""


@dataclass(slots=True, eq=False)
class Task:
    """Queued work.

    Attributes:
        function: the pyACL call it came from.
        reads, writes: memory it uses at its turn.
        fault: scripted for it.
        released: ends the waiting that the fault scripts.
        is_dropped: aborted; it has its turn and does nothing.
    """

    function: str
    work: Work
    on_done: Work
    reads: Ranges
    writes: Ranges
    fault: faults.Fault | None
    released: threading.Event | None
    is_dropped: bool = False

    @property
    def scripted(self) -> AclFailure | None:
        """The failure that a script has for it."""
        return None if self.fault is None else self.fault.failure

    def hang(self) -> None:
        """Stands still as long as a scripted fault says, or until somebody lets go."""
        if self.fault is not None and self.released is not None:
            self.released.wait(self.fault.wait_ms / 1000)

    def let_go(self) -> None:
        """Ends a scripted hang, or keeps it from beginning."""
        if self.released is not None:
            self.released.set()

    def uses(self, address: int, count_bytes: int, ranges: Ranges) -> bool:
        """Whether one of its `ranges` overlaps a range."""
        end = address + count_bytes
        return any(start < end and address < start + size for start, size in ranges)


class Fence:
    """A place in a queue: open once all that was queued before it has happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_aborted = False

    def acquire(self, timeout: float = -1) -> bool:
        """Blocks, without the GIL, until the place is reached; False on expiry (seconds)."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Opens it. Called once."""
        self._lock.release()


class Stream:
    """A FIFO of work and the thread that does it.

    Args:
        name: for the thread list.
        on_failure: told of every failure, on the stream's thread, before it is kept.
        lost: returns the failure that took device or context away, or None; no work is done then.
        on_stop: told of a failure after which the context takes no work ("stop on failure").
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[AclFailure], None],
        lost: Callable[[], AclFailure | None],
        on_stop: Callable[[AclFailure], None] = _forget,
    ) -> None:
        self._on_failure = on_failure
        self._on_stop = on_stop
        self._lost = lost
        self._queue: SimpleQueue[Task | Fence | None] = SimpleQueue()
        self._pending: deque[Task] = deque()
        self._fences: deque[Fence] = deque()
        self._submit_lock = threading.Lock()
        self._is_closed = False
        self._stops_on_failure: bool | None = None
        self._failure: AclFailure | None = None
        self._stopped: AclFailure | None = None
        self._thread = threading.Thread(target=self._work_off, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted has happened."""
        return not self._pending

    def pending(self) -> tuple[Task, ...]:
        """What was queued and has not happened, in order; the first may be running."""
        return tuple(self._pending)

    def submit(
        self,
        function: str,
        work: Work,
        on_done: Work = _nothing,
        *,
        reads: Ranges = (),
        writes: Ranges = (),
    ) -> None:
        """Queues work for its turn.

        Args:
            function: the pyACL call it came from.
            work: what happens at its turn, unless the device is lost or a failure is scripted.
            on_done: called after the turn in any case; must not fail.
            reads, writes: (address, bytes) of memory it uses, for the report of misuse.

        Raises:
            AclFailure: 107003 if the stream was destroyed meanwhile; the first failure of a context
                that stopped.
        """
        fault = faults.script.find(function, "run")
        with self._submit_lock:
            self._require_open()
            if self._stopped is not None:
                raise self._stopped
            released = None if fault is None else threading.Event()
            task = Task(function, work, on_done, reads, writes, fault, released)
            self._pending.append(task)
            self._queue.put(task)

    def fence(self) -> Fence:
        """Returns a fence that opens once all that was queued so far has happened.

        Raises:
            AclFailure: 107003 if the stream was destroyed meanwhile.
        """
        fence = Fence()
        with self._submit_lock:
            self._require_open()
            self._fences.append(fence)
            self._queue.put(fence)
        return fence

    def _require_open(self) -> None:
        """Nothing may follow the end of the queue: it would never have its turn."""
        if self._is_closed:
            raise AclFailure(RT_STREAM_CONTEXT, "the stream was destroyed by another thread")

    def synchronize(self, timeout_s: float = -1) -> None:
        """Blocks, without the GIL, until all that was queued so far has happened.

        Raises:
            AclFailure: the first failure since the last synchronise; 507046 on expiry, in which
                case the work goes on; 107023 if the stream was aborted meanwhile.
        """
        if self._pending:
            fence = self.fence()
            if not fence.acquire(timeout_s):
                raise AclFailure(RT_STREAM_SYNC_TIMEOUT, "stream synchronise expired; work goes on")
            if fence.is_aborted:
                raise AclFailure(RT_STREAM_ABORT, "the stream was aborted")
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises and forgets the first failure since the last synchronise, if there is one.

        A context that stopped has its failure for ever.
        """
        failure, self._failure = self._failure or self._stopped, None
        if failure is not None:
            raise AclFailure(failure.code, failure.sentence)

    def set_failure_mode(self, mode: int) -> None:
        """What happens after a failure: 0 later work goes on, 1 the whole context stops.

        Raises:
            AclFailure: 107000 for another mode, or if it was set before.
        """
        if mode not in (0, 1) or self._stops_on_failure is not None:
            raise AclFailure(RT_PARAM_INVALID, f"failure mode {mode}: 0 or 1, once for a stream")
        self._stops_on_failure = mode == 1

    def stop(self, failure: AclFailure) -> None:
        """Takes and does no more work: a stream of its context failed that stops on failure."""
        if self._stopped is None:
            self._stopped = AclFailure(failure.code, f"{STOPPED}: {failure.sentence}")

    def abort(self) -> None:
        """Drops what is queued, ends a scripted hang, wakes who waits (107023).

        Work that runs already is not undone and may go on for a while.
        """
        with self._submit_lock:
            for task in self._pending:
                task.is_dropped = True
                task.let_go()
            for fence in self._fences:
                fence.is_aborted = True
                fence.release()
            self._fences.clear()

    def let_go(self) -> None:
        """Ends the scripted hangs of all that is queued."""
        for task in self.pending():
            task.let_go()

    def close(self, *, waits: bool = True) -> None:
        """Ends the thread once the queue is empty; waits for that, or drops what is queued."""
        if not waits:
            self.abort()
        with self._submit_lock:
            self._is_closed = True
            self._queue.put(None)
        if waits:
            self._thread.join()

    def _work_off(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Fence):
                self._open(item)
                continue
            self._do(item)
            item.on_done()
            self._pending.popleft()

    def _open(self, fence: Fence) -> None:
        with self._submit_lock:
            if not fence.is_aborted:
                self._fences.popleft()
                fence.release()

    def _do(self, task: Task) -> None:
        """One piece of work. Whatever goes wrong is kept for synchronise."""
        try:
            task.hang()
            if task.is_dropped:
                return
            refusal = self._stopped or self._lost() or task.scripted
            if refusal is not None:
                raise refusal
            task.work()
        except AclFailure as failure:
            self._keep(task.function, failure)
        except Exception as error:  # A bug of the simulation must not leave waiters hanging.
            self._keep(task.function, AclFailure(RT_INTERNAL_ERROR, f"simulation bug: {error!r}"))

    def _keep(self, function: str, failure: AclFailure) -> None:
        ledger.note_failure(f"queued {function}", failure.code, failure.sentence)
        self._on_failure(failure)
        if self._failure is None:
            self._failure = AclFailure(failure.code, f"{function}: {failure.sentence}")
        if self._stops_on_failure and self._stopped is None:
            self._on_stop(failure)


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
