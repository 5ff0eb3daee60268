"""How old cached blocks become, and how long they lie unused. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.histogram import AGE_SECONDS, Histogram


def _ages() -> Histogram:
    return Histogram(AGE_SECONDS)


@dataclass(slots=True)
class BlockAges:
    """What was seen so far [seconds].

    Attributes:
        lifetime: of evicted blocks, from the commit to the eviction.
        idle: of evicted blocks, from the last use to the eviction.
        reuse_gap: of prefixes that a request found, from the use before.
    """

    lifetime: Histogram = field(default_factory=_ages)
    idle: Histogram = field(default_factory=_ages)
    reuse_gap: Histogram = field(default_factory=_ages)

    def note_eviction(self, node: PrefixNode, now_s: float) -> None:
        """A block is evicted."""
        self.lifetime.observe(now_s - node.created_s)
        self.idle.observe(now_s - node.last_used_s)

    def copy(self) -> BlockAges:
        """The ages seen until now."""
        return BlockAges(self.lifetime.copy(), self.idle.copy(), self.reuse_gap.copy())
