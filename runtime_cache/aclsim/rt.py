"""`acl.rt` in software: devices, contexts, streams, events, memory.

Return shapes, parse codes and error codes as pyACL's; see `calling` for the convention.
"""

from __future__ import annotations

from functools import partial

from runtime_cache.aclsim import codes, copies
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import (
    current_context,
    current_stream,
    set_current,
    this_process,
)
from runtime_cache.aclsim.streams import Event

acl_function = surface("acl.rt")

_DDR_ATTRIBUTES = (0, 2, 3)
_HBM_ATTRIBUTES = (1, 4, 5)
_EVENT_TIMELINE = 8


# --- devices and contexts ---


@acl_function("", failed=(0,))
def get_device_count() -> int:
    """Number of devices of this host."""
    return this_process().config.device_count


@acl_function("i")
def set_device(device_id: int) -> None:
    """Opens a device once more and makes its default context current in this thread."""
    process = this_process()
    device = process.device(device_id)
    with process.lock:
        device.num_users += 1
        if device.default_context is None:
            device.default_context = process.new_context(device)
        set_current(device.default_context)


@acl_function("i")
def reset_device(device_id: int) -> None:
    """Closes a device once; the last close waits for work and frees everything on it.

    Stricter than a card: 107000 while own streams or contexts are alive, since the manual asks to
    destroy them first.
    """
    process = this_process()
    device = process.device(device_id)
    with process.lock:
        default = device.default_context
        if default is None or device.num_users == 0:
            raise AclFailure(codes.RT_PARAM_INVALID, f"device {device_id} is not set")
        if device.num_users > 1:
            device.num_users -= 1
            return
        contexts = [
            c for c in process.contexts.objects() if c.device is device and c is not default
        ]
        if contexts or default.streams:
            sentence = f"{len(contexts)} contexts and {len(default.streams)} streams are alive"
            raise AclFailure(codes.RT_PARAM_INVALID, sentence)
        device.num_users, device.default_context = 0, None
    process.close_context(default)  # without the lock, which the work that runs may need
    process.drop_models(device)
    device.memory.free_all()


@acl_function("", failed=(0,))
def get_device() -> int:
    """The device of the current context."""
    return current_context().device.device_id


@acl_function("i", failed=(0,))
def query_device_status(device_id: int) -> int:
    """0 normal, 1 abnormal. Answers even when the device is lost."""
    device = this_process().devices.get(device_id)
    if device is None:
        device = this_process().device(device_id)
    return 1 if device.lost_code else 0


@acl_function("", failed=(0,))
def get_run_mode() -> int:
    """1 when the program runs on a host beside the device, 0 when on the device itself."""
    return this_process().config.mode


@acl_function("i", failed=(0,))
def create_context(device_id: int) -> int:
    """A context of its own, current in this thread."""
    process = this_process()
    context = process.new_context(process.device(device_id))
    set_current(context)
    return context.handle


@acl_function("k")
def destroy_context(context: int) -> None:
    """Destroys an explicit context. Stricter than a card: 107000 while it has streams."""
    if context == 0:
        raise AclFailure(codes.INVALID_PARAM, "null context")
    process = this_process()
    found = process.contexts.get(context)
    if found is found.device.default_context:
        raise AclFailure(codes.RT_PARAM_INVALID, "a default context goes with reset_device")
    if found.streams:
        raise AclFailure(codes.RT_PARAM_INVALID, f"{len(found.streams)} streams are alive")
    process.close_context(found)


@acl_function("k")
def set_context(context: int) -> None:
    """Makes a context current in this thread."""
    if context == 0:
        raise AclFailure(codes.INVALID_PARAM, "null context")
    set_current(this_process().contexts.get(context))


@acl_function("", failed=(0,))
def get_context() -> int:
    """The current context; 107002 if this thread has none."""
    return current_context().handle


# --- streams ---


def _new_stream() -> int:
    context = current_context()
    stream = context.new_stream()
    handle = this_process().streams.add(stream)
    context.streams[handle] = stream
    return handle


@acl_function("", failed=(0,))
def create_stream() -> int:
    """A stream of the current context."""
    return _new_stream()


@acl_function("ii", failed=(0,))
def create_stream_with_config(priority: int, flag: int) -> int:
    """A stream; flags are FAST_LAUNCH 1 and FAST_SYNC 2, which change nothing here."""
    if priority < 0 or flag & ~0x3F:
        raise AclFailure(codes.RT_PARAM_INVALID, f"priority {priority} or flag {flag} is unknown")
    return _new_stream()


@acl_function("k")
def destroy_stream(stream: int) -> None:
    """Waits for the stream's work and ends it."""
    if stream == 0:
        raise AclFailure(codes.INVALID_PARAM, "null stream")
    current_stream(stream).close()
    del current_context().streams[stream]
    this_process().streams.remove(stream)


@acl_function("k")
def synchronize_stream(stream: int) -> None:
    """Blocks until all queued work has happened; gives the first failure of that work."""
    current_stream(stream).synchronize()


@acl_function("ki")
def synchronize_stream_with_timeout(stream: int, timeout_ms: int) -> None:
    """As `synchronize_stream`; 507046 on expiry (work goes on), -1 waits for ever."""
    target = current_stream(stream)
    if timeout_ms < -1:
        raise AclFailure(codes.RT_PARAM_INVALID, f"timeout {timeout_ms} ms is below -1")
    target.synchronize(timeout_ms if timeout_ms == -1 else timeout_ms / 1000)


@acl_function("k", failed=(0,))
def stream_query(stream: int) -> int:
    """0 when all queued work has happened, else 1. Never blocks."""
    return 0 if current_stream(stream).is_idle else 1


@acl_function("")
def synchronize_device() -> None:
    """Blocks until the work of all streams of the current device has happened."""
    device = current_context().device
    contexts = [c for c in this_process().contexts.objects() if c.device is device]
    streams = [stream for context in contexts for stream in context.all_streams()]
    for fence in [stream.fence() for stream in streams]:
        fence.acquire()
    for stream in streams:
        stream.raise_failure()


# --- events ---


def _new_event(flags: int, *, is_complete_unrecorded: bool) -> int:
    current_context()
    event = Event(flags, is_complete_unrecorded=is_complete_unrecorded)
    return this_process().events.add(event)


@acl_function("", failed=(0,))
def create_event() -> int:
    """An event that streams can wait for and that takes the time."""
    flags = codes.EVENT_SYNC | _EVENT_TIMELINE
    return _new_event(flags, is_complete_unrecorded=False)


@acl_function("I", failed=(0,))
def create_event_with_flag(flag: int) -> int:
    """An event; without flag SYNC (1) no stream can wait for it."""
    return _new_event(flag, is_complete_unrecorded=False)


@acl_function("I", failed=(0,))
def create_event_ex_with_flag(flag: int) -> int:
    """A re-recordable event, complete until first recorded."""
    return _new_event(flag, is_complete_unrecorded=True)


@acl_function("k")
def destroy_event(event: int) -> None:
    """Forgets an event; allowed while it is pending."""
    current_context()
    this_process().events.remove(event)


@acl_function("kk")
def record_event(event: int, stream: int) -> None:
    """Marks the current end of the stream's queue."""
    target = current_stream(stream)
    this_process().events.get(event).record(target)


@acl_function("kk")
def stream_wait_event(stream: int, event: int) -> None:
    """Later work of the stream waits for the event's last recording. Note the argument order."""
    target = current_stream(stream)
    this_process().events.get(event).hold_back(target)


@acl_function("k")
def synchronize_event(event: int) -> None:
    """Blocks until the last recording is reached."""
    current_context()
    this_process().events.get(event).synchronize()


@acl_function("ki")
def synchronize_event_with_timeout(event: int, timeout_ms: int) -> None:
    """As `synchronize_event`; 507047 on expiry, -1 waits for ever."""
    current_context()
    if timeout_ms < -1:
        raise AclFailure(codes.RT_PARAM_INVALID, f"timeout {timeout_ms} ms is below -1")
    timeout_s = None if timeout_ms == -1 else timeout_ms / 1000
    this_process().events.get(event).synchronize(timeout_s)


@acl_function("k", failed=(0,))
def query_event_status(event: int) -> int:
    """1 complete, 0 not ready (the reverse of the older query calls)."""
    current_context()
    return 1 if this_process().events.get(event).is_complete else 0


@acl_function("kk", failed=(0.0,))
def event_elapsed_time(start: int, end: int) -> float:
    """Milliseconds between two reached events."""
    current_context()
    events = this_process().events
    return events.get(start).elapsed_ms(events.get(end))


# --- memory ---


@acl_function("ki", failed=(0,))
def malloc(size: int, policy: int) -> int:
    """Device memory, 64-byte aligned, poisoned; costs ALIGN_UP(size, 32) + 32, in pages."""
    return current_context().device.memory.malloc(size, policy)


@acl_function("ki", failed=(0,))
def malloc_align32(size: int, policy: int) -> int:
    """As `malloc`, without the 32-byte tail."""
    return current_context().device.memory.malloc(size, policy, pad_bytes=0)


@acl_function("k")
def free(dev_ptr: int) -> None:
    """Frees at once, without waiting for work that uses the memory."""
    current_context().device.memory.free(dev_ptr)


@acl_function("k", failed=(0,))
def malloc_host(size: int) -> int:
    """Pinned host memory, 64-byte aligned, poisoned."""
    current_context()
    return this_process().host_memory.malloc(size)


@acl_function("k")
def free_host(host_ptr: int) -> None:
    """Frees memory of `malloc_host`."""
    current_context()
    this_process().host_memory.free(host_ptr)


@acl_function("kkik")
def memset(ptr: int, max_count: int, value: int, count: int) -> None:
    """Sets bytes now, in no stream's order."""
    context = current_context()
    copies.check_fill(ptr, max_count, count)
    copies.fill(context, ptr, value, count, codes.RT_PARAM_INVALID)


@acl_function("kkikk")
def memset_async(ptr: int, max_count: int, value: int, count: int, stream: int) -> None:
    """Sets bytes at its turn in the stream."""
    context, target = current_context(), current_stream(stream)
    copies.check_fill(ptr, max_count, count)
    work = partial(copies.fill, context, ptr, value, count, codes.RT_DMA)
    target.submit("acl.rt.memset_async", work)


@acl_function("kkkki")
def memcpy(dst: int, dst_max: int, src: int, count: int, kind: int) -> None:
    """Copies now, in no stream's order."""
    copies.copy_now(current_context(), dst, dst_max, src, count, kind)


@acl_function("kkkkik")
def memcpy_async(dst: int, dst_max: int, src: int, count: int, kind: int, stream: int) -> None:
    """Copies at its turn in the stream; pageable host data are taken at the call."""
    target = current_stream(stream)
    copies.copy_later(current_context(), target, dst, dst_max, src, count, kind)


@acl_function("kkkkkki")
def memcpy2d(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int
) -> None:
    """Copies rows now, host to device or back."""
    copies.copy_rows(current_context(), dst, dpitch, src, spitch, width, height, kind)


@acl_function("i", failed=(0, 0))
def get_mem_info(attr: int) -> tuple[int, int]:
    """(free, total) bytes of the device; 0, 0 for a kind of memory that the SoC does not have."""
    memory = current_context().device.memory
    known = _HBM_ATTRIBUTES if this_process().config.has_hbm else _DDR_ATTRIBUTES
    if attr not in known:
        return 0, 0
    return memory.free_bytes, memory.total_bytes
