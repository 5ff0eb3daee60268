"""All figures at one moment, copied, so that another thread can write them down. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from runtime_cache.cache.ages import BlockAges
from runtime_cache.engine.latency import Latencies
from runtime_cache.engine.snapshot import EngineSnapshot
from runtime_cache.histogram import Histogram
from runtime_cache.ids import TenantName

#: The states of `rtcache_state` and of /health: those of `pong`, and before there is an engine.
STATES = ("loading", "serving", "draining", "recovering", "hung", "lost", "broken")


class Identity(NamedTuple):
    """What runs; never changes."""

    version: str
    model: str
    digest: str
    device: str
    soc: str
    python: str
    block_size: int
    block_bytes: int


class SocketFigures(NamedTuple):
    """One socket's gauges and counters.

    Attributes:
        name: `user`, `admin`, `tcp`, or `user:` and the tenant that has a socket of its own.
        counts: name of the counter → value.
        refused: error code → messages.
    """

    name: str
    num_connections: int
    num_parked: int
    counts: Mapping[str, int]
    refused: Mapping[str, int]


class SecurityFigures(NamedTuple):
    """Who may connect.

    Attributes:
        num_keys: that may connect over TCP.
        num_insecure: TCP sockets where everybody may.
        num_over_quota: requests refused because a key's quota was used up.
    """

    num_keys: int
    num_insecure: int
    num_over_quota: int


class Outcome(NamedTuple):
    """How requests ended: see `rtcache_requests_total`."""

    tenant: str
    kind: str
    outcome: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Of the requests of one tenant that have ended."""

    prompt: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class TenantHistograms:
    """One tenant's, as `engine.latency` and `cache.ages` say."""

    queue: Histogram
    ttft: Histogram
    total: Histogram
    prefill: Histogram
    decode: Histogram
    prompt_tokens: Histogram
    prefilled_tokens: Histogram
    answer_tokens: Histogram
    ages: BlockAges


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Everything that /metrics says but for the process's own figures.

    Attributes:
        roles: role → counter → value, of the executor.
        probes: how often the device was asked whether it works, and how often it did not.
        memory_bytes: kind → bytes, of what is known.
    """

    identity: Identity
    state: str
    uptime_s: float
    num_warnings: int
    engine: EngineSnapshot
    num_answer_tokens: int
    inter_token: Histogram
    steps: Mapping[str, Histogram]
    tenants: Mapping[TenantName, TenantHistograms]
    outcomes: Counter[Outcome]
    ended_tokens: Mapping[str, PromptTokens]
    roles: Mapping[str, Mapping[str, int]]
    probes: tuple[int, int]
    memory_bytes: Mapping[str, int]
    is_memory_low: bool
    sockets: tuple[SocketFigures, ...]
    security: SecurityFigures


def copy_histograms(
    latencies: Latencies, ages: Mapping[TenantName, BlockAges]
) -> dict[TenantName, TenantHistograms]:
    """Each tenant's, now."""
    return {
        name: TenantHistograms(
            queue=tenant.queue.histogram.copy(),
            ttft=tenant.ttft.histogram.copy(),
            total=tenant.total.histogram.copy(),
            prefill=tenant.prefill.copy(),
            decode=tenant.decode.copy(),
            prompt_tokens=tenant.prompt_tokens.copy(),
            prefilled_tokens=tenant.prefilled_tokens.copy(),
            answer_tokens=tenant.answer_tokens.copy(),
            ages=ages[name].copy(),
        )
        for name, tenant in latencies.tenants.items()
    }
