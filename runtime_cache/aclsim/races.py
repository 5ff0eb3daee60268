"""What the program touches although queued work may still be using it. Thread-safe.

A program knows that work is over only once it synchronised: with a stream, an event, a device, or
by asking one of them. Until then the report takes the work as running, however quick it was: on a
card it might be. Any synchronising counts for all that had ended by then, so that ways of knowing
that are not followed here (events between streams) never give a false report.

Reads through views (numpy, ctypes) of memory that the program may read itself are not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from runtime_cache.aclsim.ledger import Kind, ledger

Ranges = tuple[tuple[int, int], ...]
# Work that ended and that nobody synchronised; the oldest is forgotten.
MAX_UNSETTLED = 1024


class Work(Protocol):
    """Queued work, as far as it matters here."""

    @property
    def function(self) -> str:
        """The pyACL call it came from."""

    @property
    def reads(self) -> Ranges:
        """(address, bytes) of memory it reads."""

    @property
    def writes(self) -> Ranges:
        """(address, bytes) of memory it writes."""


#: One who called these knows what work has ended.
SETTLING = frozenset(
    (
        "acl.mdl.execute_v2",
        "acl.rt.destroy_stream",
        "acl.rt.destroy_stream_force",
        "acl.rt.process_report",
        "acl.rt.query_event",
        "acl.rt.query_event_status",
        "acl.rt.query_event_wait_status",
        "acl.rt.reset_device",
        "acl.rt.reset_device_force",
        "acl.rt.stream_abort",
        "acl.rt.stream_query",
        "acl.rt.synchronize_device",
        "acl.rt.synchronize_device_with_timeout",
        "acl.rt.synchronize_event",
        "acl.rt.synchronize_event_with_timeout",
        "acl.rt.synchronize_stream",
        "acl.rt.synchronize_stream_with_timeout",
    )
)


class Unsettled:
    """Work that has ended and that the program cannot know to have ended."""

    def __init__(self) -> None:
        self._ended: deque[Work] = deque(maxlen=MAX_UNSETTLED)
        self.add = self._ended.append
        self.settle = self._ended.clear

    def functions(self, pending: Iterable[Work]) -> list[str]:
        """The calls that queued the work which nobody can know to have ended."""
        return sorted({work.function for work in (*self._ended, *pending)})

    def find(
        self, pending: Iterable[Work], address: int, count_bytes: int, *, reads_too: bool
    ) -> Work | None:
        """Work, queued or unsettled, that writes (or reads) part of a range."""
        end = address + count_bytes
        for work in (*self._ended, *pending):
            ranges = work.writes + work.reads if reads_too else work.writes
            if any(start < end and address < start + size for start, size in ranges):
                return work
        return None


unsettled = Unsettled()


def note_read(pending: Iterable[Work], function: str, address: int, count_bytes: int) -> None:
    """The program reads a range now: a misuse if queued work may still write it."""
    work = unsettled.find(pending, address, count_bytes, reads_too=False)
    if work is not None:
        _note("unsynchronised_read", function, "reads", count_bytes, address, work)


def note_write(pending: Iterable[Work], function: str, address: int, count_bytes: int) -> None:
    """The program writes a range now: a misuse if queued work may still use it."""
    work = unsettled.find(pending, address, count_bytes, reads_too=True)
    if work is not None:
        _note("unsynchronised_write", function, "writes", count_bytes, address, work)


def note_run(pending: Iterable[Work], function: str, reads: Ranges, writes: Ranges) -> None:
    """A model runs now, in no stream's order: as reads and writes of its buffers."""
    pending = tuple(pending)
    for address, count_bytes in reads:
        note_read(pending, function, address, count_bytes)
    for address, count_bytes in writes:
        note_write(pending, function, address, count_bytes)


def note_free(pending: Iterable[Work], function: str, address: int, count_bytes: int) -> None:
    """The program frees a range now: a misuse if queued work may still use it."""
    work = unsettled.find(pending, address, count_bytes, reads_too=True)
    if work is not None:
        _note("teardown_order", function, "frees", count_bytes, address, work)


def _note(kind: Kind, function: str, verb: str, count_bytes: int, address: int, work: Work) -> None:
    ledger.note_misuse(
        f"{function} {verb} {count_bytes} bytes at {address:#x}, which a queued {work.function} "
        "uses; nothing was synchronised between",
        kind,
    )


def settling(function: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a pyACL function; after those of `SETTLING`, ended work counts as known."""
    if function not in SETTLING:
        return body

    def call(*args: Any) -> Any:
        try:
            return body(*args)
        finally:
            unsettled.settle()

    return call
