"""Evicts in parts, so that however much goes, the event loop serves others in between."""

from __future__ import annotations

from typing import Protocol

import structlog

from ipc import messages as wire
from runtime_cache.cache.results import Evicted
from runtime_cache.ids import TenantName

log = structlog.get_logger(__name__)

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
        used_until_s: float | None = None,
        created_until_s: float | None = None,
        is_dry_run: bool = False,
    ) -> Evicted: ...


class EvictFacts(Protocol):
    """What the daemon can tell of what may go."""

    @property
    def bytes_per_block(self) -> int: ...
    def num_evictable(self, tenant: TenantName | None) -> int: ...


class Eviction:
    """One question `evict`.

    It ends however many blocks become evictable meanwhile: no more go than could at its start, and
    how old they are is reckoned from then. A prefix named by its digest goes at once, and a dry run
    looks at everything at once.
    """

    def __init__(
        self,
        engine: EvictEngine,
        facts: EvictFacts,
        message: wire.Evict,
        tenant: TenantName | None,
        now_s: float,
    ) -> None:
        """Args:
        tenant: whose; None for every tenant's.
        now_s: by the engine's clock.
        """
        self._engine = engine
        self._message = message
        self._tenant = tenant
        self._facts = facts
        self._used_until_s = None if message.idle_s is None else now_s - message.idle_s
        self._created_until_s = None if message.age_s is None else now_s - message.age_s
        self._max_blocks = self._asked_blocks()
        self._num_left: int | None = None  # until the first part has gone
        self._num_evicted = 0

    def next_part(self) -> wire.Evicted | None:
        """Evict some more; the reply if that was the last part.

        Raises:
            UnknownEntry, InvalidRequest: of a digest; nothing has changed.
        """
        is_whole = self._message.digest is not None or self._message.dry_run
        most = self._max_blocks if self._num_left is None else self._num_left
        num_asked = most if is_whole else min(_PART_BLOCKS, _PART_BLOCKS if most is None else most)
        evicted = self._engine.evict(
            self._tenant,
            max_blocks=num_asked,
            digest=self._message.digest,
            used_until_s=self._used_until_s,
            created_until_s=self._created_until_s,
            is_dry_run=self._message.dry_run,
        )
        self._num_evicted += evicted.num_evicted
        self._num_left = self._still_to_go(evicted.num_evicted)
        is_last = is_whole or self._num_left <= 0 or evicted.num_evicted < _PART_BLOCKS
        return self._reply(evicted) if is_last else None

    def _still_to_go(self, num_evicted: int) -> int:
        """How many may go after a part.

        What can go is looked at behind the first one, when leases that are over have been given up.
        """
        if self._num_left is not None:
            return self._num_left - num_evicted
        num_evictable = self._facts.num_evictable(self._tenant)
        if self._max_blocks is None:
            return num_evictable
        return min(num_evictable, self._max_blocks - num_evicted)

    def _asked_blocks(self) -> int | None:
        """The number that the message names; None if it names none."""
        message, bytes_per_block = self._message, self._facts.bytes_per_block
        if message.max_bytes is not None:
            return message.max_bytes // bytes_per_block
        if message.min_bytes is not None:
            return -(-message.min_bytes // bytes_per_block)
        return message.max_blocks

    def _reply(self, last: Evicted) -> wire.Evicted:
        if not self._message.dry_run:
            log.info(
                "evicted",
                tenant=self._message.tenant,
                blocks=self._num_evicted,
                in_use_blocks=last.num_in_use,
                kept_blocks=last.num_kept,
            )
        return wire.Evicted(
            id=self._message.id,
            num_blocks=self._num_evicted,
            num_bytes=self._num_evicted * self._facts.bytes_per_block,
            in_use_blocks=last.num_in_use,
            kept_blocks=last.num_kept,
            dry_run=self._message.dry_run,
        )
