"""What the daemon tells of itself: `info`, `ping`, `list`, `stats`.

Reads gauges and counters where they are kept; changes nothing.
"""

from __future__ import annotations

import heapq
import platform
import time
from collections.abc import Awaitable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from ipc import messages as wire
from ipc.server import Server
from runtime_cache import __version__
from runtime_cache.advice import CacheFigures, cache_warnings, memory_warning
from runtime_cache.cache import desk
from runtime_cache.cache.results import CacheCounters, CacheEntry, KeepKind
from runtime_cache.engine.snapshot import EngineSnapshot, TenantSnapshot
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.runtime import Runtime

_LIBRARIES = ("numpy", "pyzmq", "tokenizers", "uvloop", "onnxruntime")


class DaemonFacts:
    """Facts of one running daemon.

    Attributes:
        digest: of the bundle.
        block_size: tokens per block.
        bytes_per_block: device memory of one block.
        kv_dtype: `float16` or `float32`.
        is_caching: whether prefixes are kept at all.
    """

    def __init__(self, runtime: Runtime, servers: Iterable[Server]) -> None:
        """Args:
        servers: looked at whenever stats are asked for.
        """
        self._runtime = runtime
        self._servers = servers
        self._started_s = time.monotonic()
        self._versions = _versions()
        self.digest = runtime.manifest.digest
        self.block_size = runtime.layout.block_size
        self.bytes_per_block = runtime.layout.block_bytes
        self.kv_dtype = runtime.layout.dtype
        self.is_caching = runtime.config.cache.enable

    def pong(self, message_id: wire.MessageId) -> wire.Pong:
        """Answer to `ping`."""
        state = self._runtime.engine.condition
        return wire.Pong(id=message_id, version=__version__, uptime_s=self._uptime_s(), state=state)

    def info(self, message_id: wire.MessageId, tenant: TenantName = DEFAULT_TENANT) -> wire.Info:
        """Answer to `info`: what a client of this tenant may know."""
        runtime, config = self._runtime, self._runtime.config
        return wire.Info(
            id=message_id,
            model=runtime.manifest.name,
            digest=self.digest,
            device=config.device.device,
            vocab_size=runtime.manifest.model.vocab_size,
            max_model_len=runtime.engine.state.max_sequence_tokens_of(tenant),
            block_size=self.block_size,
            chat=runtime.chat_template is not None,
            limits={
                "max_message_bytes": config.ipc.max_message_bytes,
                "max_waiting": config.engine.max_waiting,
                "max_batch": runtime.gears.max_batch,
                "cache_tokens": runtime.caches[tenant].num_usable * self.block_size,
            },
            versions=self._versions,
        )

    def entries(
        self, *, limit: int, offset: int = 0, tenant: TenantName | None = None
    ) -> tuple[tuple[wire.Entry, ...], int]:
        """The cached prefixes, most recently used first, and how many there are in all.

        Args:
            tenant: whose, one of those configured; None for everybody's.
        """
        caches = self._runtime.caches
        now_s = time.monotonic()
        found: list[tuple[TenantName, CacheEntry]] = []
        total = 0
        for name in caches if tenant is None else (tenant,):
            entries, number = desk.entries(caches[name], offset + limit)
            found += [(name, entry) for entry in entries]
            total += number
        found = heapq.nlargest(offset + limit, found, key=lambda pair: pair[1].last_used_s)
        return tuple(self._entry(*pair, now_s) for pair in found[offset:]), total

    def num_evictable(self, tenant: TenantName | None) -> int:
        """How many blocks nobody holds: of a tenant, one of those configured, or of all (None)."""
        caches = self._runtime.caches
        return sum(caches[name].num_evictable for name in (caches if tenant is None else (tenant,)))

    @property
    def max_read_tokens(self) -> int:
        """How many tokens `read_kv` takes at once."""
        return self._runtime.executor.max_read_tokens

    def read_kv(self, first_slot: int, num_tokens: int) -> Awaitable[bytes]:
        """What the pool holds: `Runtime.read_kv`."""
        return self._runtime.read_kv(first_slot, num_tokens)

    def stats(self) -> dict[str, Any]:
        """Section → name → value, and `warnings`: sentences."""
        runtime = self._runtime
        snapshot = runtime.engine.state.snapshot()
        return {
            "daemon": {
                "version": __version__,
                "uptime_s": self._uptime_s(),
                "state": runtime.engine.condition,
                "device": runtime.config.device.device,
                "soc": runtime.soc_name,
                "model": runtime.manifest.name,
            },
            "warnings": list(self._warnings(snapshot)),
            "pool": {
                **_blocks(snapshot),
                "block_size": self.block_size,
                "bytes_per_block": self.bytes_per_block,
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
            },
            "device": {
                **{role: _plain(c) for role, c in runtime.executor.counters.items()},
                "probes": _plain(runtime.executor.probes),
                "memory": self._memory(),
            },
            "ipc": {_server_name(server): _plain(server.counters) for server in self._servers},
        }

    def _uptime_s(self) -> float:
        return round(time.monotonic() - self._started_s, 3)

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
            "capacity_tokens": num_blocks * self.block_size,
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

    def _warnings(self, snapshot: EngineSnapshot) -> Iterator[str]:
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

    def _entry(self, tenant: TenantName, entry: CacheEntry, now_s: float) -> wire.Entry:
        keep = entry.keep
        expires_s = None if keep is None else keep.expires_s
        name = keep.name if keep is not None and keep.kind == "registration" else None
        return wire.Entry(
            digest=entry.digest,
            num_tokens=entry.num_tokens,
            num_blocks=entry.num_blocks,
            num_bytes=entry.num_blocks * self.bytes_per_block,
            hits=entry.num_hits,
            age_s=round(now_s - entry.created_s, 3),
            idle_s=round(now_s - entry.last_used_s, 3),
            in_use=entry.num_requests > 0,
            prefix_id=None if name is None else wire.PrefixName(name),
            tenant=tenant,
            kept="" if keep is None else _KEPT[keep.kind],
            expires_in_s=None if expires_s is None else round(max(0.0, expires_s - now_s), 3),
            priority=entry.priority,
        )


#: The words of the wire for why an entry stays.
_KEPT: dict[KeepKind, str] = {"registration": "registered", "pin": "pinned", "lease": "leased"}


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


def _server_name(server: Server) -> str:
    """`user`, `admin`, or `user:` and the tenant's name."""
    return f"{server.role}:{server.tenant}" if server.tenant else server.role


def _plain(counters: object) -> dict[str, Any]:
    """Counters as the wire can carry them, to three digits (`asdict` would spoil a Counter)."""
    plain: dict[str, Any] = msgspec.to_builtins(counters)
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in plain.items()}


def _versions() -> dict[str, str]:
    versions = {
        "protocol": str(wire.PROTOCOL_VERSION),
        "runtime-cache": __version__,
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
