"""Which addresses are alive: allocations by range, and words for addresses that are not. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure

_REMEMBERED_FREES = 1024


@dataclass(slots=True, eq=False)
class Allocation:
    """One live (or still pinned) range.

    Attributes:
        base, size_bytes: what the program sees.
        charged_bytes: what it costs the device, in whole pages.
        host: address of the mapping behind it.
        pins: running tasks that use it; the mapping goes when the last one ends.
        is_live: not freed.
    """

    base: int
    size_bytes: int
    charged_bytes: int
    host: int
    pins: int = 0
    is_live: bool = True

    @property
    def end(self) -> int:
        """First address behind the range."""
        return self.base + self.size_bytes


class AddressMap:
    """Live allocations by address, and the recent dead ones for better sentences."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bases: list[int] = []
        self._allocations: list[Allocation] = []
        self._freed: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED_FREES)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(list(self._allocations))

    def __len__(self) -> int:
        return len(self._allocations)

    def add(self, allocation: Allocation) -> None:
        """Enters a new range, which overlaps no other."""
        index = bisect_right(self._bases, allocation.base)
        self._bases.insert(index, allocation.base)
        self._allocations.insert(index, allocation)

    def remove(self, base: int) -> Allocation:
        """Takes out the allocation that starts at `base`.

        Raises:
            AclFailure: 107000 if none starts there; the sentence tells a double free apart.
        """
        index = bisect_right(self._bases, base) - 1
        if index < 0 or self._bases[index] != base:
            raise AclFailure(codes.RT_PARAM_INVALID, self._explain(base, 1, "free"))
        del self._bases[index]
        allocation = self._allocations.pop(index)
        self._freed.append((allocation.base, allocation.end))
        return allocation

    def covering(self, address: int) -> Allocation | None:
        """The live allocation that holds `address`."""
        index = bisect_right(self._bases, address) - 1
        if index < 0 or address >= self._allocations[index].end:
            return None
        return self._allocations[index]

    def knows(self, address: int) -> bool:
        """Whether `address` lies in a live or recently freed range."""
        return self.covering(address) is not None or self._was_freed(address)

    def _was_freed(self, address: int) -> bool:
        return any(base <= address < end for base, end in self._freed)

    def find(self, address: int, count_bytes: int, code: int) -> Allocation:
        """The live allocation that holds the whole range.

        Raises:
            AclFailure: `code`, if the range is not inside one live allocation.
        """
        found = self.covering(address)
        if found is None or address + count_bytes > found.end:
            raise AclFailure(code, self._explain(address, count_bytes, "use"))
        return found

    def _explain(self, address: int, count_bytes: int, verb: str) -> str:
        """Why a range is not usable, in words."""
        found = self.covering(address)
        if found is not None and verb == "use":
            over = address + count_bytes - found.end
            return f"{count_bytes} bytes at {address:#x} run {over} bytes past their allocation"
        if found is not None:
            return f"free of {address:#x}, which is inside an allocation, not its start"
        if self._was_freed(address):
            kind = "double free of" if verb == "free" else "use after free of"
            return f"{kind} {self._what} address {address:#x}"
        return f"{verb} of {self._what} address {address:#x}, which was never allocated"
