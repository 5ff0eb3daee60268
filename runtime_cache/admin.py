"""What operators ask of the cache: list, evict, pin, unpin, stats. Evicting takes several parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from ipc import messages as wire
from runtime_cache.cache.results import Keep
from runtime_cache.errors import InvalidRequest
from runtime_cache.evicting import EvictEngine, EvictFacts, Eviction
from runtime_cache.ids import TenantName

Question = wire.ListEntries | wire.Pin | wire.Unpin | wire.GetStats


class AdminEngine(EvictEngine, Protocol):
    """What an operator's question needs of `engine.loop.EngineLoop`."""

    def pin(self, tenant: TenantName, digest: str, ttl_s: float | None) -> Keep: ...
    def unpin(self, tenant: TenantName, digest: str) -> Keep: ...


class AdminFacts(EvictFacts, Protocol):
    """What the daemon can tell operators of its cache."""

    def stats(self) -> dict[str, Any]: ...
    def entries(
        self, *, limit: int, offset: int, tenant: TenantName | None
    ) -> tuple[tuple[wire.Entry, ...], int]: ...


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
            UnknownEntry: there is no prefix of this digest.
            CapacityError: no more can be kept. In each case nothing has changed.
        """
        match message:
            case wire.ListEntries():
                return self._list(message)
            case wire.Pin():
                return self._pin(message)
            case wire.Unpin():
                keep = self._engine.unpin(self.tenant(message.tenant), message.digest)
                return wire.Unpinned(id=message.id, digest=keep.digest)
            case wire.GetStats():
                return wire.Stats(id=message.id, stats=self._facts.stats())

    def eviction(self, message: wire.Evict) -> Eviction:
        """What is to be evicted, in parts.

        Raises:
            InvalidRequest: there is no such tenant.
        """
        return Eviction(self._engine, self._facts, message, self.one_or_all(message.tenant))

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
        entries, total = self._facts.entries(
            limit=message.limit, offset=message.offset, tenant=tenant
        )
        return wire.Listed(id=message.id, entries=entries, total=total)

    def _pin(self, message: wire.Pin) -> wire.Pinned:
        keep = self._engine.pin(self.tenant(message.tenant), message.digest, message.ttl_s)
        left_s = None if keep.expires_s is None else keep.expires_s - self._clock()
        return wire.Pinned(
            id=message.id,
            digest=keep.digest,
            num_tokens=keep.num_tokens,
            num_blocks=len(keep.blocks),
            num_bytes=len(keep.blocks) * self._facts.bytes_per_block,
            expires_in_s=None if left_s is None else round(left_s, 3),
        )
