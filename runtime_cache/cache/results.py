"""What the cache tells its callers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from runtime_cache.ids import BlockId, PrefixId


class Match(NamedTuple):
    """The longest cached prefix of a prompt.

    Attributes:
        num_tokens: its length.
        blocks: where it is, first block first.
    """

    num_tokens: int
    blocks: tuple[BlockId, ...]


class Evicted(NamedTuple):
    """What an operator's eviction did [blocks]: gone, and kept because someone holds them."""

    num_evicted: int
    num_in_use: int


class Registration(NamedTuple):
    """A registered prefix.

    Attributes:
        num_tokens: tokens that are kept: those in its full blocks.
        blocks: the held blocks, first block first; none if it is shorter than a block.
        created_s: when it was registered, on the clock of the engine's events.
    """

    prefix_id: PrefixId
    num_tokens: int
    blocks: tuple[BlockId, ...]
    created_s: float


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One cached prefix: a chain that nothing continues, or one that is registered.

    Attributes:
        digest: chain digest of its last block (hexadecimal).
        num_requests: live requests that hold its last block.
        num_hits: admissions that reused it or a beginning of it.
        created_s: when its last block was committed, on the clock of the engine's events.
        last_used_s: when it was last reused, or committed.
        prefix_ids: the registrations that end here.
    """

    digest: str
    num_tokens: int
    num_blocks: int
    num_requests: int
    num_hits: int
    created_s: float
    last_used_s: float
    prefix_ids: tuple[PrefixId, ...]


@dataclass(slots=True)
class CacheCounters:
    """What happened so far. A request counts once, however often it is preempted.

    Attributes:
        queried_tokens: prompt tokens of the admitted requests.
        hit_tokens: those of them that were cached.
        inserted_blocks: blocks that entered the index.
        evicted_blocks: blocks that left it.
        duplicate_blocks: blocks computed twice, the second copy given up for the first.
        dropped_blocks: blocks that did not enter it, because their step failed or gave bad logits.
        collisions: blocks kept out of the index because another block has their digest.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    inserted_blocks: int = 0
    evicted_blocks: int = 0
    duplicate_blocks: int = 0
    dropped_blocks: int = 0
    collisions: int = 0
