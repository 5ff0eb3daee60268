"""Events of `acl.rt`.

Three calls ask whether an event is complete, and do not agree on what 0 means: `query_event` and
`query_event_wait_status` say 0 for complete, `query_event_status` says 1.
"""

from __future__ import annotations

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.events import Event
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import current_context, current_stream, this_process

acl_function = surface("acl.rt")

#: Events of one device (aclrtCreateEvent page of CANN 9.0, A2 and A3).
MAX_EVENTS = 65536
_EVENT_TIMELINE = 8
_EVENT_FLAGS = 0x7B  # SYNC 1, CAPTURE_STREAM_PROGRESS 2, TIME_LINE 8, and 16, 32, 64
_COMPLETE, _NOT_READY = 0, 1


def _event(handle: int) -> Event:
    """An event of this process.

    Raises:
        AclFailure: 100000 for 0, 107000 for what is no event; 107002 without a context.
    """
    if handle == 0:
        raise AclFailure(codes.INVALID_PARAM, "null event")
    current_context()
    return this_process().events.get(handle)


def _new_event(flags: int, *, is_rerecordable: bool = False) -> int:
    current_context()
    events = this_process().events
    if flags == 0 or flags & ~_EVENT_FLAGS:
        raise AclFailure(codes.RT_PARAM_INVALID, f"event flag {flags} is unknown")
    if len(events) >= MAX_EVENTS:
        raise AclFailure(codes.RT_NO_EVENT_RESOURCE, f"{MAX_EVENTS} events are in use")
    return events.add(Event(flags, is_rerecordable=is_rerecordable))


@acl_function("", failed=(0,))
def create_event() -> int:
    """An event that streams can wait for and that takes the time; 207007 beyond 65536."""
    return _new_event(codes.EVENT_SYNC | _EVENT_TIMELINE)


@acl_function("I", failed=(0,))
def create_event_with_flag(flag: int) -> int:
    """An event; without flag SYNC (1) no stream can wait for it."""
    return _new_event(flag)


@acl_function("I", failed=(0,))
def create_event_ex_with_flag(flag: int) -> int:
    """A re-recordable event, complete until first recorded.

    `reset_event`, `query_event` and `query_event_wait_status` refuse it (107000).
    """
    return _new_event(flag, is_rerecordable=True)


@acl_function("k")
def destroy_event(event: int) -> None:
    """Forgets an event; allowed while it is pending."""
    _event(event)
    this_process().events.remove(event)


@acl_function("kk")
def record_event(event: int, stream: int) -> None:
    """Marks the current end of the stream's queue."""
    target = current_stream(stream)
    _event(event).record(target)


@acl_function("kk")
def reset_event(event: int, stream: int) -> None:
    """Makes an event as if never recorded, at its turn in the stream."""
    target = current_stream(stream)
    _event(event).reset(target)


@acl_function("kk")
def stream_wait_event(stream: int, event: int) -> None:
    """Later work of the stream waits for the event's last recording. Note the argument order."""
    target, process = current_stream(stream), this_process()
    _event(event).hold_back(target, process.timeouts.event_wait_s)


@acl_function("k")
def synchronize_event(event: int) -> None:
    """Blocks until the last recording is reached."""
    _event(event).synchronize()


@acl_function("ki")
def synchronize_event_with_timeout(event: int, timeout_ms: int) -> None:
    """As `synchronize_event`; 507047 on expiry, -1 waits for ever."""
    if timeout_ms < -1:
        raise AclFailure(codes.RT_PARAM_INVALID, f"timeout {timeout_ms} ms is below -1")
    timeout_s = None if timeout_ms == -1 else timeout_ms / 1000
    _event(event).synchronize(timeout_s)


@acl_function("k", failed=(_COMPLETE,))
def query_event(event: int) -> int:
    """0 complete, 1 not ready."""
    found = _event(event)
    found.refuse_rerecordable("acl.rt.query_event")
    return _COMPLETE if found.is_complete else _NOT_READY


@acl_function("k", failed=(_COMPLETE,))
def query_event_wait_status(event: int) -> int:
    """0 when every wait that was queued for the event is over, else 1."""
    found = _event(event)
    found.refuse_rerecordable("acl.rt.query_event_wait_status")
    return _NOT_READY if found.num_waiting else _COMPLETE


@acl_function("k", failed=(0,))
def query_event_status(event: int) -> int:
    """1 complete, 0 not ready (the reverse of the two others)."""
    return int(_event(event).is_complete)


@acl_function("kk", failed=(0.0,))
def event_elapsed_time(start: int, end: int) -> float:
    """Milliseconds between two reached events."""
    return _event(start).elapsed_ms(_event(end))


@acl_function("k", failed=(0,))
def event_get_timestamp(event: int) -> int:
    """Microseconds of the clock when the last recording was reached; 107000 if it was not."""
    return _event(event).timestamp_us


@acl_function("k", failed=(0,))
def get_event_id(event: int) -> int:
    """A number for an event, its own while it lives."""
    _event(event)
    return this_process().events.ordinal(event)


@acl_function("", failed=(0,))
def get_event_avail_num() -> int:
    """How many more events the device takes."""
    current_context()
    return MAX_EVENTS - len(this_process().events)
