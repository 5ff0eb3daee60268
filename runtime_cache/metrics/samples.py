"""From a snapshot to samples of the metrics in `definitions`. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, get_args

from runtime_cache.cache.results import CacheReason
from runtime_cache.engine.snapshot import TenantSnapshot
from runtime_cache.histogram import Histogram
from runtime_cache.ids import TenantName
from runtime_cache.metrics.snapshot import (
    STATES,
    MetricsSnapshot,
    PromptTokens,
    TenantHistograms,
)

#: What the default tenant is called in labels. An empty label would be none, and no tenant that is
#: configured can have this name.
DEFAULT_LABEL = "(default)"
#: Reasons that are shown before they occur, so that a rate can be taken of their first occurrence.
_EVICTIONS = ("need", "watermark", "max_cached_prefixes", "operator")
_CANCELS = ("client", "client_gone", "slow_reader", "lease_expired", "shutdown")
_RECOMPUTES = ("failed_step", "bad_logits")
_FINISHED = {"stop": "stop", "length": "length"}
_ABORTED = ("cancelled", "deadline", "slow_reader", "lease_expired", "shutdown")
_FINISHED |= dict.fromkeys(_ABORTED, "abort")
_NO_TOKENS = PromptTokens()


class Sample(NamedTuple):
    """One value of a metric.

    Attributes:
        name: as in `definitions`.
        labels: in the order of the definition's labels.
    """

    name: str
    labels: tuple[str, ...]
    value: float | Histogram


def samples(now: MetricsSnapshot) -> Iterator[Sample]:
    """Every sample, but for how long the scrape waited."""
    yield from _daemon(now)
    yield from _engine(now)
    yield from _requests(now)
    for name, tenant in now.engine.tenants.items():
        yield from _tenant(name, tenant)
        yield from _as_peers((now.identity.model, tenant_label(name)), tenant, now.tenants[name])
    yield from _device(now)
    yield from _sockets(now)


def tenant_label(name: str) -> str:
    """What a tenant is called in labels."""
    return name or DEFAULT_LABEL


def _daemon(now: MetricsSnapshot) -> Iterator[Sample]:
    what, engine = now.identity, now.engine
    blocks = (str(what.block_size), str(engine.num_usable_blocks))
    yield Sample("vllm:cache_config_info", (what.model, *blocks), 1)
    labels = (what.version, what.model, what.digest, what.device, what.soc, what.python)
    yield Sample("rtcache_build_info", labels, 1)
    for state in STATES:
        yield Sample("rtcache_state", (state,), state == now.state)
    yield Sample("rtcache_uptime_seconds", (), now.uptime_s)
    yield Sample("rtcache_warnings", (), now.num_warnings)
    yield Sample("rtcache_keys", (), now.security.num_keys)
    yield Sample("rtcache_insecure_sockets", (), now.security.num_insecure)
    yield Sample("rtcache_quota_refusals_total", (), now.security.num_over_quota)
    yield Sample("rtcache_block_size_tokens", (), what.block_size)
    yield Sample("rtcache_block_bytes", (), what.block_bytes)


def _engine(now: MetricsSnapshot) -> Iterator[Sample]:
    engine, counters, model = now.engine, now.engine.engine, (now.identity.model,)
    yield Sample("vllm:num_requests_running", model, engine.num_running)
    yield Sample("vllm:num_requests_waiting", model, engine.num_waiting)
    usage = engine.num_live_blocks / engine.num_usable_blocks
    yield Sample("vllm:kv_cache_usage_perc", model, usage)
    yield Sample("vllm:generation_tokens_total", model, now.num_answer_tokens)
    yield Sample("vllm:num_preemptions_total", model, counters.preemptions)
    yield Sample("vllm:inter_token_latency_seconds", model, now.inter_token)
    yield Sample("rtcache_arrived_requests_total", (), counters.arrived)
    yield Sample("rtcache_late_cancels_total", (), counters.late)
    for outcome in ("refused", "finished", "cancelled", "expired", "failed", "registered"):
        yield Sample("rtcache_engine_requests_total", (outcome,), getattr(counters, outcome))
    for reason in _union(_CANCELS, counters.cancelled_by):
        value = counters.cancelled_by[reason]
        yield Sample("rtcache_cancelled_requests_total", (reason,), value)
    for reason in _union(_RECOMPUTES, counters.recomputed_by):
        value = counters.recomputed_by[reason]
        yield Sample("rtcache_recomputed_requests_total", (reason,), value)
    yield Sample("rtcache_step_in_flight", (), engine.is_step_in_flight)
    yield Sample("rtcache_steps_total", ("prefill",), counters.prefill_steps)
    yield Sample("rtcache_steps_total", ("decode",), counters.decode_steps)
    yield Sample("rtcache_failed_steps_total", (), counters.failed_steps)
    yield Sample("rtcache_hung_steps_total", (), counters.hung_steps)
    yield Sample("rtcache_prefill_tokens_total", (), counters.prefill_tokens)
    yield Sample("rtcache_decode_tokens_total", (), counters.decode_tokens)


def _requests(now: MetricsSnapshot) -> Iterator[Sample]:
    """How requests ended, and what of their prompts was cached."""
    model = now.identity.model
    ended: dict[tuple[str, str], int] = defaultdict(int)
    for name in now.engine.tenants:
        ended |= dict.fromkeys([(name, reason) for reason in _FINISHED.values()], 0)
    for end, number in now.outcomes.items():
        label = tenant_label(end.tenant)
        yield Sample("rtcache_requests_total", (label, end.kind, end.outcome), number)
        if end.outcome in _FINISHED:
            ended[end.tenant, _FINISHED[end.outcome]] += number
    for (tenant, reason), number in ended.items():
        labels = (model, tenant_label(tenant), reason)
        yield Sample("vllm:request_success_total", labels, number)
    for tenant in now.engine.tenants:
        tokens, peer = now.ended_tokens.get(tenant, _NO_TOKENS), (model, tenant_label(tenant))
        yield Sample("vllm:prompt_tokens_total", peer, tokens.prompt)
        yield Sample("vllm:prompt_tokens_cached_total", peer, tokens.cached)


def _tenant(name: TenantName, tenant: TenantSnapshot) -> Iterator[Sample]:
    label = tenant_label(name)
    yield Sample("rtcache_requests_running", (label,), tenant.num_running)
    yield Sample("rtcache_requests_waiting", (label,), tenant.num_waiting)
    yield Sample("rtcache_kv_blocks", (label, "live"), tenant.num_live_blocks)
    yield Sample("rtcache_kv_blocks", (label, "cached"), tenant.num_evictable_blocks)
    yield Sample("rtcache_kv_blocks", (label, "free"), tenant.num_free_blocks)
    yield Sample("rtcache_kept_blocks", (label,), tenant.num_kept_blocks)
    yield Sample("rtcache_registered_prefixes", (label,), tenant.num_registered_prefixes)
    yield Sample("rtcache_pins", (label,), tenant.num_pins)
    for reason in get_args(CacheReason):
        value = tenant.requests_by_reason[reason]
        yield Sample("rtcache_cache_requests_total", (label, reason), value)
    counters = tenant.cache
    for reason in _union(_EVICTIONS, counters.evicted_by):
        value = counters.evicted_by[reason]
        yield Sample("rtcache_evicted_blocks_total", (label, reason), value)
    for counter in _CACHE_COUNTERS:
        yield Sample(f"rtcache_{counter}_total", (label,), getattr(counters, counter))


#: Counters of the cache that are metrics under their own names.
_CACHE_COUNTERS = (
    *("evicted_unused_blocks", "inserted_blocks", "superseded_blocks", "duplicate_blocks"),
    *("dropped_blocks", "damaged_blocks", "collisions", "failed_lookups"),
    *("copied_tokens", "rounded_tokens"),
)


def _as_peers(
    peer: tuple[str, str], snapshot: TenantSnapshot, tenant: TenantHistograms
) -> Iterator[Sample]:
    """A tenant's part of what vLLM has too, and what is like it."""
    yield Sample("vllm:prefix_cache_queries_total", peer, snapshot.cache.queried_tokens)
    yield Sample("vllm:prefix_cache_hits_total", peer, snapshot.cache.hit_tokens)
    yield Sample("vllm:time_to_first_token_seconds", peer, tenant.ttft)
    yield Sample("vllm:e2e_request_latency_seconds", peer, tenant.total)
    yield Sample("vllm:request_queue_time_seconds", peer, tenant.queue)
    yield Sample("vllm:request_prefill_time_seconds", peer, tenant.prefill)
    yield Sample("vllm:request_decode_time_seconds", peer, tenant.decode)
    yield Sample("vllm:request_prompt_tokens", peer, tenant.prompt_tokens)
    yield Sample("vllm:request_generation_tokens", peer, tenant.answer_tokens)
    yield Sample("vllm:request_prefill_kv_computed_tokens", peer, tenant.prefilled_tokens)
    yield Sample("vllm:kv_block_lifetime_seconds", peer, tenant.ages.lifetime)
    yield Sample("vllm:kv_block_idle_before_evict_seconds", peer, tenant.ages.idle)
    yield Sample("rtcache_prefix_reuse_gap_seconds", peer[1:], tenant.ages.reuse_gap)


def _device(now: MetricsSnapshot) -> Iterator[Sample]:
    for role, histogram in now.steps.items():
        yield Sample("rtcache_step_seconds", (role,), histogram)
    for role, counts in now.roles.items():
        yield Sample("rtcache_device_steps_total", (role,), counts["num_steps"])
        yield Sample("rtcache_device_appended_rows_total", (role,), counts["rows_appended"])
        yield Sample("rtcache_device_padded_rows_total", (role,), counts["rows_padded"])
        yield Sample("rtcache_device_copied_rows_total", (role,), counts["rows_copied"])
    num_probes, num_failed = now.probes
    yield Sample("rtcache_device_probes_total", (), num_probes)
    yield Sample("rtcache_device_failed_probes_total", (), num_failed)
    for kind, num_bytes in now.memory_bytes.items():
        yield Sample("rtcache_device_memory_bytes", (kind,), num_bytes)
    yield Sample("rtcache_device_memory_low", (), now.is_memory_low)


#: Counters of a socket → the metrics they are.
SOCKET_COUNTERS = {
    "received": "rtcache_ipc_received_messages_total",
    "sent": "rtcache_ipc_sent_messages_total",
    "handler_errors": "rtcache_ipc_handler_errors_total",
    "clients_gone": "rtcache_ipc_clients_gone_total",
    "connections_cut": "rtcache_ipc_connections_cut_total",
    "unreachable": "rtcache_ipc_unreachable_replies_total",
    "slow_readers": "rtcache_ipc_slow_readers_total",
    "parked": "rtcache_ipc_parked_replies_total",
    "dropped": "rtcache_ipc_dropped_replies_total",
}


def _sockets(now: MetricsSnapshot) -> Iterator[Sample]:
    for socket in now.sockets:
        labels = (socket.name,)
        yield Sample("rtcache_ipc_connections", labels, socket.num_connections)
        yield Sample("rtcache_ipc_waiting_replies", labels, socket.num_parked)
        for counter, metric in SOCKET_COUNTERS.items():
            yield Sample(metric, labels, socket.counts[counter])
        for code, number in socket.refused.items():
            yield Sample("rtcache_ipc_refused_messages_total", (*labels, code), number)


def _union(known: Iterable[str], found: Iterable[str]) -> list[str]:
    """The known ones first, then what else occurred."""
    return list(dict.fromkeys((*known, *found)))
