"""The figures that the daemon tells of itself: `stats`.

Reads gauges and counters where they are kept; changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ipc.server import Server
from runtime_cache import __version__
from runtime_cache.advice import CacheFigures, cache_warnings, insecure_warning, memory_warning
from runtime_cache.cache.results import CacheCounters
from runtime_cache.engine.snapshot import EngineSnapshot, TenantSnapshot
from runtime_cache.histogram import Summary, summarize
from runtime_cache.ids import TenantName
from runtime_cache.reload import Settings
from runtime_cache.runtime import Runtime

#: Over which percentiles are taken [seconds]; of much traffic only the latest part is remembered.
_WINDOW_S = 300


class DaemonStats:
    """Figures of one running daemon."""

    def __init__(
        self, runtime: Runtime, servers: Iterable[Server], settings: Settings | None = None
    ) -> None:
        """Args:
        servers: looked at whenever figures are asked for.
        settings: keys and what they used; None: there are none.
        """
        self._runtime = runtime
        self._servers = servers
        self._settings = settings
        self._started_s = time.monotonic()
        self._block_size = runtime.layout.block_size

    @property
    def uptime_s(self) -> float:
        """Since the start [seconds]."""
        return round(time.monotonic() - self._started_s, 3)

    def report(self) -> dict[str, Any]:
        """Section → name → value, and `warnings`: sentences."""
        runtime = self._runtime
        snapshot = runtime.engine.state.snapshot()
        return {
            "daemon": {
                "version": __version__,
                "uptime_s": self.uptime_s,
                "state": runtime.engine.condition,
                "device": runtime.config.device.device,
                "soc": runtime.soc_name,
                "model": runtime.manifest.name,
            },
            "warnings": list(self._warnings(snapshot)),
            "latency": self._latency(),
            "pool": {
                **_blocks(snapshot),
                "block_size": self._block_size,
                "bytes_per_block": runtime.layout.block_bytes,
                "capacity_tokens": runtime.capacity_tokens,
            },
            "cache": self._cache(snapshot),
            **self._tenants(snapshot),
            "engine": {
                "num_waiting": snapshot.num_waiting,
                "num_running": snapshot.num_running,
                "is_step_in_flight": snapshot.is_step_in_flight,
                "is_draining": snapshot.is_draining,
                **_plain(snapshot.engine),
                "answer_tokens": runtime.engine.state.latencies.num_tokens,
            },
            "device": {
                **{role: _plain(c) for role, c in runtime.executor.counters.items()},
                "probes": _plain(runtime.executor.probes),
                "memory": self._memory(),
            },
            "ipc": {server.name: _plain(server.counters) for server in self._servers},
            "security": self.security(),
        }

    def warnings(self) -> Iterator[str]:
        """Sentences for operators."""
        return self._warnings(self._runtime.engine.state.snapshot())

    def _latency(self) -> dict[str, Any]:
        """Percentiles of the last minutes, over all tenants [milliseconds]."""
        latencies = self._runtime.engine.state.latencies
        tenants = latencies.tenants.values()
        recent = {
            "queue_ms": [tenant.queue.recent for tenant in tenants],
            "ttft_ms": [tenant.ttft.recent for tenant in tenants],
            "inter_token_ms": [latencies.inter_token.recent],
            "total_ms": [tenant.total.recent for tenant in tenants],
            **{f"{role}_step_ms": [steps.recent] for role, steps in latencies.steps.items()},
        }
        begin_s = time.monotonic() - _WINDOW_S
        figures = {name: _percentiles(summarize(each, begin_s)) for name, each in recent.items()}
        return {"window_s": _WINDOW_S, **figures}

    def _cache(self, snapshot: EngineSnapshot) -> dict[str, Any]:
        """The counters of all tenants together; what deterministic mode costs, if it is on."""
        if not self._runtime.config.cache.deterministic:
            return _cache(snapshot)
        cost = {
            "grid_tokens": self._runtime.cache.policy.grid_tokens,
            "rounded_tokens": snapshot.cache.rounded_tokens,
        }
        return {**_cache(snapshot), "deterministic": cost}

    def _tenants(self, snapshot: EngineSnapshot) -> dict[str, Any]:
        """Each one's part, if there are others than the default tenant."""
        if len(snapshot.tenants) == 1:
            return {}
        return {"tenants": {name: self._tenant(name, s) for name, s in snapshot.tenants.items()}}

    def _tenant(self, name: TenantName, snapshot: TenantSnapshot) -> dict[str, Any]:
        num_blocks = snapshot.num_usable_blocks
        all_blocks = sum(cache.num_usable for cache in self._runtime.caches.values())
        return {
            "share_percent": round(100 * num_blocks / all_blocks, 2),
            "capacity_tokens": num_blocks * self._block_size,
            **_blocks(snapshot),
            "max_kept_blocks": self._runtime.caches[name].keeps.max_blocks,
            "num_waiting": snapshot.num_waiting,
            "num_running": snapshot.num_running,
            **_cache(snapshot),
        }

    def _memory(self) -> dict[str, int | bool | None]:
        """Of the device; null where the driver does not say."""
        memory = self._runtime.memory
        info = memory.info
        return {
            "free_bytes": None if info is None else info.free_bytes,
            "total_bytes": None if info is None else info.total_bytes,
            "loaded_bytes": memory.loaded_bytes,
            "planned_bytes": self._runtime.planned_bytes,
            "is_low": memory.is_low,
        }

    def security(self) -> dict[str, Any]:
        """Who may connect over TCP; null keys: no CURVE."""
        settings = self._settings
        has_keys = settings is not None and bool(settings.config.ipc.keys_file)
        return {
            "insecure_tcp": [server.endpoint for server in self._servers if server.is_insecure],
            "num_keys": len(settings.keyring.keys) if settings and has_keys else None,
            "quota_refusals": settings.quotas.num_refused if settings else 0,
        }

    def _warnings(self, snapshot: EngineSnapshot) -> Iterator[str]:
        for server in self._servers:
            if server.is_insecure:
                yield insecure_warning(server.endpoint)
        memory = self._runtime.memory
        if memory.is_low and memory.info is not None:
            yield memory_warning(memory.info.free_bytes, memory.low_bytes)
        for name, tenant in snapshot.tenants.items():
            figures = CacheFigures(
                tenant=name,
                counters=tenant.cache,
                num_blocks=tenant.num_usable_blocks,
                num_kept_blocks=tenant.num_kept_blocks,
                num_keeps=tenant.num_registered_prefixes + tenant.num_pins,
                max_kept_blocks=self._runtime.caches[name].keeps.max_blocks,
            )
            yield from cache_warnings(figures)


def _blocks(snapshot: EngineSnapshot | TenantSnapshot) -> dict[str, int]:
    """Live, cached and free blocks always add up to all blocks."""
    return {
        "num_blocks": snapshot.num_usable_blocks,
        "live_blocks": snapshot.num_live_blocks,
        "cached_blocks": snapshot.num_evictable_blocks,
        "free_blocks": snapshot.num_free_blocks,
        "kept_blocks": snapshot.num_kept_blocks,
        "registered_prefixes": snapshot.num_registered_prefixes,
        "pins": snapshot.num_pins,
    }


def _cache(snapshot: EngineSnapshot | TenantSnapshot) -> dict[str, Any]:
    counters: CacheCounters = snapshot.cache
    return {
        "hit_rate": _rate(counters),
        "requests_by_reason": dict(snapshot.requests_by_reason),
        **_plain(counters),
    }


def _rate(counters: CacheCounters) -> float | None:
    """Part of the prompt tokens that were cached; None before the first prompt."""
    if not counters.queried_tokens:
        return None
    return round(counters.hit_tokens / counters.queried_tokens, 4)


def _percentiles(summary: Summary) -> dict[str, float | None]:
    """Of durations in seconds, in milliseconds."""
    num_samples, *values = summary
    names = summary._fields[1:]
    in_ms = [None if value is None else round(value * 1000, 3) for value in values]
    return {"num": num_samples, **dict(zip(names, in_ms, strict=True))}


def _plain(counters: object) -> dict[str, Any]:
    """Counters as the wire can carry them, to three digits (`asdict` would spoil a Counter)."""
    plain: dict[str, Any] = msgspec.to_builtins(counters)
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in plain.items()}
