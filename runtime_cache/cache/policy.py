"""What the operator decides about the cache. Pure data; `docs/cache.md` has it in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Which cached block goes first when room is needed; see `eviction`.
EvictionPolicy = Literal["lru", "slru"]

#: How long what a request leaves in the cache is worth keeping, unless the request says otherwise.
DEFAULT_PRIORITY = 50
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """The settings of one cache.

    Attributes:
        is_enabled: if False nothing is ever indexed, so every prompt is computed whole.
        is_auto: every request leaves its prefix in the cache; if False only registrations do.
        eviction: order of eviction.
        low_watermark_blocks: when fewer blocks are free, cached ones are evicted ...
        high_watermark_blocks: ... until so many are free, or nothing is left to evict.
        max_prefix_tokens: tokens of a prompt behind this position are neither kept nor looked for;
            None for no limit.
        max_leaves: cached prefixes that no other continues; more are evicted as far as nobody
            holds them. None for no limit.
        max_kept_blocks: blocks that registrations, pins and leases may hold together, and how many
            of them there may be; None for half of the cache, so that requests always find room.
        grid_tokens: prefixes are kept and reused in multiples of this.
    """

    is_enabled: bool = True
    is_auto: bool = True
    eviction: EvictionPolicy = "lru"
    low_watermark_blocks: int = 0
    high_watermark_blocks: int = 0
    max_prefix_tokens: int | None = None
    max_leaves: int | None = None
    max_kept_blocks: int | None = None
    grid_tokens: int = 1

    def cacheable(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a prefix may be kept or reused."""
        return self.on_grid(self.within_limit(num_tokens))

    def within_limit(self, num_tokens: int) -> int:
        """The same, the grid aside."""
        if self.max_prefix_tokens is None:
            return num_tokens
        return min(num_tokens, self.max_prefix_tokens)

    def on_grid(self, num_tokens: int) -> int:
        """Round down to the grid."""
        return num_tokens - num_tokens % self.grid_tokens
