"""Memory of one simulated device, and pinned host memory: accounting, bounds, poison, copies.

On a card, device addresses are numbers outside of anything a user process can map (2^60 and up),
translated here to host mappings. They are never reused, so an address that outlives its allocation
is always found out. On a board, one memory serves both sides: `malloc` and `malloc_host` give
addresses of one arena that the program reads and writes itself, out of one capacity. Accounting
follows the aclrtMalloc page of CANN 9.0.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime_cache.aclsim import codes, mapping, pages
from runtime_cache.aclsim.address_map import AddressMap, Allocation
from runtime_cache.aclsim.arena import Arena
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.pages import NORMAL_PAGE_BYTES, TAIL_BYTES

DEVICE_BASE = 1 << 60
DEVICE_END = 1 << 63
_DEVICE_SPAN = 1 << 56
_GUARD_BYTES = 4096

BASE_ALIGN_BYTES = 64
_HOLD_GIL_BYTES = 64 << 10


# Of the whole process, so that an address stays what it is: pinned memory beside a card, and the
# one memory of a board.
_pinned = Arena()
_board = Arena()


def is_device_address(address: int) -> bool:
    """Whether a number lies where a device can have memory, mapped or not.

    On a board that is all that `malloc` and `malloc_host` gave.
    """
    return DEVICE_BASE <= address < DEVICE_END or _board.base <= address < _board.end


def is_host_readable(address: int) -> bool:
    """Whether the program itself may follow the address; never on a card's device memory."""
    return not DEVICE_BASE <= address < DEVICE_END


class HostMemory:
    """Pinned host memory (`malloc_host`) of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._payers: dict[int, DeviceMemory] = {}
        self.live = AddressMap("pinned host")

    def malloc(self, size_bytes: int, payer: DeviceMemory | None = None) -> int:
        """Page-aligned pinned memory, poisoned.

        Args:
            size_bytes: what the program may use.
            payer: the device whose one memory it comes out of (boards), in whole pages.

        Raises:
            AclFailure: 100000 for size 0, 207001 if the host or the board has no room.
        """
        if size_bytes == 0:
            raise AclFailure(codes.INVALID_PARAM, "size is 0")
        charged = 0 if payer is None else round_up(size_bytes, NORMAL_PAGE_BYTES)
        if payer is not None:
            payer.charge(charged)
        try:
            host = _take(_pinned if payer is None else _board, size_bytes)
        except AclFailure:
            if payer is not None:
                payer.refund(charged)
            raise
        with self._lock:
            self.live.add(Allocation(host, size_bytes, charged, host))
            if payer is not None:
                self._payers[host] = payer
        return host

    def free(self, address: int) -> None:
        """Poisons the range, so that a late reader gets garbage; it may be used again much later.

        Raises:
            AclFailure: 107000 if `address` is no live `malloc_host` address.
        """
        with self._lock:
            allocation = self.live.remove(address)
            allocation.is_live = False
            payer = self._payers.pop(address, None)
        if payer is not None:
            payer.refund(allocation.charged_bytes)
        arena = _pinned if payer is None else _board
        arena.give_back(allocation.host, allocation.size_bytes)

    def free_all(self) -> int:
        """Frees what is left and returns how many allocations it was."""
        left = list(self.live)
        for allocation in left:
            self.free(allocation.base)
        return len(left)

    def is_pinned(self, address: int) -> bool:
        """Whether `address` lies in live pinned memory."""
        return self.live.covering(address) is not None

    def check(self, address: int, count_bytes: int, code: int) -> None:
        """Checks a range of host memory, as far as acl knows of it.

        Raises:
            AclFailure: `code`, for pinned memory that leaves its allocation or was freed.
        """
        if _pinned.base <= address < _pinned.end:
            self.live.find(address, count_bytes, code)

    def is_pageable(self, address: int) -> bool:
        """Whether `address` is the program's own memory, which acl knows nothing of."""
        return not is_device_address(address) and self.live.covering(address) is None


class DeviceMemory:
    """The memory of one device. Thread-safe.

    Args:
        device_id: places the device's own address range.
        total_bytes: capacity, as `get_mem_info` reports it.
        host_memory: where host addresses of copies are checked.
        has_one_memory: a board, whose memory the host reads and writes itself.
    """

    def __init__(
        self,
        device_id: int,
        total_bytes: int,
        host_memory: HostMemory,
        *,
        has_one_memory: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._next_base = DEVICE_BASE + device_id * _DEVICE_SPAN
        self._host_memory = host_memory
        self.has_one_memory = has_one_memory
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.live = AddressMap("device")

    @property
    def free_bytes(self) -> int:
        """What is left for allocations."""
        return self.total_bytes - self.used_bytes

    def charge(self, count_bytes: int) -> None:
        """Takes capacity without an address: system packages, model weights, work memory.

        Raises:
            AclFailure: 207001 if it does not fit; nothing is taken.
        """
        with self._lock:
            self._take(count_bytes)

    def refund(self, count_bytes: int) -> None:
        """Gives back what `charge` took."""
        with self._lock:
            self.used_bytes -= count_bytes

    def malloc(self, size_bytes: int, policy: int, *, pad_bytes: int = TAIL_BYTES) -> int:
        """Reserves poisoned device memory and returns its address, 64-byte aligned.

        Args:
            size_bytes: what the program may use.
            policy: ACL_MEM_MALLOC_*, decides the page size.
            pad_bytes: tail that pyACL adds (32 for malloc, 0 for malloc_align32).

        Raises:
            AclFailure: 100000 for size 0, 207001 if it does not fit; nothing is taken.
        """
        if size_bytes == 0:
            raise AclFailure(codes.INVALID_PARAM, "size is 0")
        with self._lock:
            charged, page_bytes = self._charge_pages(size_bytes, policy, pad_bytes)
            try:
                base, host = self._place(size_bytes)
            except AclFailure:
                self.used_bytes -= charged
                raise
            self.live.add(Allocation(base, size_bytes, charged, host, page_bytes))
        return base

    def page_bytes(self, address: int) -> int | None:
        """Size of the pages behind a live device address; None for any other."""
        allocation = self.live.covering(address)
        return None if allocation is None else allocation.page_bytes

    def _place(self, size_bytes: int) -> tuple[int, int]:
        """(address for the program, address of the mapping behind it)."""
        if self.has_one_memory:
            host = _take(_board, size_bytes + TAIL_BYTES)
            return host, host
        host = _map(size_bytes + TAIL_BYTES)
        base = self._next_base
        self._next_base += round_up(size_bytes + _GUARD_BYTES, _GUARD_BYTES)
        return base, host

    def _charge_pages(self, size_bytes: int, policy: int, pad_bytes: int) -> tuple[int, int]:
        """Takes huge pages, or normal ones where allowed; returns bytes taken and page size."""
        sizes = pages.costs(size_bytes, policy, pad_bytes)
        for charged, page_bytes in sizes[:-1]:
            if self.used_bytes + charged <= self.total_bytes:
                self.used_bytes += charged
                return charged, page_bytes
        self._take(sizes[-1][0])
        return sizes[-1]

    def _take(self, count_bytes: int) -> None:
        if self.used_bytes + count_bytes > self.total_bytes:
            raise AclFailure(
                codes.RT_MEMORY_ALLOCATION,
                f"out of device memory: {count_bytes} bytes wanted, {self.free_bytes} of "
                f"{self.total_bytes} free",
            )
        self.used_bytes += count_bytes

    def free(self, address: int) -> None:
        """Frees at once, whatever still runs: running tasks see poison from now on.

        Raises:
            AclFailure: 100000 for 0, 107000 for anything that is not a live allocation's start.
        """
        if address == 0:
            raise AclFailure(codes.INVALID_PARAM, "free of a null pointer")
        with self._lock:
            self._drop(self.live.remove(address))

    def free_all(self) -> int:
        """Frees what is left, as a device reset does, and returns how many allocations it was."""
        with self._lock:
            leaked = list(self.live)
            for allocation in leaked:
                self._drop(self.live.remove(allocation.base))
        return len(leaked)

    def _drop(self, allocation: Allocation) -> None:
        allocation.is_live = False
        self.used_bytes -= allocation.charged_bytes
        if self.has_one_memory:
            _board.give_back(allocation.host, _mapped_bytes(allocation))
        elif allocation.pins:
            mapping.poison(allocation.host, _mapped_bytes(allocation))
        else:
            mapping.unmap(allocation.host, _mapped_bytes(allocation))

    def check(self, address: int, count_bytes: int, code: int) -> None:
        """Checks that a range lies inside one live allocation.

        Raises:
            AclFailure: `code`, with the reason.
        """
        with self._lock:
            self._find(address, count_bytes, code)

    def _find(self, address: int, count_bytes: int, code: int) -> Allocation:
        """The live allocation that holds a range the device may use; errors as `check`."""
        if self.has_one_memory and self.live.covering(address) is None:
            pinned = self._host_memory.live
            if pinned.covering(address) or pinned.was_freed(address):
                return pinned.find(address, count_bytes, code)
        return self.live.find(address, count_bytes, code)

    @contextmanager
    def pinned(self, ranges: Sequence[tuple[int, int]], code: int) -> Iterator[list[int]]:
        """Keeps (address, size) ranges mapped for a task; yields their host addresses.

        Raises:
            AclFailure: `code`, before the task if a range is not live, after it if one was freed
                meanwhile.
        """
        with self._lock:
            held = [self._find(address, size, code) for address, size in ranges]
            for allocation in held:
                allocation.pins += 1
        try:
            pairs = zip(held, ranges, strict=True)
            yield [
                allocation.host + address - allocation.base for allocation, (address, _) in pairs
            ]
        finally:
            with self._lock:
                dead = [allocation for allocation in held if self._unpin(allocation)]
        if dead:
            sentence = f"device memory at {dead[0].base:#x} was freed while a task used it"
            raise AclFailure(code, sentence)

    def _unpin(self, allocation: Allocation) -> bool:
        """Ends one use; returns whether the allocation was freed meanwhile."""
        allocation.pins -= 1
        if allocation.is_live:
            return False
        if allocation.pins == 0 and not self.has_one_memory:
            mapping.unmap(allocation.host, _mapped_bytes(allocation))
        return True

    def read(self, address: int, count_bytes: int, code: int) -> bytes:
        """Copies a device range into Python bytes (for small things such as gear selectors)."""
        self.check(address, count_bytes, code)
        target = ctypes.create_string_buffer(count_bytes)
        self.copy(ctypes.addressof(target), address, count_bytes, code)
        return target.raw

    def write(self, address: int, data: bytes, code: int) -> None:
        """Copies bytes to a device range, now.

        Raises:
            AclFailure: `code`, if the range is not usable or no device memory.
        """
        self.check(address, len(data), code)
        source = ctypes.create_string_buffer(data, len(data))
        self.copy(address, ctypes.addressof(source), len(data), code)

    def copy(self, dst: int, src: int, count_bytes: int, code: int) -> None:
        """Moves bytes between device and device, or device and host, now.

        Raises:
            AclFailure: `code`, if a device or pinned range is not usable, or if both ends overlap.
        """
        if abs(dst - src) < count_bytes:
            sentence = f"a copy of {count_bytes} bytes from {src:#x} to {dst:#x} overlaps itself"
            raise AclFailure(code, sentence)
        if count_bytes <= _HOLD_GIL_BYTES:
            with self._lock:
                target = self._translate(dst, count_bytes, code)
                source = self._translate(src, count_bytes, code)
                mapping.move_holding_gil(target, source, count_bytes)
            return
        self._copy_large(dst, src, count_bytes, code)

    def _translate(self, address: int, count_bytes: int, code: int) -> int:
        """Host address of a range. Call with the lock held."""
        if self.has_one_memory and is_device_address(address):
            self._find(address, count_bytes, code)
            return address
        if address < DEVICE_BASE:
            self._host_memory.check(address, count_bytes, code)
            return address
        allocation = self.live.find(address, count_bytes, code)
        return allocation.host + address - allocation.base

    def _copy_large(self, dst: int, src: int, count_bytes: int, code: int) -> None:
        """A copy without the GIL, its device ranges pinned."""
        ends = (dst, src)
        for end in ends:
            if not is_device_address(end):
                self._host_memory.check(end, count_bytes, code)
        ranges = [(end, count_bytes) for end in ends if is_device_address(end)]
        with self.pinned(ranges, code) as hosts:
            translated = iter(hosts)
            target, source = (next(translated) if is_device_address(e) else e for e in ends)
            mapping.move_releasing_gil(target, source, count_bytes)

    def fill(self, address: int, value: int, count_bytes: int, code: int) -> None:
        """Sets every byte of a device range to `value`, now.

        Raises:
            AclFailure: `code`, if the range is not usable.
        """
        with self.pinned([(address, count_bytes)], code) as hosts:
            mapping.fill_releasing_gil(hosts[0], value, count_bytes)


def _mapped_bytes(allocation: Allocation) -> int:
    """Length of the mapping behind a device allocation, tail included."""
    return allocation.size_bytes + TAIL_BYTES


def _map(size_bytes: int) -> int:
    try:
        return mapping.map_poisoned(size_bytes)
    except MemoryError as error:
        raise AclFailure(codes.RT_MEMORY_ALLOCATION, f"the host says: {error}") from error


def _take(arena: Arena, size_bytes: int) -> int:
    try:
        return arena.take(size_bytes)
    except MemoryError as error:
        raise AclFailure(codes.RT_MEMORY_ALLOCATION, f"the host says: {error}") from error
