"""Who asked for which prefixes to stay: registrations, pins, leases. Pure.

This is the book only; the holds on the blocks are the manager's.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime_cache.cache.results import Keep, KeepKind
from runtime_cache.ids import BlockId


class Keeps:
    """Registrations by prefix id, pins and leases by digest.

    Attributes:
        max_blocks: blocks they may hold together, and how many of them there may be.
        next_expiry_s: when the next lease ends; None if there is none.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.next_expiry_s: float | None = None
        self._registrations: dict[str, Keep] = {}
        self._pins: dict[str, Keep] = {}

    def __len__(self) -> int:
        return len(self._registrations) + len(self._pins)

    def __iter__(self) -> Iterator[Keep]:
        yield from self._registrations.values()
        yield from self._pins.values()

    @property
    def num_registrations(self) -> int:
        """Registered prefixes."""
        return len(self._registrations)

    @property
    def num_blocks(self) -> int:
        """Blocks they hold; a shared one counts once."""
        return len(self._blocks())

    def has_room(self, keep: Keep) -> bool:
        """Whether `keep`, in place of an earlier one of its name, stays within the limits."""
        earlier = self.get(keep.kind, keep.name)
        num_keeps = len(self) + (earlier is None)
        return max(num_keeps, len(self._blocks(earlier) | set(keep.blocks))) <= self.max_blocks

    def get(self, kind: KeepKind, name: str) -> Keep | None:
        """The keep of this name; a pin and a lease on one digest are the same."""
        return self._book(kind).get(name)

    def add(self, keep: Keep) -> Keep | None:
        """Note a keep; returns the one it takes the place of."""
        earlier = self.pop(keep.kind, keep.name)
        self._book(keep.kind)[keep.name] = keep
        self._note_expiries()
        return earlier

    def pop(self, kind: KeepKind, name: str) -> Keep | None:
        """Strike a keep off."""
        keep = self._book(kind).pop(name, None)
        self._note_expiries()
        return keep

    def expired(self, now_s: float) -> list[Keep]:
        """The leases whose time is over."""
        if self.next_expiry_s is None or now_s < self.next_expiry_s:
            return []
        return [k for k in self if k.expires_s is not None and k.expires_s <= now_s]

    def _book(self, kind: KeepKind) -> dict[str, Keep]:
        return self._registrations if kind == "registration" else self._pins

    def _blocks(self, besides: Keep | None = None) -> set[BlockId]:
        return set().union(*(keep.blocks for keep in self if keep is not besides))

    def _note_expiries(self) -> None:
        expiries = (k.expires_s for k in self._pins.values() if k.expires_s is not None)
        self.next_expiry_s = min(expiries, default=None)
