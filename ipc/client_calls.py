"""The calls of the async client that are one request and one reply.

What is marked "Admin" is answered on the administrators' socket only. Each raises what
`ipc.client.Client` says, at the latest when nothing has come for `timeout_s`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ipc.arguments import (
    Conversation,
    EvictChoice,
    ListFilters,
    content_fields,
    explain_fields,
)
from ipc.messages import (
    AnyRequest,
    Cancel,
    Configured,
    Drain,
    Draining,
    Evict,
    Evicted,
    Explain,
    Explained,
    GetConfig,
    GetInfo,
    GetStats,
    Info,
    Listed,
    ListEntries,
    Ok,
    Pin,
    Ping,
    Pinned,
    Pong,
    Register,
    Registered,
    Release,
    Released,
    Reload,
    Reloaded,
    Reply,
    Resume,
    Resumed,
    Show,
    Shown,
    Stats,
    Tokenize,
    Tokenized,
    Unpin,
    Unpinned,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

R = TypeVar("R", bound=Reply)


class Calls(ABC):
    """What a client can ask besides answers; `Client` knows how."""

    @abstractmethod
    async def _ask(
        self,
        kind: type[AnyRequest],
        fields: Mapping[str, Any],
        expected: type[R],
        timeout_s: float | None = None,
    ) -> R:
        """One request, one reply."""

    async def cancel(self, target: str, *, timeout_s: float | None = None) -> None:
        """End one of this client's requests; returns when the daemon has done so."""
        await self._ask(Cancel, {"target": target}, Ok, timeout_s)

    async def ping(self, *, timeout_s: float | None = None) -> Pong:
        """Is the daemon alive?"""
        return await self._ask(Ping, {}, Pong, timeout_s)

    async def info(self, *, timeout_s: float | None = None) -> Info:
        """What is served?"""
        return await self._ask(GetInfo, {}, Info, timeout_s)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Conversation | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or of a conversation."""
        fields = content_fields(text=text, messages=messages)
        return (await self._ask(Tokenize, fields, Tokenized, timeout_s)).token_ids

    async def register(
        self,
        text: str | None = None,
        *,
        prompt_ids: Iterable[int] | None = None,
        messages: Conversation | None = None,
        timeout_s: float | None = None,
    ) -> Registered:
        """Compute a prefix once and keep it until `release`."""
        fields = content_fields(text=text, prompt_ids=prompt_ids, messages=messages)
        return await self._ask(Register, fields, Registered, timeout_s)

    async def release(
        self, prefix_id: str, *, tenant: str | None = None, timeout_s: float | None = None
    ) -> Released:
        """Give up a registered prefix; admin: of a tenant."""
        fields = {"prefix_id": prefix_id, "tenant": tenant}
        return await self._ask(Release, fields, Released, timeout_s)

    async def list(
        self,
        limit: int = 100,
        *,
        offset: int = 0,
        tenant: str | None = None,
        timeout_s: float | None = None,
        **filters: Unpack[ListFilters],
    ) -> Listed:
        """Admin: what the cache holds, from the entry number `offset` on, of one tenant or all.

        Args:
            limit: entries at the most.
            offset: entries to skip.
            tenant: only those of this tenant.
            timeout_s: instead of the client's own.
            **filters: order and choice; see `messages.ListEntries`.
        """
        fields = {"limit": limit, "offset": offset, "tenant": tenant, **filters}
        return await self._ask(ListEntries, fields, Listed, timeout_s)

    async def show(
        self,
        digest: str | None = None,
        *,
        prefix_id: str | None = None,
        tenant: str = "",
        with_text: bool = False,
        timeout_s: float | None = None,
    ) -> Shown:
        """Admin: one cached prefix, block by block."""
        which = {"digest": digest, "prefix_id": prefix_id, "tenant": tenant}
        return await self._ask(Show, which | {"with_text": with_text}, Shown, timeout_s)

    async def evict(
        self,
        *,
        tenant: str | None = None,
        dry_run: bool = False,
        timeout_s: float | None = None,
        **what: Unpack[EvictChoice],
    ) -> Evicted:
        """Admin: drop what nobody holds.

        Args:
            tenant: only of this tenant.
            dry_run: only tell what would go.
            timeout_s: instead of the client's own.
            **what: exactly one field of `messages.Evict`.
        """
        fields = {**what, "tenant": tenant, "dry_run": dry_run}
        return await self._ask(Evict, fields, Evicted, timeout_s)

    async def pin(
        self,
        digest: str,
        ttl_s: float | None = None,
        *,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Pinned:
        """Admin: keep a cached prefix, until `unpin` or for `ttl_s` seconds."""
        fields = {"digest": digest, "ttl_s": ttl_s, "tenant": tenant}
        return await self._ask(Pin, fields, Pinned, timeout_s)

    async def unpin(
        self, digest: str, *, tenant: str = "", timeout_s: float | None = None
    ) -> Unpinned:
        """Admin: give up a pin or a lease."""
        return await self._ask(Unpin, {"digest": digest, "tenant": tenant}, Unpinned, timeout_s)

    async def explain(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: Iterable[int] | None = None,
        messages: Conversation | None = None,
        prefix_id: str | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Explained:
        """Admin: what the cache would do for a prompt, without running it."""
        fields = explain_fields(prompt, prompt_ids, messages, prefix_id, tenant)
        return await self._ask(Explain, fields, Explained, timeout_s)

    async def verify(
        self,
        digest: str | None = None,
        *,
        first_block: int = 0,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Verified:
        """Admin: read a part of the cached KV once more, and drop what has changed.

        To read all of it, ask again with the reply's `next_block` as `first_block`, until that is
        None.
        """
        fields = {"digest": digest, "first_block": first_block, "tenant": tenant}
        return await self._ask(Verify, fields, Verified, timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Admin: counters and gauges."""
        return (await self._ask(GetStats, {}, Stats, timeout_s)).stats

    async def drain(self, *, timeout_s: float | None = None) -> Draining:
        """Admin: take no new work until `resume`; the daemon stays up."""
        return await self._ask(Drain, {}, Draining, timeout_s)

    async def resume(self, *, timeout_s: float | None = None) -> Resumed:
        """Admin: take new work again."""
        return await self._ask(Resume, {}, Resumed, timeout_s)

    async def reload(self, *, timeout_s: float | None = None) -> Reloaded:
        """Admin: read configuration and keys again."""
        return await self._ask(Reload, {}, Reloaded, timeout_s)

    async def config(self, *, timeout_s: float | None = None) -> Configured:
        """Admin: the options in force, and where each came from."""
        return await self._ask(GetConfig, {}, Configured, timeout_s)
