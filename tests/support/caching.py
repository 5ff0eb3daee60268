"""Small builders for tests of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import HashChain, root_digest
from runtime_cache.cache.manager import CacheManager

BLOCK_SIZE = 4
ROOT = root_digest(bundle_digest=b"\x11" * 32, block_size=BLOCK_SIZE)


def make_manager(
    num_blocks: int,
    *,
    low_watermark_blocks: int = 0,
    max_registered_blocks: int | None = None,
    is_enabled: bool = True,
) -> CacheManager:
    """A cache with blocks of four tokens."""
    return CacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        root=ROOT,
        low_watermark_blocks=low_watermark_blocks,
        max_registered_blocks=max_registered_blocks,
        is_enabled=is_enabled,
    )


def chain_of(tokens: Sequence[int]) -> HashChain:
    """The hash chain of `tokens`."""
    chain = HashChain(ROOT, BLOCK_SIZE)
    chain.extend(np.asarray(tokens, dtype=np.int32))
    return chain


def admit(cache: CacheManager, tokens: Sequence[int], *, room: int = 0) -> BlockTable | None:
    """Admit a prompt as the engine does, with room for `room` more tokens later."""
    return cache.admit(
        chain_of(tokens),
        num_tokens=len(tokens),
        max_tokens=len(tokens) + room,
        max_hit_tokens=len(tokens) - 1,
    )


def admitted(cache: CacheManager, tokens: Sequence[int], *, room: int = 0) -> BlockTable:
    """As `admit`, where it must succeed."""
    table = admit(cache, tokens, room=room)
    assert table is not None
    return table


def serve(cache: CacheManager, tokens: Sequence[int]) -> list[int]:
    """Admit, compute, commit and release a prompt; returns its blocks."""
    table = admitted(cache, tokens)
    cache.commit(table, chain_of(tokens), len(tokens))
    blocks = [int(block) for block in table.blocks]
    cache.release(table)
    return blocks


def parked_blocks(cache: CacheManager) -> list[int]:
    """The eviction queue, next to go first."""
    return [int(node.block) for node in cache.index.parked]


def free_blocks(cache: CacheManager) -> list[int]:
    """The free list, next to be handed out first."""
    return [int(block) for block in cache.pool.free_blocks]


def gauges(cache: CacheManager) -> tuple[int, int, int]:
    """Live, evictable and free blocks."""
    return cache.num_live, cache.num_evictable, cache.num_free
