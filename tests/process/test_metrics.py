"""A daemon's metrics and log as an operator meets them: scraped live, read line by line."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from ipc.handler import Counters
from ipc.sync_client import Client
from runtime_cache.config import Config
from runtime_cache.engine.snapshot import EngineCounters
from runtime_cache.errors import RuntimeCacheError
from runtime_cache.metrics.definitions import DEFINITIONS, Definition
from runtime_cache.metrics.samples import DEFAULT_LABEL, SOCKET_COUNTERS
from tests.support import scrape
from tests.support.rtcached import RawClient, run, wait_until_idle
from tests.support.scrape import ADDED_LABELS, ADDED_SERIES, Query, value
from tools.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
ROW = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \| ([^|]*)\| (.*) \|$", re.MULTILINE)
#: An option that a text names; not a file's name.
OPTION = re.compile(r"(?<!/)\b(cache|engine|device|ipc)\.([a-z_]+)")
PROMPT = "You are a help desk. " * 10  # 210 tokens
TENANT = """
[[tenants]]
name = "team"
endpoint = "ipc://{directory}/team"
share_percent = 10
"""
#: Metric → the field of a line of the log that it adds up.
PROMPT_METRICS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prompt_tokens_cached_total": "cached_tokens",
}
#: Series of prometheus-client about the process.
PROCESS = {
    *("process_cpu_seconds_total", "process_open_fds", "process_max_fds"),
    *("process_resident_memory_bytes", "process_virtual_memory_bytes"),
    "process_start_time_seconds",
}


@dataclass
class Watched:
    """A daemon that has seen some traffic and is idle.

    Attributes:
        done: the lines `request_done` of its log.
        stats: what an operator gets at the same time.
    """

    address: str
    families: dict[str, Metric]
    stats: dict[str, Any]
    done: list[dict[str, Any]]
    log: str


def make_traffic(daemon: DaemonProcess, team: str) -> None:
    """Hits and misses of two tenants, registrations, evictions, refusals, a cancel."""
    greedy = {"temperature": 0, "ignore_eos": True}
    with RawClient(daemon.endpoint) as client, RawClient(team) as other:
        for number in range(3):
            client.ask(type="generate", id=f"a{number}", prompt=PROMPT, max_tokens=5, **greedy)
        for number in range(15):  # more than its share holds
            other.ask(type="generate", id=f"b{number}", prompt=f"{number}" * 90, max_tokens=2)
        client.ask(type="register", id="r", text=PROMPT)
        assert client.ask(type="generate", id="long", prompt_ids=[1] * 5000)["code"] == "too_long"
        assert client.ask(type="nonsense", id="n")["code"] == "unknown_type"
        assert client.ask(type="release", id="x", prefix_id="p-none")["code"] == "unknown_prefix"
        client.send(type="generate", id="c", prompt="x", max_tokens=4000, **greedy)
        assert client.receive()["type"] == "tokens"
        client.send(type="cancel", id="cc", target="c")
        while client.receive()["type"] != "done":
            pass


@pytest.fixture(scope="module")
def watched(null_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    directory = tmp_path_factory.mktemp("watched")
    config = directory / "rtcached.toml"
    config.write_text(TENANT.format(directory=directory))
    options = {"config": str(config), "metrics_listen": "127.0.0.1:0"}
    with DaemonProcess(null_bundle, "sim:0", **options) as daemon:
        address = daemon.wait_for("metrics_listening")["address"]
        make_traffic(daemon, f"ipc://{directory}/team")
        with Client(daemon.admin_endpoint) as admin:
            wait_until_idle(admin)
            families, stats = scrape.scrape(address), admin.stats()
        lines = scrape.get(address, "/health").text.splitlines()
        assert lines == ["serving", *(f"warning: {text}" for text in stats["warnings"])]
        assert scrape.get(address, "/ready").status == 200
    done = [event for event in daemon.events if event.get("event") == "request_done"]
    log = "\n".join(map(json.dumps, daemon.events))
    return Watched(address, families, stats, done, log)


# -- what is there ------------------------------------------------------------------------------


def test_every_metric_is_scraped_as_it_is_defined(watched: Watched) -> None:
    names = {name.removesuffix("_total") for name in DEFINITIONS}
    # Nothing has a device refused yet, so some families have no samples.
    assert {name for name in watched.families if not name.startswith("process_")} == names
    for definition in DEFINITIONS.values():
        family = watched.families[definition.name.removesuffix("_total")]
        assert family.type == definition.kind
        assert family.documentation == definition.meaning
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(definition.labels)


def test_every_metric_has_a_value_after_a_little_traffic(watched: Watched) -> None:
    empty = [name for name, family in watched.families.items() if not family.samples]
    assert empty == []
    assert set(scrape.series_of(watched.families)) >= PROCESS


def test_the_page_lists_the_metrics() -> None:
    found = [
        Definition(name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)  # type: ignore[arg-type]
        for name, kind, labels, meaning in ROW.findall(PAGE)
    ]
    assert len(found) == len(set(found))
    assert {one.name: one for one in found} == DEFINITIONS
    assert {name for name in PROCESS if f"`{name}`" in PAGE} == PROCESS


def test_names_have_units_and_kinds() -> None:
    for definition in DEFINITIONS.values():
        assert definition.name.startswith(("vllm:", "rtcache_"))
        assert definition.name.endswith("_total") == (definition.kind == "counter")
        assert definition.meaning.endswith(".")
        assert definition.meaning[0].isupper() or definition.meaning[0].isdigit()


def test_tenants_are_those_of_the_configuration(watched: Watched) -> None:
    for family in watched.families.values():
        tenants = {
            sample.labels["tenant"] for sample in family.samples if "tenant" in sample.labels
        }
        assert tenants <= {DEFAULT_LABEL, "team"}


@pytest.mark.parametrize(
    "query", scrape.dashboard_queries(), ids=lambda query: query.where.replace(" ", "_")
)
def test_the_dashboard_asks_for_what_there_is(watched: Watched, query: Query) -> None:
    check_query(query.text, watched)


@pytest.mark.parametrize("rule", scrape.alert_rules(), ids=lambda rule: rule["alert"])
def test_the_alerts_ask_for_what_there_is(watched: Watched, rule: dict[str, Any]) -> None:
    check_query(rule["expr"], watched)
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    for option in re.findall(
        r"(?<!/)\b((?:cache|engine|device|ipc)\.[a-z_]+)", str(rule["annotations"])
    ):
        section, key = option.split(".")
        assert hasattr(getattr(Config(), section), key), option


def check_query(text: str, watched: Watched) -> None:
    """All series and labels of the query exist in the scrape."""
    series = scrape.series_of(watched.families)
    asked = scrape.asked_by(text)
    assert asked.series
    for name, labels in asked.series.items():
        if name not in ADDED_SERIES:
            assert labels <= series[name] | ADDED_LABELS, name
    known = {label for name in asked.series for label in series.get(name, ())}
    assert asked.labels <= known | ADDED_LABELS


def test_alerts_name_error_codes_that_exist() -> None:
    codes = {kind.code for kind in all_errors(RuntimeCacheError)}
    (rule,) = [rule for rule in scrape.alert_rules() if "outcome=~" in rule["expr"]]
    wanted = re.search(r'outcome=~"([^"]+)"', rule["expr"])
    assert wanted is not None
    assert set(wanted[1].split("|")) <= codes


def all_errors(kind: type[RuntimeCacheError]) -> Iterator[type[RuntimeCacheError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from all_errors(each)


# -- whether it is true -------------------------------------------------------------------------


def test_metrics_say_what_stats_say(watched: Watched) -> None:
    families, stats = watched.families, watched.stats
    cache = stats["cache"]
    assert value(families, "vllm:prefix_cache_hits_total") == cache["hit_tokens"]
    assert value(families, "vllm:prefix_cache_queries_total") == cache["queried_tokens"]
    for reason, number in cache["evicted_by"].items():
        found = value(families, "rtcache_evicted_blocks_total", reason=reason)
        assert found == number
    assert cache["evicted_by"]["need"] > 0
    for name in ("vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds"):
        assert value(families, f"{name}_count") == cache["evicted_blocks"]
    assert value(families, "rtcache_prefix_reuse_gap_seconds_count") == cache["reuses"]
    for state in ("live", "cached", "free"):
        found = value(families, "rtcache_kv_blocks", state=state)
        assert found == stats["pool"][f"{state}_blocks"]
    engine = stats["engine"]
    assert value(families, "rtcache_prefill_tokens_total") == engine["prefill_tokens"]
    assert value(families, "vllm:generation_tokens_total") == engine["answer_tokens"]
    assert value(families, "rtcache_state", state="serving") == 1
    assert value(families, "rtcache_state") == 1


def test_every_counter_of_the_engine_is_a_metric(watched: Watched) -> None:
    engine = watched.stats["engine"]
    outcomes = ("refused", "finished", "cancelled", "expired", "failed", "registered")
    found = {
        name: value(watched.families, "rtcache_engine_requests_total", outcome=name)
        for name in outcomes
    }
    simple = {
        "arrived": "rtcache_arrived_requests_total",
        "late": "rtcache_late_cancels_total",
        "preemptions": "vllm:num_preemptions_total",
        "failed_steps": "rtcache_failed_steps_total",
        "hung_steps": "rtcache_hung_steps_total",
        "prefill_tokens": "rtcache_prefill_tokens_total",
        "decode_tokens": "rtcache_decode_tokens_total",
        "recomputed": "rtcache_recomputed_requests_total",
    }
    found |= {name: value(watched.families, metric) for name, metric in simple.items()}
    for role in ("prefill", "decode"):
        found[f"{role}_steps"] = value(watched.families, "rtcache_steps_total", role=role)
    by_reason = {"cancelled_by", "recomputed_by"}
    assert found == {
        name: engine[name] for name in EngineCounters.__slots__ if name not in by_reason
    }


def test_every_counter_of_a_socket_is_a_metric(watched: Watched) -> None:
    assert {field.name for field in fields(Counters)} == {*SOCKET_COUNTERS, "refused"}
    for name, counters in watched.stats["ipc"].items():
        for counter, metric in SOCKET_COUNTERS.items():
            found = value(watched.families, metric, socket=name)
            # Asking for the stats was a message; and clients of before may just have been missed.
            is_late = counter == "clients_gone" or (name, counter) == ("admin", "received")
            assert found <= counters[counter] if is_late else found == counters[counter]
        for code, number in counters["refused"].items():
            metric = "rtcache_ipc_refused_messages_total"
            assert value(watched.families, metric, socket=name, code=code) == number
    assert set(watched.stats["ipc"]) == {"user", "admin", "user:team"}


def test_metrics_are_what_the_log_says_request_by_request(watched: Watched) -> None:
    families = watched.families
    ended = Counter((line["tenant"], line["kind"], line["outcome"]) for line in watched.done)
    for (tenant, kind, outcome), number in ended.items():
        labels = {"tenant": tenant or DEFAULT_LABEL, "kind": kind, "outcome": outcome}
        assert value(families, "rtcache_requests_total", **labels) == number
    assert value(families, "rtcache_requests_total") == len(watched.done)
    for tenant in ("", "team"):
        label = tenant or DEFAULT_LABEL
        mine = [line for line in watched.done if line["tenant"] == tenant]
        for metric, name in (
            ("prompt_tokens", "prompt_tokens"),
            ("prompt_tokens_cached", "cached_tokens"),
        ):
            total = sum(line.get(name, 0) for line in mine)
            assert value(families, f"vllm:{metric}_total", tenant=label) == total
        answered = [line for line in mine if line["outcome"] in ("length", "stop")]
        count = value(families, "vllm:e2e_request_latency_seconds_count", tenant=label)
        assert count == len(answered)
        parts = ("request_prefill_time", "request_decode_time")
        found = sum(value(families, f"vllm:{p}_seconds_sum", tenant=label) for p in parts)
        spent_s = sum(line["total_ms"] - line["queue_ms"] for line in answered) / 1000
        assert found == pytest.approx(spent_s, abs=1e-5 * len(answered))
        first = [line for line in mine if "ttft_ms" in line]
        assert value(families, "vllm:time_to_first_token_seconds_count", tenant=label) == len(first)
        seconds = sum(line["ttft_ms"] for line in first) / 1000
        found = value(families, "vllm:time_to_first_token_seconds_sum", tenant=label)
        assert found == pytest.approx(seconds, abs=1e-5 * len(first))
    tokens = sum(line.get("completion_tokens", 0) for line in watched.done)
    assert value(families, "vllm:generation_tokens_total") == tokens


def test_latency_percentiles_are_in_stats(watched: Watched) -> None:
    latency = watched.stats["latency"]
    first = sorted(line["ttft_ms"] for line in watched.done if "ttft_ms" in line)
    found = latency["ttft_ms"]
    assert (found["num"], found["max"]) == (len(first), first[-1])
    assert found["p50"] == first[(len(first) + 1) // 2 - 1]
    assert first[0] <= found["p50"] <= found["p90"] <= found["p99"] <= found["max"]
    for name in ("queue_ms", "inter_token_ms", "total_ms", "prefill_step_ms", "decode_step_ms"):
        assert latency[name]["num"] > 0
    names = {*latency, *found}
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


# -- the log ------------------------------------------------------------------------------------


def test_each_request_has_one_line(watched: Watched) -> None:
    names = Counter((line["tenant"], line["message_id"]) for line in watched.done)
    expected = [("", f"a{n}") for n in range(3)] + [("team", f"b{n}") for n in range(15)]
    expected += [("", "r"), ("", "long"), ("", "x"), ("", "c")]
    assert names == Counter(expected)
    lines = {line["message_id"]: line for line in watched.done}
    first, second = lines["a0"], lines["a1"]
    assert (first["cache"], second["cache"]) == ("cold", "hit")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (210, 5)
    assert (second["cached_tokens"], second["prefilled_tokens"]) == (209, 1)
    assert first["request"] != second["request"]
    assert first["ttft_ms"] <= first["total_ms"]
    assert (lines["long"]["outcome"], lines["c"]["outcome"]) == ("too_long", "cancelled")
    assert (lines["r"]["kind"], lines["r"]["outcome"]) == ("register", "ok")
    assert (lines["x"]["kind"], lines["x"]["outcome"]) == ("release", "unknown_prefix")


def test_nothing_of_a_prompt_is_in_the_log(watched: Watched) -> None:
    assert "help desk" not in watched.log
    assert "request_text" not in watched.log


def test_prompts_are_logged_if_that_is_wanted(null_bundle: Path) -> None:
    with (
        DaemonProcess(null_bundle, "sim:0", log_prompts="true") as daemon,
        RawClient(daemon.endpoint) as client,
    ):
        done = client.ask(
            type="generate", id="a", prompt="a secret", max_tokens=3, ignore_eos=True, stream=False
        )
        line = daemon.wait_for("request_text")
    assert (line["asked"], line["message_id"]) == ({"prompt": "a secret"}, "a")
    assert line["answered"] == done["text"]


# -- the life of it -----------------------------------------------------------------------------


def test_draining_is_seen_from_outside(null_bundle: Path, slow_steps: None) -> None:
    with (
        DaemonProcess(null_bundle, "sim:0", metrics_listen="127.0.0.1:0") as daemon,
        RawClient(daemon.endpoint) as client,
    ):
        address = daemon.wait_for("metrics_listening")["address"]
        client.send(type="generate", id="a", prompt="x", max_tokens=4000, ignore_eos=True)
        assert client.receive()["type"] == "tokens"
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for("draining")
        health, ready = scrape.get(address, "/health"), scrape.get(address, "/ready")
        client.send(type="cancel", id="c", target="a")
        assert daemon.wait() == 0
    assert (health.status, ready.status) == (200, 503)
    reason = "reason: new requests are refused, 1 are unfinished"
    assert health.text.splitlines() == ready.text.splitlines() == ["draining", reason]


def test_hostile_http_does_not_stop_the_daemon(null_bundle: Path) -> None:
    with (
        DaemonProcess(null_bundle, "sim:0", metrics_listen="127.0.0.1:0") as daemon,
        RawClient(daemon.endpoint) as client,
        ExitStack() as stack,
    ):
        host, _, port = daemon.wait_for("metrics_listening")["address"].rpartition(":")
        for number in range(300):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            with suppress(ConnectionError):  # of those before, it closes the oldest
                connection.sendall(b"GET /" + b"x" * number * 100)
        done = client.ask(type="generate", id="a", prompt="x", max_tokens=3, ignore_eos=True)
        assert done["finish_reason"] == "length"
        assert scrape.get(f"{host}:{port}", "/health").status == 200
        assert value(scrape.scrape(f"{host}:{port}"), "process_open_fds") < 200
    levels = {event.get("level") for event in daemon.events}
    assert levels == {"info"}


def test_an_address_in_use_stops_the_daemon(null_bundle: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ended = run(
            "runtime_cache.daemon",
            *("--model-bundle", str(null_bundle), "--device", "sim:0"),
            *("--ipc-endpoint", f"ipc://{tmp_path}/s", "--metrics-listen", address),
        )
    assert ended.code == 2
    assert ended.complaint.startswith(f"rtcached: metrics.listen: cannot listen on {address}: ")
