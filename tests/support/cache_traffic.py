"""What random traffic of a cache is made of: settings, prompts, requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import HashChain
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import MatchHint
from runtime_cache.ids import PrefixId

#: One setting besides the order of eviction and the watermarks.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"max_prefix_tokens": 7},
    {"max_prefix_tokens": 13},
    {"max_leaves": 1},
    {"max_leaves": 3},
    {"max_kept_blocks": 3},
    {"max_kept_blocks": 30},
    {"grid_tokens": 3},
    {"grid_tokens": 6},
    {"grid_tokens": 4, "max_prefix_tokens": 14},
    {"is_auto": False},
)
policies = st.builds(
    lambda eviction, low, extra, setting: CachePolicy(
        eviction=eviction, low_watermark_blocks=low, high_watermark_blocks=low + extra, **setting
    ),
    st.sampled_from(["lru", "slru"]),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(SETTINGS),
)
#: Prompts begin with one of these, so that they share beginnings of every length.
STEMS = ([0] * 22, [0] * 6 + [1] * 16, [0, 0, 0, 1] * 5, [1] * 22)
prompts = st.builds(
    lambda stem, num_shared, tail: stem[:num_shared] + tail,
    st.sampled_from(STEMS),
    st.sampled_from(range(20)),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


@dataclass(eq=False, repr=False)
class Request:
    """One request, admitted or waiting."""

    tokens: list[int]
    chain: HashChain
    prefix_id: PrefixId | None
    is_caching: bool
    priority: int
    table: BlockTable | None = None
    num_computed: int = 0
    num_fed: int = 0
    was_admitted: bool = False
    hint: MatchHint = field(default_factory=MatchHint)

    @property
    def max_hit_tokens(self) -> int:
        return len(self.tokens) - (self.prefix_id is None)

    def __repr__(self) -> str:
        return f"{self.tokens} with {self.num_computed} computed"

    def blocks(self) -> BlockTable:
        assert self.table is not None
        return self.table


def in_common(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences begin with together."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def tokens_of(node: PrefixNode) -> list[int]:
    """All tokens of the prefix that ends with a node."""
    packed = b"".join(step.tokens for step in node.path)
    return [int(token) for token in np.frombuffer(packed, dtype="<i4")]
