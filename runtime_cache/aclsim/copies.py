"""Copies and fills as pyACL checks them: kinds, null pointers, alignment, which side is where.

`acl.rt.memcpy` looks at no stream; `memcpy_async` reads and writes at its turn, except that data
from pageable host memory are taken at the call (A2/A3, aclrtMemcpyAsync page of CANN 9.0).
"""

from __future__ import annotations

import ctypes
from functools import partial

from runtime_cache.aclsim import codes, races
from runtime_cache.aclsim.address_map import AddressMap
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.mapping import fill_releasing_gil
from runtime_cache.aclsim.memory import (
    BASE_ALIGN_BYTES,
    DeviceMemory,
    is_device_address,
    is_host_readable,
)
from runtime_cache.aclsim.process import Context, this_process
from runtime_cache.aclsim.streams import Stream

_SIDES = {
    codes.HOST_TO_HOST: "H2H",
    codes.HOST_TO_DEVICE: "H2D",
    codes.DEVICE_TO_HOST: "D2H",
    codes.DEVICE_TO_DEVICE: "D2D",
    codes.HOST_TO_BUFFER_TO_DEVICE: "H2D",
}


# By whether dst is on the device, then by whether src is.
_ACTUAL = (("H2H", "D2H"), ("H2D", "D2D"))


def direction(dst: int, dst_max: int, src: int, count: int, kind: int) -> str:
    """Checks the arguments of a copy and returns its direction, such as `H2D`.

    On a board all addresses are alike, and the kind alone decides.

    Raises:
        AclFailure: 100000 for a null pointer or an unknown kind, 107000 for a count of 0 or beyond
            `dst_max`, or for a kind that contradicts the addresses.
    """
    actual = _ACTUAL[is_device_address(dst)][is_device_address(src)]
    if this_process().config.has_one_memory:
        actual = ""
    return _direction(dst, dst_max, src, count, kind, actual)


def _direction(dst: int, dst_max: int, src: int, count: int, kind: int, actual: str) -> str:
    """As `direction`; `actual` is what the addresses say, "" on a board."""
    if dst == 0 or src == 0:
        raise AclFailure(codes.INVALID_PARAM, "null pointer")
    if not codes.HOST_TO_HOST <= kind <= codes.HOST_TO_BUFFER_TO_DEVICE:
        raise AclFailure(codes.INVALID_PARAM, f"memcpy kind {kind} is not 0..5")
    if count == 0 or count > dst_max:
        raise AclFailure(codes.RT_PARAM_INVALID, f"count {count} is 0 or above dst_max {dst_max}")
    wanted = _SIDES.get(kind, actual or "D2D")
    if actual not in ("", wanted):
        raise AclFailure(
            codes.RT_PARAM_INVALID,
            f"kind {kind} says {wanted}, but dst {dst:#x} and src {src:#x} make it {actual}",
        )
    return wanted


def copy_now(context: Context, dst: int, dst_max: int, src: int, count: int, kind: int) -> None:
    """`acl.rt.memcpy`: the copy has happened on return, whatever the streams are doing.

    Raises:
        AclFailure: as `direction`; 107000 for ranges that are not usable.
    """
    memory = context.device.memory
    to_device, from_device = is_device_address(dst), is_device_address(src)
    actual = "" if memory.has_one_memory else _ACTUAL[to_device][from_device]
    way = _direction(dst, dst_max, src, count, kind, actual)
    if dst != src:
        pending = context.device.pending()
        races.note_read(pending, "acl.rt.memcpy", src, count)
        races.note_write(pending, "acl.rt.memcpy", dst, count)
        memory.copy(dst, src, count, codes.RT_PARAM_INVALID)
        ledger.count_copy(way, count)


def copy_later(
    context: Context, stream: Stream, dst: int, dst_max: int, src: int, count: int, kind: int
) -> None:
    """`acl.rt.memcpy_async`: queued; bad ranges surface when the stream is synchronised.

    Raises:
        AclFailure: as `direction`; 207000 for host to host; 107000 for a device end that is not
            64-byte aligned.
    """
    memory = context.device.memory
    to_device, from_device = is_device_address(dst), is_device_address(src)
    actual = "" if memory.has_one_memory else _ACTUAL[to_device][from_device]
    way = _direction(dst, dst_max, src, count, kind, actual)
    if way == "H2H":
        raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, "asynchronous host-to-host copy")
    if to_device and dst % BASE_ALIGN_BYTES:
        raise _unaligned(dst)
    if from_device and src % BASE_ALIGN_BYTES:
        raise _unaligned(src)
    if to_device and from_device:
        work = partial(_copy, memory, dst, src, count, way)
        stream.submit("acl.rt.memcpy_async", work, reads=((src, count),), writes=((dst, count),))
        return
    is_pinned = this_process().host_memory.is_pinned
    if not from_device and not is_pinned(src):
        work = partial(_copy_kept, memory, dst, take_now(src, count), count, way)
        stream.submit("acl.rt.memcpy_async", work, writes=((dst, count),))
        return
    work = partial(_copy, memory, dst, src, count, way)
    stream.submit("acl.rt.memcpy_async", work, reads=((src, count),), writes=((dst, count),))
    if not to_device and not is_pinned(dst):
        stream.wait()


def take_now(address: int, count: int) -> ctypes.Array[ctypes.c_char]:
    """A copy of the program's own memory.

    Raises:
        AclFailure: 207001 if the host has no room for it.
    """
    try:
        return ctypes.create_string_buffer(ctypes.string_at(address, count), count)
    except (MemoryError, OverflowError, SystemError, ValueError) as error:
        sentence = f"the host has no room for {count} bytes on their way"
        raise AclFailure(codes.RT_MEMORY_ALLOCATION, sentence) from error


def _unaligned(address: int) -> AclFailure:
    sentence = f"device address {address:#x} of an async copy is not 64-byte aligned"
    return AclFailure(codes.RT_PARAM_INVALID, sentence)


def _copy(memory: DeviceMemory, dst: int, src: int, count: int, way: str) -> None:
    memory.copy(dst, src, count, codes.RT_DMA)
    ledger.count_copy(way, count)


def _copy_kept(
    memory: DeviceMemory, dst: int, data: ctypes.Array[ctypes.c_char], count: int, way: str
) -> None:
    """The turn of a copy whose pageable source was taken at the call."""
    _copy(memory, dst, ctypes.addressof(data), count, way)


def free_device(context: Context, address: int) -> None:
    """`acl.rt.free`: at once, whatever still uses the memory.

    Raises:
        AclFailure: 100000 for 0, 107000 for anything that is not a live allocation's start.
    """
    memory = context.device.memory
    found = memory.live.covering(address)
    if found is not None and found.base == address:
        races.note_free(context.device.pending(), "acl.rt.free", address, found.size_bytes)
    memory.free(address)


def free_host(address: int) -> None:
    """`acl.rt.free_host`: at once, whatever still uses the memory.

    Raises:
        AclFailure: 107000 if `address` is no live `malloc_host` address.
    """
    process = this_process()
    found = process.host_memory.live.covering(address)
    if found is not None and found.base == address:
        races.note_free(process.pending(), "acl.rt.free_host", address, found.size_bytes)
    process.host_memory.free(address)


def fill_now(context: Context, ptr: int, value: int, count: int) -> None:
    """`acl.rt.memset`: has happened on return, whatever the streams are doing; errors as `fill`."""
    races.note_write(context.device.pending(), "acl.rt.memset", ptr, count)
    fill(context, ptr, value, count, codes.RT_PARAM_INVALID)


def read_host(function: str, address: int, count: int, code: int) -> bytes:
    """What the program itself reads there: any host memory, on a board also the device's.

    Raises:
        AclFailure: `code`, for a null pointer, device memory of a card, and a range that leaves its
            allocation or was freed.
    """
    process = this_process()
    if address == 0 or not is_host_readable(address):
        raise AclFailure(code, f"{address:#x} is not readable from the host")
    if is_device_address(address):
        _board_memory(address).find(address, count, code)
    else:
        process.host_memory.check(address, count, code)
    races.note_read(process.pending(), function, address, count)
    return ctypes.string_at(address, count)


def _board_memory(address: int) -> AddressMap:
    """Which allocations of a board hold an address, or held it."""
    process = this_process()
    holders = [process.host_memory.live, *(d.memory.live for d in process.devices.values())]
    for live in holders:
        if live.covering(address):
            return live
    return next((live for live in holders if live.was_freed(address)), holders[-1])


def check_fill(ptr: int, max_count: int, count: int) -> None:
    """Checks the arguments of a memset.

    Raises:
        AclFailure: 100000 for a null pointer, 107000 for a count of 0 or beyond `max_count`.
    """
    if ptr == 0:
        raise AclFailure(codes.INVALID_PARAM, "null pointer")
    if count == 0 or count > max_count:
        raise AclFailure(codes.RT_PARAM_INVALID, f"count {count} is 0 or above max {max_count}")


def fill(context: Context, ptr: int, value: int, count: int, code: int) -> None:
    """Sets bytes of device memory, or of memory from `malloc_host`, now.

    Raises:
        AclFailure: `code` for a range that is not usable; host memory must come from acl.
    """
    if is_device_address(ptr):
        context.device.memory.fill(ptr, value & 0xFF, count, code)
        return
    this_process().host_memory.live.find(ptr, count, code)
    fill_releasing_gil(ptr, value & 0xFF, count)
