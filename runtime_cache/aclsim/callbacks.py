"""Python functions that ACL calls: reports of streams, and news of failed tasks.

A function launched in a stream runs when some thread that subscribed to the stream processes its
reports, so programs have a thread for that. Whatever a function raises vanishes, as on a card, but
for a note in the ledger.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.races import unsettled
from runtime_cache.aclsim.streams import Stream

#: What the getters of an exception info give for a fault of the whole device, and for a wrong info
#: (callback.cpp of the CANN 9.0 runtime).
NO_ID = 0xFFFFFFFF


@dataclass(eq=False)
class Report:
    """One launched function that waits for its thread.

    Attributes:
        blocks: the stream waits for it.
        is_over: it ran, or was given up; a stream that it blocks goes on.
    """

    function: Callable[[Any], Any]
    user_data: Any
    blocks: bool
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Calls the function, in this thread, unless it was given up."""
        if self.is_over.is_set():
            return
        unsettled.settle()  # whatever stands before it in its stream has ended
        try:
            self.function(self.user_data)
        except BaseException as error:  # also SystemExit: the thread goes on
            ledger.note_misuse(f"a callback raised {error!r}, which vanishes on a card")
        finally:
            self.is_over.set()


class Subscriptions:
    """Which thread processes the reports of which stream. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[Stream, int] = {}
        self._queues: dict[int, SimpleQueue[Report | None]] = {}
        self._launched: dict[Stream, list[Report]] = {}

    def subscribe(self, thread_id: int, stream: Stream) -> None:
        """Lets a thread process a stream's reports; it may have several streams.

        Raises:
            AclFailure: 107011 if the stream has a thread.
        """
        with self._lock:
            if stream in self._threads:
                raise AclFailure(codes.RT_STREAM_SUBSCRIBE, "the stream is subscribed")
            self._threads[stream] = thread_id
            self._queues.setdefault(thread_id, SimpleQueue())

    def unsubscribe(self, thread_id: int, stream: Stream) -> None:
        """Ends a subscription. What was launched and has not run is given up.

        Raises:
            AclFailure: 107012 for a thread without subscriptions, 107011 if it does not have
                this stream.
        """
        with self._lock:
            if thread_id not in self._queues:
                raise AclFailure(codes.RT_THREAD_SUBSCRIBE, f"thread {thread_id} is not subscribed")
            if self._threads.get(stream) != thread_id:
                raise AclFailure(codes.RT_STREAM_SUBSCRIBE, "the stream is not the thread's")
        self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """Forgets a stream, subscribed or not."""
        self.release(stream)
        with self._lock:
            thread_id = self._threads.pop(stream, None)
            if thread_id is not None and thread_id not in self._threads.values():
                self._queues.pop(thread_id).put(None)  # wakes the thread, if it waits

    def release(self, stream: Stream) -> None:
        """Gives up what was launched in a stream and has not run, so that the stream goes on."""
        with self._lock:
            launched = self._launched.pop(stream, [])
            for report in launched:
                report.is_over.set()

    def release_all(self) -> None:
        """Gives up everything that was launched."""
        for stream in list(self._launched):
            self.release(stream)

    def launch(self, stream: Stream, report: Report) -> None:
        """Enters a report that is about to be queued in a stream.

        Raises:
            AclFailure: 107015 if no thread is subscribed to the stream.
        """
        with self._lock:
            if stream not in self._threads:
                raise AclFailure(codes.RT_STREAM_NO_CB_REG, "no thread is subscribed to the stream")
            waiting = [each for each in self._launched.get(stream, []) if not each.is_over.is_set()]
            self._launched[stream] = [*waiting, report]

    def hand_over(self, stream: Stream, report: Report) -> None:
        """A report's turn: its thread gets it, unless it was given up."""
        with self._lock:
            if not report.is_over.is_set():
                self._queues[self._threads[stream]].put(report)
        if report.blocks:
            report.is_over.wait()

    def note_wait(self, function: str, stream: Stream) -> None:
        """Notes a wait for a stream, with the GIL held on a card, that waits for a callback.

        The callback needs the GIL: there both would stand still. Inferred from pyACL's source, not
        seen on a card.
        """
        if any(
            each.blocks and not each.is_over.is_set() for each in self._launched.get(stream, [])
        ):
            ledger.note_misuse(
                f"{function} waits for a callback that has not run: on a card neither would go on;"
                " synchronise and unsubscribe first"
            )

    def process(self, timeout_s: float | None) -> None:
        """Runs the reports of this thread's streams: waits for one, then takes all there are.

        Raises:
            AclFailure: 107012 if the thread has no subscription, 507012 on expiry.
        """
        queue = self._queues.get(threading.get_ident())
        try:
            report = queue.get(timeout=timeout_s) if queue is not None else None
        except Empty:
            raise AclFailure(codes.RT_REPORT_TIMEOUT, "no report came in time") from None
        if queue is None or report is None:
            raise AclFailure(codes.RT_THREAD_SUBSCRIBE, "this thread is not subscribed")
        report.run()
        while not queue.empty() and (following := queue.get()) is not None:
            following.run()


@dataclass(frozen=True, slots=True)
class ExceptionInfo:
    """What a program can learn of a failed task; all ids are NO_ID if the whole device failed."""

    error_code: int
    task_id: int
    stream_id: int
    thread_id: int
    device_id: int


class ExceptionCallback:
    """The one function that is told of failed tasks, and the infos it may ask about meanwhile."""

    def __init__(self) -> None:
        self._function: Callable[[int], Any] | None = None
        self._numbers = itertools.count(1)
        self._infos: dict[int, ExceptionInfo] = {}

    def set(self, function: Callable[[int], Any] | None) -> None:
        """Replaces the function; None: nobody is told."""
        self._function = function
        Stream.notes_threads = function is not None

    def tell(self, failure: AclFailure, stream: Stream, device_id: int) -> None:
        """Calls the function, on the stream's thread. One that raises is never called again."""
        if self._function is None:
            return
        handle = next(self._numbers) << 8
        self._infos[handle] = _info(failure, stream, device_id)
        try:
            self._function(handle)
        except BaseException as error:  # SystemExit must not end the stream's thread
            self.set(None)
            ledger.note_misuse(
                f"the exception callback raised {error!r}: a card would call a null pointer at the"
                " next fault"
            )
        finally:
            del self._infos[handle]

    def info(self, handle: int) -> ExceptionInfo:
        """An info of a callback that is running.

        Raises:
            AclFailure: 100000 for any other number.
        """
        found = self._infos.get(handle)
        if found is None:
            raise AclFailure(codes.INVALID_PARAM, f"{handle:#x} is no exception info, or no longer")
        return found


def _info(failure: AclFailure, stream: Stream, device_id: int) -> ExceptionInfo:
    if failure.code in codes.STICKY:
        return ExceptionInfo(failure.code, NO_ID, NO_ID, NO_ID, device_id)
    return ExceptionInfo(
        failure.code, stream.num_done, stream.stream_id, stream.failed_thread_id, device_id
    )
