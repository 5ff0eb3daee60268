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
        page_bytes: size of its pages.
        pins: running tasks that use it; the mapping goes when the last one ends.
        is_live: not freed.
    """

    base: int
    size_bytes: int
    charged_bytes: int
    host: int
    page_bytes: int = 4096
    pins: int = 0
    is_live: bool = True

    @property
    def end(self) -> int:
        """First address behind the range."""
        return self.base + self.size_bytes


class AddressMap:
    """Live allocations by address, and the recent dead ones for better sentences.

    Look-ups need no lock: a change puts a new pair of sorted lists in place of the old one. Changes
    themselves must be serialised by the caller.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._sorted: tuple[list[int], list[Allocation]] = ([], [])
        self._freed: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED_FREES)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._sorted[1])

    def __len__(self) -> int:
        return len(self._sorted[1])

    def add(self, allocation: Allocation) -> None:
        """Enters a new range, which overlaps no other."""
        bases, allocations = self._sorted
        at = bisect_right(bases, allocation.base)
        self._sorted = (
            [*bases[:at], allocation.base, *bases[at:]],
            [*allocations[:at], allocation, *allocations[at:]],
        )

    def remove(self, base: int) -> Allocation:
        """Takes out the allocation that starts at `base`.

        Raises:
            AclFailure: 107000 if none starts there; the sentence tells a double free apart.
        """
        bases, allocations = self._sorted
        at = bisect_right(bases, base) - 1
        if at < 0 or bases[at] != base:
            raise AclFailure(codes.RT_PARAM_INVALID, self._explain(base, 1, "free"))
        allocation = allocations[at]
        self._sorted = (
            [*bases[:at], *bases[at + 1 :]],
            [*allocations[:at], *allocations[at + 1 :]],
        )
        self._freed.append((allocation.base, allocation.end))
        return allocation

    def covering(self, address: int) -> Allocation | None:
        """The live allocation that holds `address`."""
        bases, allocations = self._sorted
        at = bisect_right(bases, address) - 1
        if at < 0:
            return None
        allocation = allocations[at]
        return allocation if address < allocation.base + allocation.size_bytes else None

    def check_if_known(self, address: int, count_bytes: int, code: int) -> None:
        """As `find`, but passes addresses that were never allocated here.

        Raises:
            AclFailure: `code`, for a range that leaves its allocation or was freed.
        """
        found = self.covering(address)
        if found is not None and address + count_bytes <= found.end:
            return
        if found is not None or self.was_freed(address):
            raise AclFailure(code, self._explain(address, count_bytes, "use"))

    def was_freed(self, address: int) -> bool:
        """Whether it lies in one of the 1024 ranges freed last."""
        return any(base <= address < end for base, end in list(self._freed))

    def find(self, address: int, count_bytes: int, code: int) -> Allocation:
        """The live allocation that holds the whole range.

        Raises:
            AclFailure: `code`, if the range is not inside one live allocation.
        """
        # As `covering`, written out: every queued copy comes here twice.
        bases, allocations = self._sorted
        at = bisect_right(bases, address) - 1
        if at >= 0:
            found = allocations[at]
            end = found.base + found.size_bytes
            if address < end and address + count_bytes <= end:
                return found
        raise AclFailure(code, self._explain(address, count_bytes, "use"))

    def _explain(self, address: int, count_bytes: int, verb: str) -> str:
        """Why a range is not usable, in words."""
        found = self.covering(address)
        if found is not None and verb == "use":
            over = address + count_bytes - found.end
            return f"{count_bytes} bytes at {address:#x} run {over} bytes past their allocation"
        if found is not None:
            return f"free of {address:#x}, which is inside an allocation, not its start"
        if self.was_freed(address):
            kind = "double free of" if verb == "free" else "use after free of"
            return f"{kind} {self._what} address {address:#x}"
        return f"{verb} of {self._what} address {address:#x}, which was never allocated"
