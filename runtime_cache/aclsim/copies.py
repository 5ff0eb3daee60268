"""Copies and fills as pyACL checks them: kinds, null pointers, alignment, which side is where.

`acl.rt.memcpy` looks at no stream; `memcpy_async` reads and writes at its turn, except that data
from pageable host memory are taken at the call (A2/A3, aclrtMemcpyAsync page of CANN 9.0).
"""

from __future__ import annotations

import ctypes
from functools import partial

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.mapping import fill_releasing_gil
from runtime_cache.aclsim.memory import BASE_ALIGN_BYTES, DeviceMemory, is_device_address
from runtime_cache.aclsim.process import Context, this_process
from runtime_cache.aclsim.streams import Stream

_RUN_MODE_DEVICE = 0
_SIDES = {
    codes.HOST_TO_HOST: "H2H",
    codes.HOST_TO_DEVICE: "H2D",
    codes.DEVICE_TO_HOST: "D2H",
    codes.DEVICE_TO_DEVICE: "D2D",
    codes.HOST_TO_BUFFER_TO_DEVICE: "H2D",
}


def direction(dst: int, dst_max: int, src: int, count: int, kind: int) -> str:
    """Checks the arguments of a copy and returns its direction, such as `H2D`.

    Raises:
        AclFailure: 100000 for a null pointer or an unknown kind, 107000 for a count of 0 or beyond
            `dst_max`, or for a kind that contradicts the addresses.
    """
    if dst == 0 or src == 0:
        raise AclFailure(codes.INVALID_PARAM, "null pointer")
    if not codes.HOST_TO_HOST <= kind <= codes.HOST_TO_BUFFER_TO_DEVICE:
        raise AclFailure(codes.INVALID_PARAM, f"memcpy kind {kind} is not 0..5")
    if count == 0 or count > dst_max:
        raise AclFailure(codes.RT_PARAM_INVALID, f"count {count} is 0 or above dst_max {dst_max}")
    actual = _side(src) + "2" + _side(dst)
    wanted = _SIDES.get(kind, actual)
    if this_process().config.mode == _RUN_MODE_DEVICE:
        return wanted  # one memory for both: all addresses are good for either side
    if actual != wanted:
        raise AclFailure(
            codes.RT_PARAM_INVALID,
            f"kind {kind} says {wanted}, but dst {dst:#x} and src {src:#x} make it {actual}",
        )
    return actual


def _side(address: int) -> str:
    return "D" if is_device_address(address) else "H"


def copy_now(context: Context, dst: int, dst_max: int, src: int, count: int, kind: int) -> None:
    """`acl.rt.memcpy`: the copy has happened on return, whatever the streams are doing.

    Raises:
        AclFailure: as `direction`; 107000 for ranges that are not usable.
    """
    way = direction(dst, dst_max, src, count, kind)
    if dst != src:
        context.device.memory.copy(dst, src, count, codes.RT_PARAM_INVALID)
        ledger.count_copy(way, count)


def copy_later(
    context: Context, stream: Stream, dst: int, dst_max: int, src: int, count: int, kind: int
) -> None:
    """`acl.rt.memcpy_async`: queued; bad ranges surface when the stream is synchronised.

    Raises:
        AclFailure: as `direction`; 207000 for host to host; 107000 for a device end that is not
            64-byte aligned.
    """
    way = direction(dst, dst_max, src, count, kind)
    if way == "H2H":
        raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, "asynchronous host-to-host copy")
    for address in (dst, src):
        if is_device_address(address) and address % BASE_ALIGN_BYTES:
            sentence = f"device address {address:#x} of an async copy is not 64-byte aligned"
            raise AclFailure(codes.RT_PARAM_INVALID, sentence)
    memory = context.device.memory
    pinned = this_process().host_memory.is_pinned
    if way == "H2D" and not pinned(src):
        data = ctypes.create_string_buffer(ctypes.string_at(src, count), count)
        stream.submit("acl.rt.memcpy_async", partial(_copy_kept, memory, dst, data, count))
        return
    stream.submit("acl.rt.memcpy_async", partial(_copy, memory, dst, src, count, way))
    if way == "D2H" and not pinned(dst):
        stream.fence().acquire()


def _copy(memory: DeviceMemory, dst: int, src: int, count: int, way: str) -> None:
    memory.copy(dst, src, count, codes.RT_DMA)
    ledger.count_copy(way, count)


def _copy_kept(
    memory: DeviceMemory, dst: int, data: ctypes.Array[ctypes.c_char], count: int
) -> None:
    """The turn of a copy whose pageable source was taken at the call."""
    _copy(memory, dst, ctypes.addressof(data), count, "H2D")


def copy_rows(
    context: Context,
    dst: int,
    dpitch: int,
    src: int,
    spitch: int,
    width: int,
    height: int,
    kind: int,
) -> None:
    """`acl.rt.memcpy2d`: `height` rows of `width` bytes, host to device or back.

    Raises:
        AclFailure: 100000 for a 0 size or a width above a pitch, else as `copy_now`.
    """
    if min(width, height) == 0 or width > min(dpitch, spitch):
        raise AclFailure(codes.INVALID_PARAM, "a size is 0 or the width exceeds a pitch")
    if kind not in (codes.HOST_TO_DEVICE, codes.DEVICE_TO_HOST):
        raise AclFailure(codes.INVALID_PARAM, f"memcpy2d knows kinds 1 and 2, not {kind}")
    for row in range(height):
        copy_now(context, dst + row * dpitch, width, src + row * spitch, width, kind)


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
