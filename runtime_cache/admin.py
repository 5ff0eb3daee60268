"""What operators ask: list, show, evict, pin, unpin, stats, drain, resume.

Evicting takes several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import structlog

from ipc import messages as wire
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.cache.results import Keep, KeepKind, ShownEntry
from runtime_cache.errors import InvalidRequest
from runtime_cache.evicting import EvictEngine, EvictFacts, Eviction
from runtime_cache.ids import PrefixId, TenantName

log = structlog.get_logger(__name__)

Question = (
    wire.ListEntries | wire.Show | wire.Pin | wire.Unpin | wire.GetStats | wire.Drain | wire.Resume
)

_KEPT: dict[str, frozenset[KeepKind]] = {
    "none": frozenset(),
    "any": frozenset(("registration", "pin", "lease")),
    "registered": frozenset(("registration",)),
    "pinned": frozenset(("pin",)),
    "leased": frozenset(("lease",)),
}


class AdminEngine(EvictEngine, Protocol):
    """What an operator's question needs of `engine.loop.EngineLoop`."""

    def show(
        self, tenant: TenantName, digest: str | None, prefix_id: PrefixId | None
    ) -> ShownEntry: ...
    def pin(self, tenant: TenantName, digest: str, ttl_s: float | None) -> Keep: ...
    def unpin(self, tenant: TenantName, digest: str) -> Keep: ...
    def start_drain(self) -> int: ...
    def end_drain(self) -> None: ...


class AdminFacts(EvictFacts, Protocol):
    """What the daemon can tell operators of its cache."""

    def stats(self) -> dict[str, Any]: ...
    def entries(
        self, query: EntryQuery, tenant: TenantName | None
    ) -> tuple[tuple[wire.Entry, ...], int]: ...
    def shown(
        self, message_id: wire.MessageId, tenant: TenantName, shown: ShownEntry, *, with_text: bool
    ) -> wire.Shown: ...


class AdminDesk:
    """Answers the operators' questions."""

    def __init__(
        self,
        engine: AdminEngine,
        facts: AdminFacts,
        tenants: Collection[TenantName],
        clock: Callable[[], float],
    ) -> None:
        """Args:
        tenants: all there are, the default tenant included.
        clock: the engine's clock.
        """
        self._engine = engine
        self._facts = facts
        self._tenants = tenants
        self._clock = clock

    def answer(self, message: Question) -> wire.AnyReply:
        """The reply.

        Raises:
            InvalidRequest: there is no such tenant, or several prefixes of such a digest.
            UnknownEntry, UnknownPrefix: there is no prefix of this digest or name.
            CapacityError: no more can be kept. In each case nothing has changed.
        """
        match message:
            case wire.ListEntries():
                return self._list(message)
            case wire.Show():
                return self._show(message)
            case wire.Pin():
                return self._pin(message)
            case wire.Unpin():
                keep = self._engine.unpin(self.tenant(message.tenant), message.digest)
                log.info("unpinned", tenant=message.tenant, digest=keep.digest)
                return wire.Unpinned(id=message.id, digest=keep.digest)
            case wire.GetStats():
                return wire.Stats(id=message.id, stats=self._facts.stats())
            case wire.Drain():
                num_unfinished = self._engine.start_drain()
                log.info("drain_started", unfinished=num_unfinished)
                return wire.Draining(id=message.id, num_unfinished=num_unfinished)
            case wire.Resume():
                self._engine.end_drain()
                log.info("drain_ended")
                return wire.Resumed(id=message.id)

    def eviction(self, message: wire.Evict) -> Eviction:
        """What is to be evicted, in parts.

        Raises:
            InvalidRequest: there is no such tenant.
        """
        tenant = self.one_or_all(message.tenant)
        return Eviction(self._engine, self._facts, message, tenant, self._clock())

    def tenant(self, name: str) -> TenantName:
        """The tenant that an operator names.

        Raises:
            InvalidRequest: there is none of this name.
        """
        if TenantName(name) not in self._tenants:
            raise InvalidRequest(f"`tenant`: no tenant {name!r} is configured")
        return TenantName(name)

    def one_or_all(self, name: str | None) -> TenantName | None:
        """The same where None stands for every tenant."""
        return None if name is None else self.tenant(name)

    def _list(self, message: wire.ListEntries) -> wire.Listed:
        tenant = self.one_or_all(message.tenant)
        entries, total = self._facts.entries(self._query(message), tenant)
        return wire.Listed(id=message.id, entries=entries, total=total)

    def _query(self, message: wire.ListEntries) -> EntryQuery:
        now_s, min_bytes = self._clock(), message.min_bytes or 0
        return EntryQuery(
            limit=message.limit,
            offset=message.offset,
            sort=message.sort,
            is_reversed=message.reverse,
            created_until_s=None if message.min_age_s is None else now_s - message.min_age_s,
            used_until_s=None if message.min_idle_s is None else now_s - message.min_idle_s,
            min_blocks=-(-min_bytes // self._facts.bytes_per_block),
            min_hits=message.min_hits or 0,
            max_hits=message.max_hits,
            kept=None if message.kept is None else _KEPT[message.kept],
        )

    def _show(self, message: wire.Show) -> wire.Shown:
        tenant = self.tenant(message.tenant)
        prefix_id = None if message.prefix_id is None else PrefixId(message.prefix_id)
        shown = self._engine.show(tenant, message.digest, prefix_id)
        return self._facts.shown(message.id, tenant, shown, with_text=message.with_text)

    def _pin(self, message: wire.Pin) -> wire.Pinned:
        keep = self._engine.pin(self.tenant(message.tenant), message.digest, message.ttl_s)
        left_s = None if keep.expires_s is None else keep.expires_s - self._clock()
        for_s = None if left_s is None else message.ttl_s
        log.info("pinned", tenant=message.tenant, digest=keep.digest, for_s=for_s)
        return wire.Pinned(
            id=message.id,
            digest=keep.digest,
            num_tokens=keep.num_tokens,
            num_blocks=len(keep.blocks),
            num_bytes=len(keep.blocks) * self._facts.bytes_per_block,
            expires_in_s=None if left_s is None else round(max(0.0, left_s), 3),
        )
