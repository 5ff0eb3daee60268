"""Streams of `acl.rt`, and waiting for them."""

from __future__ import annotations

import time

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import current_context, current_stream, this_process
from runtime_cache.aclsim.streams import Stream

acl_function = surface("acl.rt")

#: Streams of one device, default ones included (aclrtCreateStream page of CANN 9.0, A2 and A3).
MAX_STREAMS = 1984
_STREAM_FLAGS = 0x3F
_STATUS_UNKNOWN = 0xFFFF
_WAIT_FOR_EVER = -1


def _device_streams() -> list[Stream]:
    """All streams of the current device, default ones included."""
    device = current_context().device
    contexts = [c for c in this_process().contexts.objects() if c.device is device]
    return [stream for context in contexts for stream in context.all_streams()]


def _new_stream() -> int:
    context = current_context()
    if len(_device_streams()) >= MAX_STREAMS:
        raise AclFailure(codes.RT_NO_STREAM_RESOURCE, f"{MAX_STREAMS} streams are in use")
    stream = context.new_stream()
    handle = this_process().streams.add(stream)
    context.streams[handle] = stream
    return handle


@acl_function("", failed=(0,))
def create_stream() -> int:
    """A stream of the current context; 207008 beyond 1984 on a device."""
    return _new_stream()


@acl_function("ii", failed=(0,))
def create_stream_with_config(priority: int, flag: int) -> int:
    """A stream; flags are FAST_LAUNCH 1 and FAST_SYNC 2, which change nothing here."""
    if priority < 0 or flag & ~_STREAM_FLAGS:
        raise AclFailure(codes.RT_PARAM_INVALID, f"priority {priority} or flag {flag} is unknown")
    return _new_stream()


def _own_stream(handle: int) -> Stream:
    """A stream that the program created in the current context.

    Raises:
        AclFailure: 100000 for 0, 107003 for what is no stream of this context.
    """
    if handle == 0:
        raise AclFailure(codes.INVALID_PARAM, "null stream")
    return current_stream(handle)


def _forget(handle: int) -> None:
    """Takes a stream out of all tables; 107003 if another thread did so meanwhile."""
    stream = this_process().streams.remove(handle)
    current_context().streams.pop(handle, None)
    this_process().subscriptions.drop(stream)


@acl_function("k")
def destroy_stream(stream: int) -> None:
    """Waits for the stream's work and ends it."""
    found = _own_stream(stream)
    this_process().subscriptions.note_wait("acl.rt.destroy_stream", found)
    found.close()
    _forget(stream)


@acl_function("k")
def destroy_stream_force(stream: int) -> None:
    """Ends a stream without waiting: what is queued never happens."""
    found = _own_stream(stream)
    this_process().subscriptions.release(found)
    found.close(waits=False)
    _forget(stream)


@acl_function("k", failed=(_STATUS_UNKNOWN,))
def stream_query(stream: int) -> int:
    """0 when all queued work has happened, else 1. Never blocks."""
    return 0 if current_stream(stream).is_idle else 1


@acl_function("k")
def stream_abort(stream: int) -> None:
    """Drops what is queued; whoever waits for the stream gets 107023."""
    found = current_stream(stream)
    found.abort()
    this_process().subscriptions.release(found)


@acl_function("k", failed=(0,))
def stream_get_id(stream: int) -> int:
    """The number of a stream, as exception infos have it."""
    return current_stream(stream).stream_id


@acl_function("", failed=(0,))
def get_stream_available_num() -> int:
    """How many more streams the current device takes."""
    return MAX_STREAMS - len(_device_streams())


@acl_function("kI")
def set_stream_failure_mode(stream: int, mode: int) -> None:
    """0: later work goes on after a failure; 1: the whole context stops. Once for a stream."""
    current_stream(stream).set_failure_mode(mode)


# --- waiting ---


@acl_function("k")
def synchronize_stream(stream: int) -> None:
    """Blocks until all queued work has happened; gives the first failure of that work."""
    current_stream(stream).synchronize()


def _checked_timeout(timeout_ms: int) -> float:
    """Seconds, or -1 for ever.

    Raises:
        AclFailure: 107000 for less than -1.
    """
    if timeout_ms < _WAIT_FOR_EVER:
        raise AclFailure(codes.RT_PARAM_INVALID, f"timeout {timeout_ms} ms is below -1")
    return timeout_ms if timeout_ms == _WAIT_FOR_EVER else timeout_ms / 1000


@acl_function("ki")
def synchronize_stream_with_timeout(stream: int, timeout_ms: int) -> None:
    """As `synchronize_stream`; 507046 on expiry (work goes on), -1 waits for ever."""
    target = current_stream(stream)
    target.synchronize(_checked_timeout(timeout_ms))


@acl_function("")
def synchronize_device() -> None:
    """Blocks until the work of all streams of the current device has happened."""
    _synchronize_all(_WAIT_FOR_EVER)


@acl_function("i")
def synchronize_device_with_timeout(timeout_ms: int) -> None:
    """As `synchronize_device`, with the GIL held on a card; 507046 on expiry, -1 waits for ever."""
    _synchronize_all(_checked_timeout(timeout_ms))


def _synchronize_all(timeout_s: float) -> None:
    """Waits for what is queued now in every stream of the device, `timeout_s` in all."""
    streams = _device_streams()
    fences = [stream.fence() for stream in streams]
    deadline_s = time.monotonic() + timeout_s
    for fence in fences:
        left_s = timeout_s if timeout_s < 0 else max(0.0, deadline_s - time.monotonic())
        if not fence.acquire(left_s):
            sentence = "device synchronise expired; work goes on"
            raise AclFailure(codes.RT_STREAM_SYNC_TIMEOUT, sentence)
        if fence.is_aborted:
            raise AclFailure(codes.RT_STREAM_ABORT, "a stream of the device was aborted")
    for stream in streams:
        stream.raise_failure()
