"""Every metric that there is: name, kind, labels, meaning. Pure data; docs/metrics.md has the same.

Names that begin with `vllm:` mean what they mean there, so that dashboards, alerts and routers made
for vLLM work; all others begin with `rtcache_`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Definition(NamedTuple):
    """One metric.

    Attributes:
        name: as it is scraped; of a counter with `_total`.
        meaning: a sentence, with the unit.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


def _table(
    kind: Kind, labels: tuple[str, ...], rows: dict[str, str]
) -> tuple[tuple[str, Definition], ...]:
    return tuple((name, Definition(name, kind, labels, text)) for name, text in rows.items())


_MODEL = ("model_name",)
_PEER = ("model_name", "tenant")
_TENANT = ("tenant",)
_SOCKET = ("socket",)

DEFINITIONS: dict[str, Definition] = dict(
    (
        # -- as vLLM has them -----------------------------------------------------------------
        *_table(
            "gauge",
            _MODEL,
            {
                "vllm:num_requests_running": "Admitted requests, of all tenants.",
                "vllm:num_requests_waiting": "Requests in the queues, of all tenants.",
                "vllm:kv_cache_usage_perc": "Part of the blocks that requests, registrations, "
                "pins and leases hold (0 to 1).",
            },
        ),
        *_table(
            "gauge",
            (*_MODEL, "block_size", "num_gpu_blocks"),
            {"vllm:cache_config_info": "1; the labels say how the KV pool is cut."},
        ),
        *_table(
            "counter",
            _PEER,
            {
                "vllm:prefix_cache_queries_total": "Prompt tokens of admitted requests that may "
                "use the cache.",
                "vllm:prefix_cache_hits_total": "Those of them that were cached.",
                "vllm:prompt_tokens_total": "Prompt tokens of ended answers and registrations.",
                "vllm:prompt_tokens_cached_total": "Those of them that were cached.",
            },
        ),
        *_table(
            "counter",
            _MODEL,
            {
                "vllm:generation_tokens_total": "Answer tokens that were sampled.",
                "vllm:num_preemptions_total": "How often a request had to give its blocks up.",
            },
        ),
        *_table(
            "counter",
            (*_PEER, "finished_reason"),
            {
                "vllm:request_success_total": "Answers that ended: `stop`, `length`, or `abort` "
                "for whatever else ended them early. Errors are in rtcache_requests_total."
            },
        ),
        *_table(
            "histogram",
            _PEER,
            {
                "vllm:time_to_first_token_seconds": "From a request's arrival to its first answer "
                "token (seconds).",
                "vllm:e2e_request_latency_seconds": "From arrival to the end, of answers that "
                "ended by a stop or their length (seconds).",
                "vllm:request_queue_time_seconds": "From a request's arrival to its first step "
                "(seconds).",
                "vllm:request_prefill_time_seconds": "From the first step to the first answer "
                "token, of answers that ended by a stop or their length (seconds).",
                "vllm:request_decode_time_seconds": "From the first answer token to the end, of "
                "the same (seconds).",
                "vllm:request_prompt_tokens": "Prompt tokens of answers that ended by a stop or "
                "their length.",
                "vllm:request_generation_tokens": "Answer tokens of the same.",
                "vllm:request_prefill_kv_computed_tokens": "Tokens prefilled for the same: what "
                "was not cached, and what a preemption lost.",
                "vllm:kv_block_lifetime_seconds": "Age of evicted blocks: from their commit to "
                "their eviction (seconds). Every block, not a sample.",
                "vllm:kv_block_idle_before_evict_seconds": "How long evicted blocks had not been "
                "used (seconds). Every block, not a sample.",
            },
        ),
        *_table(
            "histogram",
            _MODEL,
            {
                "vllm:inter_token_latency_seconds": "Between two tokens of an answer, as sampled "
                "(seconds)."
            },
        ),
        # -- the daemon -----------------------------------------------------------------------
        *_table(
            "gauge",
            ("version", "model", "digest", "device", "soc", "python"),
            {"rtcache_build_info": "1; the labels say what runs."},
        ),
        *_table(
            "gauge",
            ("state",),
            {"rtcache_state": "1 for the state the daemon is in, 0 for the others."},
        ),
        *_table(
            "gauge",
            (),
            {
                "rtcache_uptime_seconds": "Since the start (seconds).",
                "rtcache_warnings": "Sentences in `rtcache-admin stats` that warn of something.",
                "rtcache_scrape_wait_seconds": "How long this scrape waited for the event loop "
                "(seconds).",
            },
        ),
        # -- who may connect ------------------------------------------------------------------
        *_table(
            "gauge",
            (),
            {
                "rtcache_keys": "Keys in the list of those that may connect over TCP; 0 without "
                "CURVE.",
                "rtcache_insecure_sockets": "TCP sockets without CURVE: whoever reaches them is "
                "served.",
            },
        ),
        *_table(
            "counter",
            (),
            {"rtcache_quota_refusals_total": "Requests refused because a key's quota was used up."},
        ),
        # -- requests -------------------------------------------------------------------------
        *_table(
            "gauge",
            _TENANT,
            {
                "rtcache_requests_running": "Admitted requests.",
                "rtcache_requests_waiting": "Requests in the queue.",
            },
        ),
        *_table(
            "counter",
            ("tenant", "kind", "outcome"),
            {
                "rtcache_requests_total": "Requests that got their final reply, by message type "
                "and by finish reason, error code, or `ok`."
            },
        ),
        *_table(
            "counter",
            ("tenant", "reason"),
            {
                "rtcache_cache_requests_total": "Admitted requests by what the cache did for them: "
                "`hit`, or why not."
            },
        ),
        *_table(
            "counter",
            (),
            {
                "rtcache_arrived_requests_total": "Requests the engine was handed.",
                "rtcache_late_cancels_total": "Cancels of requests that were unknown or had ended.",
            },
        ),
        *_table(
            "counter",
            ("outcome",),
            {"rtcache_engine_requests_total": "Requests the engine is done with, by outcome."},
        ),
        *_table(
            "counter",
            ("reason",),
            {
                "rtcache_cancelled_requests_total": "Those cancelled, by reason.",
                "rtcache_recomputed_requests_total": "How often a request was computed again, by "
                "reason.",
            },
        ),
        # -- the cache ------------------------------------------------------------------------
        *_table(
            "gauge",
            ("tenant", "state"),
            {
                "rtcache_kv_blocks": "Blocks: `live` (held), `cached` (can be evicted), `free`; "
                "they add up to all."
            },
        ),
        *_table(
            "gauge",
            _TENANT,
            {
                "rtcache_kept_blocks": "Live blocks that registrations, pins and leases hold.",
                "rtcache_registered_prefixes": "Registrations.",
                "rtcache_pins": "Pins and leases.",
            },
        ),
        *_table(
            "gauge",
            (),
            {
                "rtcache_block_size_tokens": "Tokens of a block.",
                "rtcache_block_bytes": "Device memory of a block (bytes).",
            },
        ),
        *_table(
            "counter",
            ("tenant", "reason"),
            {"rtcache_evicted_blocks_total": "Evicted blocks by reason."},
        ),
        *_table(
            "counter",
            _TENANT,
            {
                "rtcache_evicted_unused_blocks_total": "Evicted blocks that were never reused.",
                "rtcache_inserted_blocks_total": "Blocks that entered the index.",
                "rtcache_superseded_blocks_total": "Partly filled blocks given up for one that "
                "goes on from them.",
                "rtcache_duplicate_blocks_total": "Blocks computed twice.",
                "rtcache_dropped_blocks_total": "Blocks given up because their step failed or gave "
                "bad logits.",
                "rtcache_damaged_blocks_total": "Blocks given up because `verify` found their KV "
                "damaged.",
                "rtcache_collisions_total": "Blocks kept out because another has their digest.",
                "rtcache_failed_lookups_total": "Lookups that failed and were taken for misses: a "
                "bug.",
                "rtcache_copied_tokens_total": "Hit tokens whose KV was copied inside the pool.",
                "rtcache_rounded_tokens_total": "Tokens that were cached and not reused because of "
                "deterministic mode.",
            },
        ),
        *_table(
            "histogram",
            _TENANT,
            {
                "rtcache_prefix_reuse_gap_seconds": "How long a prefix had not been used when a "
                "request found it (seconds)."
            },
        ),
        # -- steps and the device ---------------------------------------------------------------
        *_table(
            "histogram",
            ("role",),
            {
                "rtcache_step_seconds": "Steps that did not fail, from the decision to their "
                "results (seconds)."
            },
        ),
        *_table(
            "gauge", (), {"rtcache_step_in_flight": "1 while the device is at work, 0 if idle."}
        ),
        *_table(
            "counter",
            ("role",),
            {
                "rtcache_steps_total": "Steps that were started.",
                "rtcache_device_steps_total": "Steps that the device has done.",
                "rtcache_device_appended_rows_total": "Token rows computed and put into the pool.",
                "rtcache_device_padded_rows_total": "Token rows computed for nothing, because "
                "gears are larger than batches.",
                "rtcache_device_copied_rows_total": "Token rows copied inside the pool.",
            },
        ),
        *_table(
            "counter",
            (),
            {
                "rtcache_failed_steps_total": "Steps that failed.",
                "rtcache_hung_steps_total": "Those of them that did not end in time.",
                "rtcache_prefill_tokens_total": "Tokens computed in prefill.",
                "rtcache_decode_tokens_total": "Answer tokens fed back.",
                "rtcache_device_probes_total": "How often the device was asked whether it works.",
                "rtcache_device_failed_probes_total": "Those that it did not pass.",
            },
        ),
        *_table(
            "gauge",
            ("kind",),
            {
                "rtcache_device_memory_bytes": "Device memory: `free` and `total` as the driver "
                "says, `loaded` by this daemon, `planned` for it (bytes)."
            },
        ),
        *_table(
            "gauge",
            (),
            {
                "rtcache_device_memory_low": "1 if less is free than device.low_memory_mb, else 0.",
            },
        ),
        # -- sockets ----------------------------------------------------------------------------
        *_table(
            "counter",
            _SOCKET,
            {
                "rtcache_ipc_received_messages_total": "Messages that came, bad ones included.",
                "rtcache_ipc_sent_messages_total": "Messages handed to ZeroMQ.",
                "rtcache_ipc_handler_errors_total": "Messages that failed in the daemon: bugs.",
                "rtcache_ipc_clients_gone_total": "Connections that have ended.",
                "rtcache_ipc_connections_cut_total": "Connections that were cut because there were "
                "too many.",
                "rtcache_ipc_unreachable_replies_total": "Replies to clients that had gone.",
                "rtcache_ipc_slow_readers_total": "How often a client did not read its replies.",
                "rtcache_ipc_parked_replies_total": "Replies that were kept for such a client.",
                "rtcache_ipc_dropped_replies_total": "Replies to such a client that were too many, "
                "or that it never took.",
            },
        ),
        *_table(
            "gauge",
            _SOCKET,
            {
                "rtcache_ipc_connections": "Connections that have sent something and are still "
                "there.",
                "rtcache_ipc_waiting_replies": "Replies that are kept for clients that do not "
                "read.",
            },
        ),
        *_table(
            "counter",
            (*_SOCKET, "code"),
            {"rtcache_ipc_refused_messages_total": "Messages the socket refused, by error code."},
        ),
    )
)
