"""Handles: what pyACL gives out as plain ints, checked on every use."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

from runtime_cache.aclsim.failure import AclFailure

T = TypeVar("T")

_kinds = itertools.count(1)
_SPACING = 16
_KIND_BITS = 40


class HandleTable(Generic[T]):
    """Live objects of one kind by handle. Handles are never reused, and never of another kind.

    Args:
        what: the kind in words, singular.
        code: what a wrong handle gives.
    """

    def __init__(self, what: str, code: int) -> None:
        self.what = what
        self._code = code
        self._numbers = itertools.count((next(_kinds) << _KIND_BITS) + _SPACING, _SPACING)
        self._live: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._live)

    def objects(self) -> list[T]:
        """The live objects, oldest first."""
        return list(self._live.values())

    def add(self, item: T) -> int:
        """Enters an object and returns its handle."""
        handle = next(self._numbers)
        self._live[handle] = item
        return handle

    def get(self, handle: int) -> T:
        """The object behind a handle.

        Raises:
            AclFailure: the table's code, if the handle is 0, destroyed or of another kind.
        """
        item = self._live.get(handle)
        if item is None:
            raise self._absent(handle)
        return item

    def _absent(self, handle: int) -> AclFailure:
        return AclFailure(self._code, f"{handle:#x} is no live {self.what}")

    def ordinal(self, handle: int) -> int:
        """Which entry of the table a handle was, from 0; errors as `get`."""
        self.get(handle)
        return (handle & ((1 << _KIND_BITS) - 1)) // _SPACING - 1

    def remove(self, handle: int) -> T:
        """Takes the object out; errors as `get`."""
        item = self._live.pop(handle, None)
        if item is None:
            raise self._absent(handle)
        return item

    def discard(self, handle: int) -> None:
        """Takes the object out if it is still there."""
        self._live.pop(handle, None)
