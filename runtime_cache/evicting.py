"""Evicts in parts, so that however much goes, the event loop serves others in between."""

from __future__ import annotations

from typing import Protocol

from ipc import messages as wire
from runtime_cache.engine.commands import ReportEvicted
from runtime_cache.ids import TenantName

#: How many blocks go at once: some tens of milliseconds.
_PART_BLOCKS = 4096


class EvictEngine(Protocol):
    """What evicting needs of `engine.loop.EngineLoop`."""

    def evict(
        self,
        tenant: TenantName | None,
        *,
        max_blocks: int | None = None,
        digest: str | None = None,
        idle_s: float | None = None,
    ) -> ReportEvicted: ...


class EvictFacts(Protocol):
    """What the daemon can tell of what may go."""

    @property
    def bytes_per_block(self) -> int: ...
    def num_evictable(self, tenant: TenantName | None) -> int: ...


class Eviction:
    """One question `evict`.

    It ends however many blocks become evictable meanwhile: no more go than could at its start.
    A prefix named by its digest goes at once.
    """

    def __init__(
        self,
        engine: EvictEngine,
        facts: EvictFacts,
        message: wire.Evict,
        tenant: TenantName | None,
    ) -> None:
        """Args:
        tenant: whose; None for every tenant's.
        """
        self._engine = engine
        self._message = message
        self._tenant = tenant
        self._facts = facts
        self._num_left: int | None = message.max_blocks  # None until the first part has gone
        self._num_evicted = 0

    def next_part(self) -> wire.Evicted | None:
        """Evict some more; the reply if that was the last part.

        Raises:
            UnknownEntry, InvalidRequest: of a digest; nothing has changed.
        """
        message = self._message
        if message.digest is not None:
            report = self._engine.evict(self._tenant, digest=message.digest)
            return self._reply(report.num_evicted, report.num_in_use)
        is_first = self._num_evicted == 0
        num_asked = _PART_BLOCKS if self._num_left is None else min(self._num_left, _PART_BLOCKS)
        report = self._engine.evict(self._tenant, max_blocks=num_asked, idle_s=message.idle_s)
        self._num_evicted += report.num_evicted
        num_left = self._facts.num_evictable(self._tenant) if is_first else self._num_left or 0
        if self._num_left is not None:
            num_left = min(num_left, self._num_left - report.num_evicted)
        self._num_left = num_left
        is_last = num_left <= 0 or report.num_evicted < num_asked
        return self._reply(self._num_evicted, report.num_in_use) if is_last else None

    def _reply(self, num_evicted: int, num_in_use: int) -> wire.Evicted:
        return wire.Evicted(
            id=self._message.id,
            num_blocks=num_evicted,
            num_bytes=num_evicted * self._facts.bytes_per_block,
            in_use_blocks=num_in_use,
        )
