"""The calls of the blocking client that are one request and one reply.

What is marked "Admin" is answered on the administrators' socket only. Each raises what
`ipc.sync_client.Client` says, at the latest when nothing has come for `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ipc.arguments import Conversation, content_fields, explain_fields
from ipc.messages import (
    AnyRequest,
    Cancel,
    Evict,
    Evicted,
    Explain,
    Explained,
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
    Reply,
    Stats,
    Tokenize,
    Tokenized,
    Unpin,
    Unpinned,
    Verified,
    Verify,
)

R = TypeVar("R", bound=Reply)


class Calls:
    """What a client can ask besides answers; `Client` knows how."""

    def _ask(
        self,
        kind: type[AnyRequest],
        fields: Mapping[str, Any],
        expected: type[R],
        timeout_s: float | None = None,
    ) -> R:
        """One request, one reply."""
        raise NotImplementedError

    def cancel(self, target: str, *, timeout_s: float | None = None) -> None:
        """End one of this client's requests; returns when the daemon has done so."""
        self._ask(Cancel, {"target": target}, Ok, timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> Pong:
        """Is the daemon alive?"""
        return self._ask(Ping, {}, Pong, timeout_s)

    def info(self, *, timeout_s: float | None = None) -> Info:
        """What is served?"""
        return self._ask(GetInfo, {}, Info, timeout_s)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Conversation | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or of a conversation."""
        fields = content_fields(text=text, messages=messages)
        return self._ask(Tokenize, fields, Tokenized, timeout_s).token_ids

    def register(
        self,
        text: str | None = None,
        *,
        prompt_ids: Iterable[int] | None = None,
        messages: Conversation | None = None,
        timeout_s: float | None = None,
    ) -> Registered:
        """Compute a prefix once and keep it until `release`."""
        fields = content_fields(text=text, prompt_ids=prompt_ids, messages=messages)
        return self._ask(Register, fields, Registered, timeout_s)

    def release(self, prefix_id: str, *, timeout_s: float | None = None) -> Released:
        """Give up a registered prefix."""
        return self._ask(Release, {"prefix_id": prefix_id}, Released, timeout_s)

    def list(
        self,
        limit: int = 100,
        *,
        offset: int = 0,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Listed:
        """Admin: what the cache holds, from the entry number `offset` on, of one tenant or all."""
        fields = {"limit": limit, "offset": offset, "tenant": tenant}
        return self._ask(ListEntries, fields, Listed, timeout_s)

    def evict(
        self,
        *,
        max_blocks: int | None = None,
        all: bool = False,
        digest: str | None = None,
        idle_s: float | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Evicted:
        """Admin: drop what nobody holds: some blocks, all, one prefix, or what is not used."""
        what = {"max_blocks": max_blocks, "all": all, "digest": digest, "idle_s": idle_s}
        return self._ask(Evict, what | {"tenant": tenant}, Evicted, timeout_s)

    def pin(
        self,
        digest: str,
        ttl_s: float | None = None,
        *,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Pinned:
        """Admin: keep a cached prefix, until `unpin` or for `ttl_s` seconds."""
        fields = {"digest": digest, "ttl_s": ttl_s, "tenant": tenant}
        return self._ask(Pin, fields, Pinned, timeout_s)

    def unpin(self, digest: str, *, tenant: str = "", timeout_s: float | None = None) -> Unpinned:
        """Admin: give up a pin or a lease."""
        return self._ask(Unpin, {"digest": digest, "tenant": tenant}, Unpinned, timeout_s)

    def explain(
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
        return self._ask(Explain, fields, Explained, timeout_s)

    def verify(
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
        return self._ask(Verify, fields, Verified, timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Admin: counters and gauges."""
        return self._ask(GetStats, {}, Stats, timeout_s).stats
