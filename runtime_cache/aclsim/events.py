"""Events: points in streams that other streams and the host can wait for."""

from __future__ import annotations

from runtime_cache.aclsim.codes import (
    EVENT_SYNC,
    RT_EVENT_SYNC_TIMEOUT,
    RT_PARAM_INVALID,
    RT_WAIT_TIMEOUT,
)
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.streams import Mark, Stream


class Event:
    """A point in a stream that others can wait for.

    Args:
        flags: ACL_EVENT_*; without SYNC no stream can wait for it.
        is_rerecordable: made by `create_event_ex_with_flag`: complete until first recorded, and
            not for the calls that reset or query the older kind.
    """

    def __init__(self, flags: int, *, is_rerecordable: bool = False) -> None:
        self._flags = flags
        self._is_rerecordable = is_rerecordable
        self._mark: Mark | None = None
        self._waits: list[Mark] = []

    @property
    def is_complete(self) -> bool:
        """Whether the last recording was reached."""
        if self._mark is None:
            return self._is_rerecordable
        return self._mark.is_reached

    @property
    def num_waiting(self) -> int:
        """Waits of streams for this event that are not over."""
        return sum(not wait.is_reached for wait in self._waits)

    @property
    def timestamp_us(self) -> int:
        """When the last recording was reached, in microseconds of the host's steady clock.

        Raises:
            AclFailure: 107000 if it was not.
        """
        return self._reached().time_ns // 1000

    def _reached(self) -> Mark:
        if self._mark is None or not self._mark.is_reached:
            raise AclFailure(RT_PARAM_INVALID, "the event must be recorded and synchronised")
        return self._mark

    def record(self, stream: Stream) -> None:
        """Marks the current end of the stream's queue."""
        mark = Mark()
        self._mark = mark
        stream.submit("acl.rt.record_event", mark.reach)

    def reset(self, stream: Stream) -> None:
        """Forgets the last recording so far, at its turn in the stream.

        Raises:
            AclFailure: 107000 for an event of the newer kind, or made without SYNC.
        """
        self.refuse_rerecordable("acl.rt.reset_event")
        self._require_sync()
        mark = self._mark
        stream.submit("acl.rt.reset_event", lambda: self._forget(mark))

    def _forget(self, mark: Mark | None) -> None:
        if self._mark is mark:
            self._mark = None

    def refuse_rerecordable(self, function: str) -> None:
        """Raises 107000 if a function does not take events of `create_event_ex_with_flag`."""
        if self._is_rerecordable:
            sentence = f"{function} does not take events of create_event_ex_with_flag"
            raise AclFailure(RT_PARAM_INVALID, sentence)

    def _require_sync(self) -> None:
        if not self._flags & EVENT_SYNC:
            raise AclFailure(RT_PARAM_INVALID, "the event was created without ACL_EVENT_SYNC")

    def hold_back(self, stream: Stream, limit_s: int) -> None:
        """Queues a wait: the stream's later work waits for the last recording so far.

        The wait fails with 107019 at its turn if it takes longer than `limit_s` (0: no limit).

        Raises:
            AclFailure: 107000 if the event was made without SYNC.
        """
        self._require_sync()
        mark, over = self._mark, Mark()
        if mark is None:
            return
        self._waits = [*(wait for wait in self._waits if not wait.is_reached), over]

        def wait() -> None:
            if not mark.wait(limit_s or None):
                raise AclFailure(RT_WAIT_TIMEOUT, f"waited {limit_s} s for an event")

        stream.submit("acl.rt.stream_wait_event", wait, over.reach)

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
        return (end._reached().time_ns - self._reached().time_ns) / 1e6
