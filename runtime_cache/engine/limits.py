"""What bounds the engine's work. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runtime_cache.cache.manager import CacheManager
from runtime_cache.engine.gears import GearTable
from runtime_cache.errors import ConfigError
from runtime_cache.ids import TenantName


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds the engine's work.

    Attributes:
        max_waiting: requests in a tenant's queue at the most; a step in flight keeps even those
            waiting that will run next.
        interleave_chunk_tokens: the longest prefill chunk while answers are running.
        max_running: requests admitted at a time; None for as many as a decode step can feed.
        max_overtakes: how often a request may be overtaken by those with longer cached prefixes.
        match_window: how many waiting requests are searched for the longest cached prefix.
        on_failed_step: whether the requests of a step that failed on the device are computed
            again, once each, or fail.
        is_deterministic: a token's KV is always computed in the same way; needs a `fixed` gear
            table, and caches with its chunk as their grid.
    """

    max_waiting: int
    interleave_chunk_tokens: int
    max_running: int | None = None
    max_overtakes: int = 32
    match_window: int = 64
    is_deterministic: bool = False
    on_failed_step: Literal["recompute", "fail"] = "recompute"


def check_limits(
    limits: EngineLimits, caches: Mapping[TenantName, CacheManager], gears: GearTable
) -> None:
    """Whether an engine can work with these.

    Raises:
        ConfigError: it cannot.
    """
    positive = (limits.max_waiting, limits.interleave_chunk_tokens, limits.match_window)
    max_running = 1 if limits.max_running is None else limits.max_running
    if min(*positive, max_running) < 1 or limits.max_overtakes < 0:
        raise ConfigError(f"a limit of the engine is out of range: {limits}")
    if not caches:
        raise ConfigError("the engine has no tenant")
    grids = {cache.policy.grid_tokens for cache in caches.values()}
    if limits.is_deterministic and (not gears.is_fixed or grids != {gears.chunk}):
        raise ConfigError(
            f"deterministic mode needs one gear a role, and caches whose grid is its chunk, "
            f"{gears.chunk}, not {sorted(grids)}"
        )
