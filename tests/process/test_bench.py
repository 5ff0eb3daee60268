"""`rtcache-bench` as a process: runs small, and reports what it promises. Nothing is timed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.rtcached import run

PROVENANCE = {"benchmark", "bundle", "commit", "device", "runs", "version"}


def last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_ttft(null_bundle: Path, tmp_path: Path):
    sizes = ("--runs", "2", "--shared-tokens", "100", "--own-tokens", "10")
    plot = ("--plot", str(tmp_path / "ttft.svg"))
    ended = run("tools.bench.main", "ttft", "--bundle", str(null_bundle), *sizes, *plot)
    assert "Prefill of 100 + 10 tokens on sim:0" in (tmp_path / "ttft.svg").read_text()
    assert (ended.code, ended.complaint) == (0, "")
    result = last_line(ended.out)
    times = {"cold_ttft_ms", "hit_ttft_ms", "device_cold_ms", "device_hit_ms"}
    ratios = {"daemon_ratio", "device_ratio", "kept"}
    assert set(result) == PROVENANCE | times | ratios | {"prefilled_cold", "prefilled_hit"}
    assert all(result[name] > 0 for name in times | ratios)
    # Whole blocks of 64 only: of 110 tokens, 64 are found again.
    assert (result["prefilled_cold"], result["prefilled_hit"]) == (110, 46)
    assert (result["benchmark"], result["device"], result["runs"]) == ("ttft", "sim:0", 2)
    assert max(map(len, ended.out.splitlines()[:-1])) <= 80


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
