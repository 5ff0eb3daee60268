"""Addresses that the host can read, given out in order and used again as late as possible.

One range of address space, reserved once and costing nothing, in which each allocation lies behind
the one before, with a page between that nobody may touch. What is given back holds poison for a
while, so that a late reader gets garbage and not a crash; later nobody may touch it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque

from runtime_cache.aclsim import mapping
from runtime_cache.aclsim.mapping import PAGE_BYTES, round_up

RESERVED_BYTES = 1 << 40
# Where the host limits address space (ulimit -v), less is asked for.
LEAST_RESERVED_BYTES = 1 << 30
GUARD_BYTES = PAGE_BYTES
# What was given back and still holds poison: so many ranges and bytes at most.
MAX_POISONED = 256
MAX_POISONED_BYTES = 4 << 30


class Arena:
    """A reserved range. Thread-safe.

    Attributes:
        base, end: the range; empty until the first allocation.
    """

    def __init__(self) -> None:
        self.base = self.end = 0
        self._lock = threading.Lock()
        self._next = 0
        self._taken: list[tuple[int, int]] = []  # (base, end), sorted
        self._poisoned: deque[tuple[int, int]] = deque()
        self._poisoned_bytes = 0

    def take(self, size_bytes: int) -> int:
        """Maps poison and returns its address, page-aligned.

        Raises:
            MemoryError: no address space is left, or the host refuses; nothing is mapped.
        """
        length = round_up(size_bytes, PAGE_BYTES)
        with self._lock:
            if not self.end:
                self._reserve()
            address = self._find_place(length + GUARD_BYTES)
            mapping.poison(address, length)
            insort(self._taken, (address, address + length))
            self._next = address + length + GUARD_BYTES
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Poisons what was taken there; safe while others still read or write it."""
        length = round_up(size_bytes, PAGE_BYTES)
        with self._lock:
            mapping.poison(address, length)
            del self._taken[bisect_left(self._taken, (address, address + length))]
            self._poisoned.append((address, address + length))
            self._poisoned_bytes += length
            while len(self._poisoned) > MAX_POISONED or self._poisoned_bytes > MAX_POISONED_BYTES:
                self._close_oldest()

    def _close_oldest(self) -> None:
        base, end = self._poisoned.popleft()
        self._poisoned_bytes -= end - base
        at = bisect_left(self._taken, (base, base))
        overlapping = self._taken[max(at - 1, 0) : at + 1]
        if not any(start < end and base < stop for start, stop in overlapping):
            mapping.forbid(base, end - base)  # else the whole arena was used once, and this again

    def _reserve(self) -> None:
        size_bytes = RESERVED_BYTES
        while True:
            try:
                self.base = mapping.reserve(size_bytes)
                break
            except MemoryError:
                size_bytes //= 4
                if size_bytes < LEAST_RESERVED_BYTES:
                    raise
        self.end = self.base + size_bytes
        self._next = self.base

    def _find_place(self, length: int) -> int:
        """The next place of so many bytes: behind the last one, or from the start again."""
        for start in (self._next, self.base):
            for base, end in self._taken[bisect_left(self._taken, (start, start)) :]:
                if base - start >= length:
                    break
                start = end + GUARD_BYTES
            if self.end - start >= length:
                return start
        raise MemoryError(f"no {length} bytes of address space are left for allocations")
