"""Streams: work that happens later, in order, on a thread of its own.

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
from typing import final

from runtime_cache.aclsim import faults
from runtime_cache.aclsim.codes import (
    RT_INTERNAL_ERROR,
    RT_PARAM_INVALID,
    RT_STREAM_ABORT,
    RT_STREAM_CONTEXT,
    RT_STREAM_SYNC_TIMEOUT,
)
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import STOPPED, ledger
from runtime_cache.aclsim.races import Ranges, unsettled

Work = Callable[[], None]


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
        thread_id: who queued it, if the stream notes that; else 0.
    """

    function: str
    work: Work
    on_done: Work
    reads: Ranges
    writes: Ranges
    thread_id: int = 0

    def let_go(self) -> None:
        """Ends a scripted hang, or keeps it from beginning."""
        if isinstance(self.work, _Faulty):
            self.work.released.set()

    def drop(self) -> None:
        """Makes its turn do nothing, unless it runs already; it counts as using no memory."""
        work, self.work = self.work, _nothing
        self.reads = self.writes = ()
        if isinstance(work, _Faulty):
            work.is_dropped = True
            work.released.set()


class _Faulty:
    """Work with a scripted fault."""

    def __init__(self, fault: faults.Fault, work: Work) -> None:
        self._fault = fault
        self._work = work
        self.released = threading.Event()
        self.is_dropped = False

    def __call__(self) -> None:
        self.released.wait(self._fault.wait_ms / 1000)
        if self.is_dropped:
            return
        if self._fault.failure is not None:
            raise self._fault.failure
        self._work()


@final
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
        stream_id: its number, as programs can ask for it.

    Attributes:
        num_done: pieces of work that had their turn.
        failed_thread_id: native id of the thread that queued the work that failed last; 0 unless
            `notes_threads`, which takes a moment of every submit, was set at that time.
    """

    notes_threads = False

    def __init__(
        self,
        name: str,
        on_failure: Callable[[AclFailure], None],
        lost: Callable[[], AclFailure | None],
        on_stop: Callable[[AclFailure], None] = _forget,
        stream_id: int = 0,
    ) -> None:
        self.stream_id = stream_id
        self.num_done = 0
        self.failed_thread_id = 0
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

    def pending(self) -> list[Task]:
        """What was queued and has not happened, in order; the first may be running."""
        # No tuple: once it has begun with the deque Python makes room for one, may collect garbage
        # for that, and so give the thread its turn, which takes from the deque.
        return list(self._pending)

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
        with self._submit_lock:
            # Found and queued in one: `let_go` must not miss a hang that is on its way.
            fault = faults.script.find(function, "run")
            if fault is not None:
                work = _Faulty(fault, work)
            if self._is_closed or self._stopped is not None:
                raise self._refusal()
            task = Task(function, work, on_done, reads, writes)
            if self.notes_threads:
                task.thread_id = threading.get_native_id()
            self._pending.append(task)
            self._queue.put(task)

    def fence(self) -> Fence:
        """Returns a fence that opens once all that was queued so far has happened.

        Raises:
            AclFailure: 107003 if the stream was destroyed meanwhile.
        """
        fence = Fence()
        with self._submit_lock:
            if self._is_closed:
                raise self._refusal()
            self._fences.append(fence)
            self._queue.put(fence)
        return fence

    def wait(self) -> None:
        """As `synchronize`, but leaves failures where they are."""
        if self._pending:
            self.fence().acquire()
        unsettled.settle()

    def _refusal(self) -> AclFailure:
        """Why nothing is queued any more: behind the end of the queue nothing has its turn."""
        if self._is_closed or self._stopped is None:
            return AclFailure(RT_STREAM_CONTEXT, "the stream was destroyed by another thread")
        return self._stopped

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
            raise AclFailure(failure.code, failure.sentence, is_noted=True)

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
            for task in self.pending():
                task.drop()
            for fence in self._fences:
                fence.is_aborted = True
                fence.release()
            self._fences.clear()

    def let_go(self) -> None:
        """Ends the scripted hangs of all that is queued."""
        with self._submit_lock:
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
            if type(item) is Fence:
                self._open(item)
                continue
            self._do(item)
            item.on_done()
            item.work = item.on_done = _nothing  # what they hold must not outlive them
            if item.reads or item.writes:
                unsettled.add(item)
            self._pending.popleft()
            self.num_done += 1

    def _open(self, fence: Fence) -> None:
        with self._submit_lock:
            if not fence.is_aborted:
                self._fences.popleft()
                fence.release()

    def _do(self, task: Task) -> None:
        """One piece of work. Whatever goes wrong is kept for synchronise."""
        try:
            refusal = self._stopped or self._lost()
            if refusal is not None:
                raise refusal
            task.work()
        except AclFailure as failure:
            self._keep(task, failure)
        except Exception as error:  # A bug of the simulation must not leave waiters hanging.
            self._keep(task, AclFailure(RT_INTERNAL_ERROR, f"simulation bug: {error!r}"))

    def _keep(self, task: Task, failure: AclFailure) -> None:
        ledger.note_failure(f"queued {task.function}", failure.code, failure.sentence)
        self.failed_thread_id = task.thread_id
        self._on_failure(failure)
        if self._failure is None:
            self._failure = AclFailure(failure.code, f"{task.function}: {failure.sentence}")
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
