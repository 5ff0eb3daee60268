"""What `stats` warns of: sentences for operators, each with what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime_cache.cache.results import CacheCounters

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """One tenant's cache, as far as warnings go.

    Attributes:
        num_blocks: its blocks.
        num_kept_blocks: those that registrations, pins and leases hold ...
        num_keeps: ... and how many of these there are.
        max_kept_blocks: the limit of either.
    """

    tenant: str
    counters: CacheCounters
    num_blocks: int
    num_kept_blocks: int
    num_keeps: int
    max_kept_blocks: int


def insecure_warning(endpoint: str) -> str:
    """What is to be said of a TCP port without protection."""
    return (
        f"{endpoint} is open without CURVE (ipc.insecure_tcp): whoever reaches it may use the "
        f"daemon and read along; docs/security.md tells how to protect it"
    )


def cache_warnings(figures: CacheFigures) -> Iterator[str]:
    """What is to be said of one tenant's cache."""
    whose = f"tenant {figures.tenant!r}: " if figures.tenant else ""
    if _is_unsuited(figures.counters, figures.num_blocks):
        counters = figures.counters
        yield (
            f"{whose}caching does not suit this workload: {counters.evicted_unused_blocks} of "
            f"{counters.evicted_blocks} evicted blocks were never reused, {counters.hit_tokens} of "
            f"{counters.queried_tokens} prompt tokens were cached; `rtcache-admin explain` tells "
            f"why a prompt is not, docs/cache.md what helps"
        )
    if figures.counters.damaged_blocks:
        yield (
            f"{whose}{figures.counters.damaged_blocks} cached blocks were dropped because `verify` "
            f"found damaged KV: suspect the device's memory, its driver, or another program on it; "
            f"the daemon's log names the blocks"
        )
    num_kept = max(figures.num_kept_blocks, figures.num_keeps)
    if 10 * num_kept > 9 * figures.max_kept_blocks > 0:
        yield (
            f"{whose}registrations, pins and leases: {figures.num_keeps}, blocks they hold: "
            f"{figures.num_kept_blocks}; neither number may exceed "
            f"{figures.max_kept_blocks}: release some, or raise cache.max_kept_percent"
        )


def _is_unsuited(counters: CacheCounters, num_blocks: int) -> bool:
    """Most blocks go without a hit, nine of ten tokens find none, once the pool was turned over."""
    return (
        counters.evicted_blocks >= num_blocks
        and 2 * counters.evicted_unused_blocks > counters.evicted_blocks
        and 10 * counters.hit_tokens < counters.queried_tokens
    )


def memory_warning(free_bytes: int, low_bytes: float) -> str:
    """What is to be said of a device whose memory is low."""
    return (
        f"only {free_bytes // _MIB} MiB of device memory are free, less than device.low_memory_mb "
        f"= {low_bytes / _MIB:g}: the KV pool is not what grows, another process may be"
    )
