"""Watches what a cache hands out: only blocks that nobody has, and never under a step."""

from __future__ import annotations

from collections.abc import Callable

from runtime_cache.cache.manager import CacheManager
from runtime_cache.ids import BlockId


def watch(cache: CacheManager, is_step_in_flight: Callable[[], bool]) -> None:
    """From now on every block that `cache` hands out is looked at.

    Args:
        is_step_in_flight: whether work is queued that may still read or write blocks.
    """
    pool, allocate = cache.pool, cache.pool.allocate

    def watched(num_blocks: int) -> list[BlockId]:
        before = {block: pool.num_holds(block) for block in pool.free_blocks[:num_blocks]}
        blocks = allocate(num_blocks)
        assert blocks == list(before), "other blocks than the first free ones are handed out"
        assert not any(before.values()), f"held blocks are handed out: {before}"
        assert len(set(blocks)) == len(blocks), f"a block is handed out twice: {blocks}"
        for block in blocks:
            assert cache.index.node_of(block) is None, f"cached block {block} is handed out"
        assert not blocks or not is_step_in_flight(), f"{blocks} are handed out under a step"
        return blocks

    pool.allocate = watched  # type: ignore[method-assign]
