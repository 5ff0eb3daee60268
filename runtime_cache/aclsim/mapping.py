"""Host mappings behind simulated device memory: poisoned, and committed only when written to.

A range is the same 16 MiB of poison mapped privately again and again: reading it costs no
memory, writing a page commits that page only. Linux only (memfd, MAP_FIXED).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

# NaN as fp32, as fp16 and as bf16, and far out of range as an index.
POISON = (0x7FFE7FFE).to_bytes(4, "little")
PAGE_BYTES = mmap.PAGESIZE
_POISON_FILE_BYTES = 16 << 20

_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_MOVE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SET = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
# For short copies: keeping the GIL is cheaper than handing it over twice.
move_holding_gil = ctypes.PYFUNCTYPE(*_MOVE)(("memmove", _libc))
move_releasing_gil = ctypes.CFUNCTYPE(*_MOVE)(("memmove", _libc))
fill_releasing_gil = ctypes.CFUNCTYPE(*_SET)(("memset", _libc))


def map_poisoned(size_bytes: int) -> int:
    """Maps `size_bytes` (rounded up to pages) of poison and returns the host address.

    Raises:
        MemoryError: the host refuses the mapping; nothing is mapped.
    """
    length = round_up(size_bytes, PAGE_BYTES)
    address = reserve(length)
    try:
        poison(address, length)
    except MemoryError:
        unmap(address, length)
        raise
    return address


def reserve(size_bytes: int) -> int:
    """Takes address space (whole pages) that nobody can touch; it costs no memory.

    Raises:
        MemoryError: the host refuses.
    """
    return _mmap(None, size_bytes, _PROT_NONE, _ANONYMOUS, -1)


def forbid(address: int, size_bytes: int) -> None:
    """Makes a mapped range (whole pages) address space that nobody can touch."""
    _mmap(address, size_bytes, _PROT_NONE, _ANONYMOUS | _MAP_FIXED, -1)


def poison(address: int, size_bytes: int) -> None:
    """Replaces a mapped range (whole pages) by fresh poison, dropping what it held.

    Safe while another thread reads or writes the range: pages are exchanged, never missing.
    """
    length = round_up(size_bytes, PAGE_BYTES)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for offset in range(0, length, _POISON_FILE_BYTES):
        part = min(_POISON_FILE_BYTES, length - offset)
        _mmap(address + offset, part, _READ_WRITE, flags, _poison_file())


def unmap(address: int, size_bytes: int) -> None:
    """Gives a range back to the host."""
    if _libc.munmap(address, round_up(size_bytes, PAGE_BYTES)) != 0:
        raise OSError(ctypes.get_errno(), "munmap failed")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@functools.cache
def _poison_file() -> int:
    """Descriptor of the memory file full of poison, made on first use and kept."""
    descriptor = os.memfd_create("aclsim-poison")
    os.write(descriptor, POISON * (_POISON_FILE_BYTES // len(POISON)))
    return descriptor


def _mmap(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    """`mmap(2)` that raises."""
    result = _libc.mmap(address, length, protection, flags, descriptor, 0)
    if result is None or result == _MAP_FAILED:
        raise MemoryError(f"mmap of {length} bytes failed: {os.strerror(ctypes.get_errno())}")
    return int(result)
