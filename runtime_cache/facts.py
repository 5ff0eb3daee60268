"""What the daemon tells of itself: `info`, `ping`, `list`, `stats`.

Reads gauges and counters where they are kept; changes nothing.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from ipc import messages as wire
from ipc.server import Role, Server
from runtime_cache import __version__
from runtime_cache.cache.results import CacheEntry
from runtime_cache.engine.snapshot import EngineSnapshot
from runtime_cache.runtime import Runtime

_LIBRARIES = ("numpy", "pyzmq", "tokenizers", "uvloop", "onnxruntime")


class DaemonFacts:
    """Facts of one running daemon.

    Attributes:
        digest: of the bundle.
        block_size: tokens per block.
        bytes_per_block: device memory of one block.
        is_caching: whether prefixes are kept at all.
    """

    def __init__(self, runtime: Runtime, servers: Mapping[Role, Server]) -> None:
        self._runtime = runtime
        self._servers = servers
        self._started_s = time.monotonic()
        self._versions = _versions()
        self.digest = runtime.manifest.digest
        self.block_size = runtime.layout.block_size
        self.bytes_per_block = runtime.layout.block_bytes
        self.is_caching = runtime.config.cache.enable

    def pong(self, message_id: wire.MessageId) -> wire.Pong:
        """Answer to `ping`."""
        return wire.Pong(id=message_id, version=__version__, uptime_s=self._uptime_s())

    def info(self, message_id: wire.MessageId) -> wire.Info:
        """Answer to `info`."""
        runtime, config = self._runtime, self._runtime.config
        return wire.Info(
            id=message_id,
            model=runtime.manifest.name,
            digest=self.digest,
            device=config.device.device,
            vocab_size=runtime.manifest.model.vocab_size,
            max_model_len=runtime.engine.state.max_sequence_tokens,
            block_size=self.block_size,
            chat=runtime.chat_template is not None,
            limits={
                "max_message_bytes": config.ipc.max_message_bytes,
                "max_waiting": config.engine.max_waiting,
                "max_batch": runtime.gears.max_batch,
                "cache_tokens": runtime.cache.num_usable * self.block_size,
            },
            versions=self._versions,
        )

    def entries(self, limit: int) -> tuple[tuple[wire.Entry, ...], int]:
        """The cached prefixes, most recently used first, and how many there are in all."""
        entries = self._runtime.cache.entries()
        now_s = time.monotonic()
        return tuple(self._entry(entry, now_s) for entry in entries[:limit]), len(entries)

    def stats(self) -> dict[str, Any]:
        """Section → name → value."""
        runtime = self._runtime
        snapshot = runtime.engine.state.snapshot()
        return {
            "daemon": {
                "version": __version__,
                "uptime_s": self._uptime_s(),
                "device": runtime.config.device.device,
                "soc": runtime.soc_name,
                "model": runtime.manifest.name,
            },
            "pool": self._pool(snapshot),
            "cache": _plain(snapshot.cache),
            "engine": {
                "num_waiting": snapshot.num_waiting,
                "num_running": snapshot.num_running,
                "is_step_in_flight": snapshot.is_step_in_flight,
                "is_draining": snapshot.is_draining,
                **_plain(snapshot.engine),
            },
            "device": {role: _plain(c) for role, c in runtime.executor.counters.items()},
            "ipc": {role: _plain(server.counters) for role, server in self._servers.items()},
        }

    def _uptime_s(self) -> float:
        return round(time.monotonic() - self._started_s, 3)

    def _pool(self, snapshot: EngineSnapshot) -> dict[str, int]:
        """Live, cached and free blocks always add up to all blocks."""
        return {
            "num_blocks": snapshot.num_usable_blocks,
            "live_blocks": snapshot.num_live_blocks,
            "cached_blocks": snapshot.num_evictable_blocks,
            "free_blocks": snapshot.num_free_blocks,
            "registered_prefixes": snapshot.num_registered_prefixes,
            "block_size": self.block_size,
            "bytes_per_block": self.bytes_per_block,
            "capacity_tokens": snapshot.num_usable_blocks * self.block_size,
        }

    def _entry(self, entry: CacheEntry, now_s: float) -> wire.Entry:
        return wire.Entry(
            digest=entry.digest,
            num_tokens=entry.num_tokens,
            num_blocks=entry.num_blocks,
            num_bytes=entry.num_blocks * self.bytes_per_block,
            hits=entry.num_hits,
            age_s=round(now_s - entry.created_s, 3),
            idle_s=round(now_s - entry.last_used_s, 3),
            in_use=entry.num_requests > 0,
            prefix_id=wire.PrefixName(entry.prefix_ids[0]) if entry.prefix_ids else None,
        )


def _plain(counters: object) -> dict[str, Any]:
    """Counters as the wire can carry them (`dataclasses.asdict` spoils a Counter)."""
    plain: dict[str, Any] = msgspec.to_builtins(counters)
    return plain


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
