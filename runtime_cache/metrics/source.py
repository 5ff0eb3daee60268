"""Takes figures where they are kept. To be called on the daemon's event loop, and nowhere else."""

from __future__ import annotations

import platform
from collections.abc import Iterable

import msgspec

from ipc.server import Server
from runtime_cache import __version__
from runtime_cache.metrics.health import Health
from runtime_cache.metrics.samples import SOCKET_COUNTERS
from runtime_cache.metrics.snapshot import (
    Identity,
    MetricsSnapshot,
    SecurityFigures,
    SocketFigures,
    copy_histograms,
)
from runtime_cache.request_log import RequestLog
from runtime_cache.runtime import Runtime
from runtime_cache.stats import DaemonStats


class MetricsSource:
    """One running daemon's figures."""

    def __init__(
        self,
        runtime: Runtime,
        stats: DaemonStats,
        servers: Iterable[Server],
        requests: RequestLog,
    ) -> None:
        """Args:
        servers: looked at whenever figures are asked for.
        """
        self._runtime = runtime
        self._stats = stats
        self._servers = servers
        self._requests = requests
        self._identity = Identity(
            version=__version__,
            model=runtime.manifest.name,
            digest=runtime.manifest.digest,
            device=runtime.config.device.device,
            soc=runtime.soc_name,
            python=platform.python_version(),
            block_size=runtime.layout.block_size,
            block_bytes=runtime.layout.block_bytes,
        )

    def health(self) -> Health:
        """How it goes now."""
        engine = self._runtime.engine
        return Health(engine.condition, engine.num_unanswered, tuple(self._stats.warnings()))

    def snapshot(self) -> MetricsSnapshot:
        """All figures now; they do not change any more."""
        runtime = self._runtime
        engine, executor, memory = runtime.engine, runtime.executor, runtime.memory
        latencies = engine.state.latencies
        ages = {name: cache.ages for name, cache in runtime.caches.items()}
        return MetricsSnapshot(
            identity=self._identity,
            state=engine.condition,
            uptime_s=self._stats.uptime_s,
            num_warnings=len(list(self._stats.warnings())),
            engine=engine.state.snapshot(),
            num_answer_tokens=latencies.num_tokens,
            inter_token=latencies.inter_token.histogram.copy(),
            steps={role: timing.histogram.copy() for role, timing in latencies.steps.items()},
            tenants=copy_histograms(latencies, ages),
            outcomes=self._requests.outcomes.copy(),
            ended_tokens=dict(self._requests.ended_tokens),
            roles={role: msgspec.to_builtins(c) for role, c in executor.counters.items()},
            probes=(executor.probes.num_probes, executor.probes.num_failed),
            memory_bytes=self._memory_bytes(),
            is_memory_low=memory.is_low,
            sockets=tuple(map(_figures, self._servers)),
            security=self._security(),
        )

    def _security(self) -> SecurityFigures:
        found = self._stats.security()
        num_insecure = len(found["insecure_tcp"])
        return SecurityFigures(found["num_keys"] or 0, num_insecure, found["quota_refusals"])

    def _memory_bytes(self) -> dict[str, int]:
        """What is known of the device's memory."""
        memory = self._runtime.memory
        found = {"loaded": memory.loaded_bytes, "planned": self._runtime.planned_bytes}
        if memory.info is not None:
            found |= {"free": memory.info.free_bytes, "total": memory.info.total_bytes}
        return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes is not None}


def _figures(server: Server) -> SocketFigures:
    counters = server.counters
    counts = {name: getattr(counters, name) for name in SOCKET_COUNTERS}
    refused = dict(counters.refused)
    return SocketFigures(server.name, server.num_connections, server.num_parked, counts, refused)
