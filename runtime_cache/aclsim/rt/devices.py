"""Devices and contexts of `acl.rt`.

Return shapes, parse codes and error codes as pyACL's; see `calling` for the convention.
"""

from __future__ import annotations

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import (
    Context,
    Device,
    current_context,
    open_device,
    set_current,
    this_process,
)

acl_function = surface("acl.rt")

_STATUS_UNKNOWN = 0xFFFF
_BUSY_PERCENT = 100
_NOT_MEASURED = -1


# --- devices ---


@acl_function("", failed=(0,))
def get_device_count() -> int:
    """Number of devices of this host."""
    return this_process().config.device_count


@acl_function("i")
def set_device(device_id: int) -> None:
    """Opens a device once more and makes its default context current in this thread."""
    open_device(device_id)


@acl_function("i")
def reset_device(device_id: int) -> None:
    """Closes a device once; the last close waits for work and frees everything on it.

    Stricter than a card: 107000 while own streams or contexts are alive, since the manual asks to
    destroy them first.
    """
    process = this_process()
    device = process.device(device_id)
    with process.lock:
        default = _default_context(device)
        if device.num_users > 1:
            device.num_users -= 1
            return
        own = _own_contexts(device)
        if own or default.streams:
            sentence = f"{len(own)} contexts and {len(default.streams)} streams are alive"
            raise AclFailure(codes.RT_PARAM_INVALID, sentence)
        device.num_users, device.default_context = 0, None
    process.subscriptions.note_wait("acl.rt.reset_device", default.default_stream)
    process.close_context(default)  # without the lock, which the work that runs may need
    process.clear_device(device)


@acl_function("i")
def reset_device_force(device_id: int) -> None:
    """Closes a device for all its users: drops queued work, streams, contexts, models, memory."""
    process = this_process()
    device = process.device(device_id)
    with process.lock:
        contexts = [_default_context(device), *_own_contexts(device)]
        device.num_users, device.default_context = 0, None
    for context in contexts:
        for stream in context.all_streams():
            stream.abort()
            process.subscriptions.release(stream)
        for handle in context.streams:
            process.streams.remove(handle)
        process.close_context(context)
    process.clear_device(device)


def _default_context(device: Device) -> Context:
    """The default context of an open device.

    Raises:
        AclFailure: 107000 if nobody has set the device.
    """
    if device.default_context is None or device.num_users == 0:
        raise AclFailure(codes.RT_PARAM_INVALID, f"device {device.device_id} is not set")
    return device.default_context


def _own_contexts(device: Device) -> list[Context]:
    """The contexts that the program created on a device."""
    contexts = this_process().contexts.objects()
    return [c for c in contexts if c.device is device and c is not device.default_context]


@acl_function("", failed=(0,))
def get_device() -> int:
    """The device of the current context."""
    return current_context().device.device_id


@acl_function("i", failed=(_STATUS_UNKNOWN,))
def query_device_status(device_id: int) -> int:
    """0 normal, 1 abnormal. Answers even when the device is lost."""
    device = this_process().devices.get(device_id)
    if device is None:
        device = this_process().device(device_id)
    return 1 if device.lost_code else 0


@acl_function(
    "i",
    failed=(
        {
            "cube_utilization": 0,
            "vector_utilization": 0,
            "aicpu_utilization": 0,
            "memory_utilization": 0,
            "utilization_extend": 0,
        },
    ),
)
def get_device_utilization_rate(device_id: int) -> dict[str, int]:
    """Percentages. Here a device is either busy (100) or idle (0); memory is -1, as on a card."""
    process = this_process()
    device = process.device(device_id)
    contexts = [c for c in process.contexts.objects() if c.device is device]
    is_idle = all(stream.is_idle for context in contexts for stream in context.all_streams())
    percent = 0 if is_idle else _BUSY_PERCENT
    return {
        "cube_utilization": percent,
        "vector_utilization": percent,
        "aicpu_utilization": 0,
        "memory_utilization": _NOT_MEASURED,
        "utilization_extend": 0,
    }


@acl_function("", failed=(0,))
def get_run_mode() -> int:
    """1 when the program runs on a host beside the device, 0 when on the device itself."""
    return this_process().config.mode


@acl_function("ii", failed=(0,))
def device_can_access_peer(device_id: int, peer_device_id: int) -> int:
    """0: devices of the software have no link to each other. 100000 for one and the same device."""
    if device_id == peer_device_id:
        raise AclFailure(codes.INVALID_PARAM, "a device and its peer are the same")
    for each in (device_id, peer_device_id):
        this_process().device(each)
    return 0


# --- contexts ---


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
    process.destroy_context(found)


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


@acl_function("i", failed=(0, 0))
def get_primary_ctx_state(device_id: int) -> tuple[int, int]:
    """(1 if the device's default context exists, else 0; flags, always 0)."""
    device = this_process().device(device_id)
    return int(device.default_context is not None), 0
