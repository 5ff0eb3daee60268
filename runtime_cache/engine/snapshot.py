"""What the engine tells of itself, for `stats`. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import CacheCounters
from runtime_cache.ids import TenantName


@dataclass(slots=True)
class EngineCounters:
    """What happened so far.

    Every arrived request ends up in exactly one of the counters from `refused` to `registered`.

    Attributes:
        arrived: requests that came in.
        refused: not admitted: queue full, too long, draining, invalid.
        finished: answered to the end.
        cancelled: ended by their owner, or by the daemon for it.
        cancelled_by: the same by reason.
        expired: ended by their deadline.
        failed: ended by a failed step or for want of blocks.
        registered: prefixes registered.
        late: cancels of requests that were unknown or had ended.
        recomputed: how often a request was computed again.
        recomputed_by: the same by reason: `failed_step`, or `bad_logits` after a hit, in which case
            without the cache.
        preemptions: how often a request had to give its blocks up.
        prefill_steps: steps that were started with a chunk of one prompt.
        decode_steps: steps that were started with one token each of several requests.
        failed_steps: those of both that failed.
        hung_steps: those of them that did not end in time.
        prefill_tokens: tokens computed in prefill: of prompts, and after a preemption again
            whatever was lost of prompt and answer.
        decode_tokens: answer tokens fed back.
    """

    arrived: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    cancelled_by: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    failed: int = 0
    registered: int = 0
    late: int = 0
    recomputed: int = 0
    recomputed_by: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    failed_steps: int = 0
    hung_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """One tenant's gauges and counters.

    The three kinds of blocks add up to `num_usable_blocks`.

    Attributes:
        num_waiting: requests in its queue.
        num_running: its admitted requests.
        num_usable_blocks: its share of the pool.
        num_live_blocks: held by requests, registrations, pins and leases.
        num_evictable_blocks: cached and held by nobody.
        num_free_blocks: with nothing in them.
        num_kept_blocks: held by registrations, pins and leases.
        num_registered_prefixes: registrations.
        num_pins: pins and leases.
        requests_by_reason: admitted requests by what the cache did for them (`CacheReport.reason`).
    """

    num_waiting: int
    num_running: int
    num_usable_blocks: int
    num_live_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    num_kept_blocks: int
    num_registered_prefixes: int
    num_pins: int
    requests_by_reason: Counter[str]
    cache: CacheCounters


@dataclass(frozen=True, slots=True)
class EngineSnapshot(TenantSnapshot):
    """Gauges and counters at one moment, of all tenants together; copies, not views.

    Attributes:
        is_step_in_flight: whether the device is at work.
        is_draining: whether new requests are refused.
        tenants: each one's part.
    """

    is_step_in_flight: bool
    is_draining: bool
    engine: EngineCounters
    tenants: Mapping[TenantName, TenantSnapshot]


def tenant_snapshot(
    cache: CacheManager, *, num_waiting: int, num_running: int, requests_by_reason: Counter[str]
) -> TenantSnapshot:
    """One tenant's part now."""
    num_registered = cache.keeps.num_registrations
    return TenantSnapshot(
        num_waiting=num_waiting,
        num_running=num_running,
        num_usable_blocks=cache.num_usable,
        num_live_blocks=cache.num_live,
        num_evictable_blocks=cache.num_evictable,
        num_free_blocks=cache.num_free,
        num_kept_blocks=cache.keeps.num_blocks,
        num_registered_prefixes=num_registered,
        num_pins=len(cache.keeps) - num_registered,
        requests_by_reason=requests_by_reason,
        cache=cache.counters.copy(),
    )


def sums(parts: Iterable[Any], kind: type[Any]) -> dict[str, Any]:
    """Each field of the dataclass `kind`, added up over the parts.

    The fields are numbers, Counters, or dataclasses of such.
    """
    parts = list(parts)
    return {
        field.name: _sum([getattr(part, field.name) for part in parts]) for field in fields(kind)
    }


def _sum(values: list[Any]) -> Any:
    kind = type(values[0])
    return kind(**sums(values, kind)) if is_dataclass(kind) else sum(values, kind())
