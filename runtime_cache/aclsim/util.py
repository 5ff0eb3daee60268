"""`acl.util` in software: addresses of bytes, bytes of addresses."""

from __future__ import annotations

import ctypes

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.memory import is_device_address
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl.util")


@acl_function("O", plain=0)
def bytes_to_ptr(data: object) -> int:
    """The address inside an immutable bytes object; the caller keeps the object.

    Raises:
        ValueError: anything but bytes.
    """
    if not isinstance(data, bytes):
        raise ValueError("bytes_to_ptr takes bytes")
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return address or 0


@acl_function("kk", plain=b"")
def ptr_to_bytes(ptr: int, size: int) -> bytes:
    """A copy of host memory. A device address, which would crash on a card, gives b""."""
    if ptr == 0 or is_device_address(ptr):
        raise AclFailure(codes.INVALID_PARAM, f"{ptr:#x} is not readable from the host")
    this_process().host_memory.live.check_if_known(ptr, size, codes.INVALID_PARAM)
    return ctypes.string_at(ptr, size)
