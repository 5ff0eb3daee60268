"""What the cache tells its callers. Pure data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.ids import BlockId

CacheReason = Literal[
    "hit", "cold", "evicted", "diverged", "extended", "too_short", "limit", "disabled"
]
KeepKind = Literal["registration", "pin", "lease"]


class Match(NamedTuple):
    """The longest cached beginning of a prompt.

    Attributes:
        num_tokens: how many tokens can be reused.
        nodes: the whole blocks to share, first block first.
        source: the block whose first rows are to be copied behind them; None if none are.
        num_common: how many tokens some entry has in common with the prompt; more than
            `num_tokens` where a limit or the grid cuts the reuse short.
        closest: the entry's block in which the two differ; None if no block shares a token there.
    """

    num_tokens: int = 0
    nodes: tuple[PrefixNode, ...] = ()
    source: PrefixNode | None = None
    num_common: int = 0
    closest: PrefixNode | None = None


class MatchHint:
    """What a waiting request remembers of its last match, so that the next one is cheap."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes: list[PrefixNode] = []


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache did for one prompt, and why not more.

    Attributes:
        cached_tokens: tokens whose KV is reused.
        reason: `hit`: all that can be reused was. `cold`: nothing cached begins like the prompt.
            `evicted`: what comes next was there, and has been evicted. `diverged`: the nearest
            entry goes on differently. `extended`: the nearest entry ends where the prompt goes on.
            `too_short`: no row of it can be reused. `limit`: the prompt goes on behind
            `max_prefix_length`. `disabled`: see `detail`.
        diverged_at: tokens in common with the nearest entry; None where there is none.
        nearest_tokens: length of that entry.
        detail: for `disabled`, because of what; else empty.
    """

    cached_tokens: int
    reason: CacheReason
    diverged_at: int | None = None
    nearest_tokens: int | None = None
    detail: str = ""


class Evicted(NamedTuple):
    """What an operator's eviction did, or would do [blocks].

    Attributes:
        num_evicted: gone.
        num_in_use: still there because live requests hold them.
        num_kept: still there because of registrations, pins and leases alone.
    """

    num_evicted: int
    num_in_use: int
    num_kept: int


class Keep(NamedTuple):
    """A prefix that stays until it is given up: a registration, an operator's pin, or a lease.

    Attributes:
        name: the registration's prefix id, or the digest of a pin or lease.
        digest: chain digest of its last block (hexadecimal).
        num_tokens: tokens that are kept.
        blocks: the held blocks, first block first.
        created_s: since when, on the clock of the engine's events.
        expires_s: when a lease ends; None for the others.
    """

    name: str
    kind: KeepKind
    digest: str
    num_tokens: int
    blocks: tuple[BlockId, ...]
    created_s: float
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One cached prefix: a registration, pin or lease, or what nothing continues or keeps.

    Attributes:
        digest: chain digest of its last block (hexadecimal).
        num_tokens: its tokens; of a kept one those that are kept, even if its last block has more.
        num_requests: live requests that hold its last block.
        num_hits: admissions that reused it or a beginning of it.
        created_s: when its last block was committed, on the clock of the engine's events.
        last_used_s: when it was last reused, or committed.
        priority: the highest of the requests that used it.
        keep: the registration, pin or lease; None if it may be evicted.
    """

    digest: str
    num_tokens: int
    num_blocks: int
    num_requests: int
    num_hits: int
    created_s: float
    last_used_s: float
    priority: int
    keep: Keep | None = None


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """One block of a cached prefix.

    Attributes:
        digest: of the prefix that ends with it (hexadecimal).
        num_tokens: in this block.
        num_hits, last_used_s: as of CacheEntry, of this block.
        num_requests: live requests that hold it.
        is_kept: whether a registration, pin or lease holds it.
    """

    digest: str
    num_tokens: int
    num_hits: int
    last_used_s: float
    num_requests: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class ShownEntry:
    """One cached prefix, block by block.

    Attributes:
        blocks: first block first.
        num_continued_by: cached blocks that directly follow its last one.
        tokens: its token ids, packed [4 bytes each]; all that its blocks have.
    """

    entry: CacheEntry
    blocks: tuple[BlockFacts, ...]
    num_continued_by: int
    tokens: bytes


@dataclass(slots=True)
class CacheCounters:
    """What happened so far. A request counts once, however often it is preempted.

    Attributes:
        queried_tokens: prompt tokens of the admitted requests that may use the cache.
        hit_tokens: those of them that were cached.
        copied_tokens: those of the hit tokens whose KV was copied into a block of the request.
        rounded_tokens: tokens that were cached and not reused because of the grid.
        inserted_blocks: blocks that entered the index.
        evicted_blocks: blocks that left it to make room, or because an operator wanted it.
        evicted_by: the same by reason: `need`, `watermark`, `max_cached_prefixes`, `operator`.
        evicted_unused_blocks: those of them that were never reused.
        evicted_idle_s: how long they had not been used, added up.
        superseded_blocks: partly filled blocks given up for one that goes on from them.
        duplicate_blocks: blocks computed twice, the second copy given up for the first.
        dropped_blocks: blocks given up because their step failed or gave bad logits.
        damaged_blocks: blocks given up because their KV, or that of a block before them, was read
            again and found damaged (see `verification`).
        collisions: blocks kept out of the index because another block has their digest.
        failed_lookups: lookups that ended in an error of our own, and were taken for misses.
        reuses: admissions with a hit.
        reuse_gap_s: how long the reused prefixes had not been used, added up.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    rounded_tokens: int = 0
    inserted_blocks: int = 0
    evicted_blocks: int = 0
    evicted_by: Counter[str] = field(default_factory=Counter)
    evicted_unused_blocks: int = 0
    evicted_idle_s: float = 0.0
    superseded_blocks: int = 0
    duplicate_blocks: int = 0
    dropped_blocks: int = 0
    damaged_blocks: int = 0
    collisions: int = 0
    failed_lookups: int = 0
    reuses: int = 0
    reuse_gap_s: float = 0.0

    def copy(self) -> CacheCounters:
        """The counters now."""
        return replace(self, evicted_by=self.evicted_by.copy())
