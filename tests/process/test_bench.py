"""`rtcache-bench` as a process: runs small, and reports what it promises. Nothing is timed here."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from om_models.null_model import NULL_SPEC
from runtime_cache.errors import InternalError
from tests.support.rtcached import Ended, run
from tools.bench import nohit
from tools.bench.prompts import exact_floor_tokens, shared_prompts

PROVENANCE = {"benchmark", "bundle", "commit", "device", "runs", "version"}


def last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def own_words(ended: Ended) -> list[str]:
    """What it said to people but for Matplotlib's lines on a cache of its own, which it may not
    have yet, or nowhere to keep.
    """
    foreign = re.compile("matplotlib", re.IGNORECASE)
    return [line for line in ended.complaint.splitlines() if not foreign.search(line)]


def test_ttft(null_bundle: Path, tmp_path: Path):
    sizes = ("--runs", "2", "--shared-tokens", "100", "--own-tokens", "10")
    plot = ("--plot", str(tmp_path / "ttft.svg"))
    ended = run("tools.bench.main", "ttft", "--bundle", str(null_bundle), *sizes, *plot)
    assert "Prefill of 100 + 10 tokens on sim:0" in (tmp_path / "ttft.svg").read_text()
    assert (ended.code, own_words(ended)) == (0, [])
    result = last_line(ended.out)
    times = {"cold_ttft_ms", "hit_ttft_ms", "device_cold_ms", "device_hit_ms"}
    ratios = {"daemon_ratio", "device_ratio", "kept"}
    assert set(result) == PROVENANCE | times | ratios | {"prefilled_cold", "prefilled_hit"}
    assert all(result[name] > 0 for name in times | ratios)
    # All shared tokens are found again, whatever the block size.
    assert (result["prefilled_cold"], result["prefilled_hit"]) == (110, 10)
    assert (result["benchmark"], result["device"], result["runs"]) == ("ttft", "sim:0", 2)
    assert max(map(len, ended.out.splitlines()[:-1])) <= 80


def test_workload(tmp_path: Path):
    sizes = ("--users", "20", "--turns", "3", "--shared-tokens", "100", "--own-tokens", "30")
    load = ("--runs", "2", "--at-once", "25", "--connections", "2", "--deterministic")
    plot = ("--plot", str(tmp_path / "workload.svg"))
    ended = run("tools.bench.main", "workload", *sizes, *load, *plot)
    assert (ended.code, own_words(ended)) == (0, [])
    drawn = (tmp_path / "workload.svg").read_text()
    assert "20 users × 3 prompts of 100 shared + 30 own tokens" in drawn
    result = last_line(ended.out)
    kinds = ("off", "on", "half", "deterministic")
    measured = ("prefilled", "hit_rate", "evicted_blocks", "requests_per_s")
    measured += ("ttft_p50_ms", "ttft_p99_ms")
    facts = {"users", "turns", "shared_tokens", "own_tokens", "at_once", "connections"}
    facts |= {"prompt_tokens", "floor", "exact_floor", "needed_blocks"}
    keys = {f"{name}_{kind}" for name in measured for kind in kinds}
    assert set(result) == PROVENANCE | facts | keys
    prompts = shared_prompts(
        60, num_shared=100, num_own=30, vocab_size=NULL_SPEC.vocab_size, seed=0
    )
    assert (result["prompt_tokens"], result["floor"]) == (60 * 130, 100 + 60 * 30)
    assert result["exact_floor"] == exact_floor_tokens(prompts) < result["floor"]
    # One shared block of 64; two of each prompt's own.
    assert result["needed_blocks"] == 1 + 60 * 2
    assert (result["prefilled_off"], result["hit_rate_off"]) == (60 * 130, 0)
    # To the token: nothing is lost to rounding.
    assert result["prefilled_on"] == result["exact_floor"]
    hits = 60 * 130 - result["exact_floor"]
    assert result["hit_rate_on"] == round(hits / (60 * 130), 3)
    assert result["evicted_blocks_off"] == result["evicted_blocks_on"] == 0
    # What is shared stays; only what ends share by chance may have left.
    assert result["exact_floor"] <= result["prefilled_half"] <= result["floor"]
    assert result["evicted_blocks_half"] > 30
    assert result["prefilled_on"] < result["prefilled_deterministic"] <= 60 * 130
    assert "the least there is" in ended.out
    assert max(map(len, ended.out.splitlines()[:-1])) <= 80


def test_ipc():
    sizes = ("--runs", "2", "--pings", "20", "--streams", "6", "--tokens", "40")
    ended = run("tools.bench.main", "ipc", *sizes, "--connections", "2")
    assert (ended.code, ended.complaint) == (0, "")
    result = last_line(ended.out)
    trips = {f"{who}rtt_{p}_us" for who in ("", "ceiling_") for p in ("p50", "p99")}
    figures = trips | {"client_rtt_p50_us", "tokens_per_s"}
    # So few tokens may come in one turn, and cost less processor time than the system shows.
    rough = {"ceiling_tokens_per_s", "daemon_us_per_token", "client_us_per_token"}
    facts = {"streams", "connections", "peer"}
    assert set(result) == PROVENANCE | figures | rough | facts
    assert all(result[name] > 0 for name in figures)
    assert all(result[name] >= 0 for name in rough)
    assert (result["streams"], result["connections"], result["bundle"]) == (6, 2, "null")
    assert max(map(len, ended.out.splitlines()[:-1])) <= 80


def test_index():
    sizes = ("--blocks", "8", "40", "80", "--prompt-blocks", "4", "--continuations", "30")
    ended = run("tools.bench.main", "index", "--runs", "2", "--samples", "20", "--json", *sizes)
    assert ended.code == 0
    assert "bytes of memory per cached block" in ended.complaint
    (line,) = ended.out.splitlines()
    result = json.loads(line)
    times = {"floor_ns_per_token", "hash_ns_per_token", "ns_per_token", "ns_per_token_1k"}
    times |= {"ns_per_token_1m", "p99_8k_ms", "p99_8k_ms_1k", "p99_8k_ms_1m"}
    times |= {"growth_1k_to_1m", "p99_growth_1k_to_1m", "evict_ns", "evict_ns_1m"}
    times |= {"map_ns_per_token", "map_p99_8k_ms", "radix_ns_per_token", "radix_p99_8k_ms"}
    times |= {"fanout_match_us", "fanout_us", "map_fanout_us", "radix_fanout_us"}
    tokens = {"fanout_tokens", "map_fanout_tokens", "radix_fanout_tokens"}
    facts = {"clock", "blocks", "prompt_tokens", "continuations", "bytes_per_block"}
    assert set(result) == PROVENANCE | times | tokens | facts
    assert all(result[name] > 0 for name in times)
    assert (result["blocks"], result["prompt_tokens"]) == ([8, 40, 80], 256)
    assert (result["device"], result["bundle"], result["clock"]) == ("none", "none", "cpu")
    # Both find every token; the map finds multiples of 16.
    assert result["fanout_tokens"] == result["radix_fanout_tokens"] >= 500
    assert 496 <= result["map_fanout_tokens"] < result["fanout_tokens"]


def test_index_with_a_cache_too_small_for_a_prompt():
    ended = run("tools.bench.main", "index", "--blocks", "3", "4", "5", "--prompt-blocks", "4")
    assert (ended.code, ended.out) == (1, "")
    assert ended.complaint == (
        "rtcache-bench: 3 blocks hold 0 prompts of 4 blocks; 1 to 31999 can be told apart"
    )


NOHIT = {"requests", "prompt_tokens", "answer_tokens", "at_once", "ratio", "requests_per_s_on"}
NOHIT |= {"requests_per_s_off", "cpu_ms_on", "cpu_ms_off", "cost_us", "evicted_blocks"}


def test_nohit(null_bundle: Path):
    sizes = ("--requests", "100", "--prompt-tokens", "120", "--answer-tokens", "9")
    bundle = ("--bundle", str(null_bundle))
    ended = run("tools.bench.main", "nohit", "--runs", "2", "--at-once", "5", *bundle, *sizes)
    assert (ended.code, ended.complaint) == (0, "")
    assert ended.out.startswith("bundle: ")
    result = last_line(ended.out)
    assert set(result) == PROVENANCE | NOHIT
    assert (result["bundle"], result["requests"]) == (str(null_bundle), 100)
    # 128 tokens have KV when an answer ends: two blocks. The warm-up has filled the cache.
    assert result["evicted_blocks"] == 2 * 100 * 2
    assert min(result["ratio"], result["requests_per_s_on"], result["requests_per_s_off"]) > 0


def nohit_here(*flags: str, out: io.StringIO) -> dict[str, Any]:
    """On the do-nothing model, in this process."""
    parser = argparse.ArgumentParser()
    nohit.add_flags(parser)
    args = parser.parse_args(["--null", "--runs", "1", "--answer-tokens", "1", *flags])
    return nohit.run(args, Console(file=out))


def test_nohit_on_the_null_model():
    out = io.StringIO()
    result = nohit_here("--requests", "20", "--prompt-tokens", "70", out=out)
    assert out.getvalue().startswith("bundle: null. Ceiling: 1")
    assert (result["bundle"], result["runs"], result["requests"]) == ("null", 1, 20)


def test_nohit_that_hits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nohit, "NULL_CAPACITY", 400)
    # The 258th begins with the token of the first, which is still there.
    with pytest.raises(InternalError, match=r"[1-9]\d* tokens were found in the cache"):
        nohit_here("--requests", "258", "--prompt-tokens", "8", out=io.StringIO())


@pytest.mark.parametrize("how", [(), ("--temperature", "0.8")])
def test_step(how: tuple[str, ...]):
    ended = run("tools.bench.main", "step", "--runs", "1", "--tokens", "60", "--json", *how)
    assert ended.code == 0
    assert "without the engine" in ended.complaint
    (line,) = ended.out.splitlines()
    result = json.loads(line)
    times = {f"{name}_{batch}_us" for name in ("batch", "floor") for batch in (1, 8, 16)}
    assert set(result) == PROVENANCE | times
    assert all(result[name] > 0 for name in times)
    assert (result["benchmark"], result["bundle"]) == ("step", "null")


def test_step_with_answers_that_never_meet():
    ended = run("tools.bench.main", "step", "--runs", "1", "--tokens", "2", "--json")
    assert (ended.code, ended.out) == (1, "")
    assert ended.complaint == (
        "rtcache-bench: --tokens 2 is too few: 16 answers were never all being written at once"
    )


@pytest.mark.parametrize("value", ["-0.1", "101", "nan", "hot"])
def test_wrong_temperatures(value: str):
    ended = run("tools.bench.main", "step", f"--temperature={value}")
    assert (ended.code, ended.out) == (2, "")
    assert f"'{value}' is not a number from 0 to 100" in ended.complaint


def test_without_a_bundle(tmp_path: Path):
    ended = run("tools.bench.main", "ttft", "--bundle", str(tmp_path / "none"))
    assert (ended.code, ended.out) == (1, "")
    assert f"{tmp_path}/none is not a bundle: no such directory" in ended.complaint


@pytest.mark.parametrize("flags", [("--runs", "0"), ("--own-tokens", "-1"), ("--runs", "many")])
def test_wrong_flags(flags: tuple[str, str]):
    ended = run("tools.bench.main", "ttft", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert f"'{flags[1]}' is not a whole number above 0" in ended.complaint
