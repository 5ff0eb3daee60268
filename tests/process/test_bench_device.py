"""`rtcache-bench device` on the software device: what it counts, names and writes; not how fast."""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from om_models.bundle import load_bundle
from om_models.manifest import Gear, Manifest
from runtime_cache.errors import DeviceError
from tests.support.rtcached import run
from tools.bench import device, device_probes, device_report
from tools.bench import main as device_main
from tools.bench.device_probes import LEAST_RUNS, MOST_RUNS, Prompt, _runs, repeat

FIGURE = {"median", "min", "max", "runs"}
KEYS = {"benchmark", "version", "commit", "device", "bundle", "bundle_digest", "host"}
KEYS |= {"latency_us", "copies", "small_copies", "load_s", "steps", "gather", "first_token"}
KEYS |= {"not_measured"}


def bench(directory: Path, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """Runs it as a process; its result, and the lines of the file for people."""
    ended = run("tools.bench.main", "device", "--json", "--output", str(directory), *flags)
    assert ended.code == 0, ended.complaint
    (line,) = ended.out.splitlines()
    result = json.loads(line)
    written = json.loads((directory / "rtcache-device-report.json").read_text())
    assert written == {key: result[key] for key in written}
    lines = (directory / "rtcache-device-report.txt").read_text().splitlines()
    assert all(line in ended.complaint for line in lines)
    return result, lines


def here(bundle: Path | None, directory: Path, seconds: int, device_name: str = "sim:0") -> Any:
    """Runs it in this process."""
    parser = argparse.ArgumentParser()
    device.add_flags(parser)
    args = parser.parse_args(["--device", device_name, "--output", str(directory)])
    args.bundle, args.seconds = bundle, seconds
    return device.run(args, Console(file=io.StringIO()))


def wanted_steps(manifest: Manifest) -> Counter[tuple[Any, ...]]:
    """Every gear with its past scattered, the longest ones once more with it in a row."""
    longest = manifest.max_model_len
    return Counter(
        (role, gear.batch, gear.chunk, gear.past, slots)
        for role, gears in (("prefill", manifest.prefill_gears), ("decode", manifest.decode_gears))
        for gear in gears
        for slots in (("scattered", "in a row") if gear.past == longest else ("scattered",))
    )


def test_the_command(null_bundle: Path, tmp_path: Path):
    result, lines = bench(tmp_path, "--bundle", str(null_bundle), "--seconds", "1")
    assert set(result) == KEYS
    figures = [*result["latency_us"].values(), *(step["ms"] for step in result["steps"])]
    figures += [copy["us"] for copy in result["copies"]]
    assert all(set(one) == FIGURE for one in figures)
    assert all(LEAST_RUNS <= one["runs"] <= MOST_RUNS for one in figures)
    assert all(0 < one["min"] <= one["median"] <= one["max"] for one in figures)
    assert {"soc", "run_mode", "memory_total_bytes", "cann", "driver"} <= set(result["host"])
    # A line that is passed on alone says where it comes from.
    assert all(line.startswith(f"sim:0 {result['host']['soc']}: ") for line in lines)
    assert "the software device: a host's CPU, whose times say nothing of a card" in lines[0]


def test_what_is_measured(null_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_probes, "MOST_RUNS", LEAST_RUNS)
    result = here(null_bundle, tmp_path, 3600)
    assert result["not_measured"] == []
    assert set(result["latency_us"]) == {"wait", "upload", "download", "move"}
    sizes = [(c["direction"], c["bytes"]) for c in result["copies"]]
    ways = ("upload", "download", "move")
    assert sizes == [(way, size) for size in device.COPY_BYTES for way in ways]
    moves = [(c["copies"], c["bytes"]) for c in result["small_copies"]]
    assert moves == [(count, 128) for count in device.NUM_COPIES]
    keys = ("role", "batch", "chunk", "past", "slots")
    found = Counter(tuple(step[key] for key in keys) for step in result["steps"])
    assert found == wanted_steps(load_bundle(null_bundle, verify=False).manifest)
    first = result["first_token"]
    assert (first["prompt_tokens"], first["shared_tokens"]) == (550, 500)
    assert first["cold_ms"]["runs"] == first["hit_ms"]["runs"] == LEAST_RUNS


def test_without_time_it_says_what_is_missing(null_bundle: Path, tmp_path: Path):
    result = here(null_bundle, tmp_path, 0)
    steps = wanted_steps(load_bundle(null_bundle, verify=False).manifest).total()
    copies = 4 + 3 * len(device.COPY_BYTES) + len(device.NUM_COPIES)
    # Loading does not count, so that a slow load does not leave a model unmeasured.
    assert len(result["not_measured"]) in range(copies, copies + steps + 3)
    assert "64 moves: out of time" in result["not_measured"]
    assert (result["latency_us"], result["copies"], result["small_copies"]) == ({}, [], [])


def test_a_device_that_fails_leaves_what_was_measured(
    null_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object, **kwargs: object) -> None:
        raise DeviceError("the card fell out")

    monkeypatch.setattr(device.Executor, "open", fail)
    monkeypatch.setattr(device_probes, "MOST_RUNS", LEAST_RUNS)
    with pytest.raises(DeviceError, match="fell out"):
        here(null_bundle, tmp_path, 3600)
    written = json.loads((tmp_path / "rtcache-device-report.json").read_text())
    assert written["failed"] == "the card fell out"
    assert len(written["copies"]) == 3 * len(device.COPY_BYTES)
    text = (tmp_path / "rtcache-device-report.txt").read_text()
    assert (
        text.splitlines()[-1] == f"sim:0 {written['host']['soc']}: ended early: the card fell out"
    )


def test_a_card_that_is_not_there(tmp_path: Path):
    ended = run("tools.bench.main", "device", "--device", "npu:0", "--output", str(tmp_path))
    assert (ended.code, ended.out) == (1, "")
    assert "pyACL cannot be imported" in ended.complaint
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_only_serves(tmp_path: Path):
    """It has neither ONNX nor ONNX Runtime, and needs none for its card."""
    (tmp_path / "packages").mkdir()
    for name in ("onnx", "onnxruntime"):
        text = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
        (tmp_path / f"packages/{name}.py").write_text(text)
    flags = ("device", "--seconds", "1", "--output", str(tmp_path / "out"))
    env = {"PYTHONPATH": str(tmp_path / "packages")}
    ended = run("tools.bench.main", *flags, "--device", "npu:0", env=env)
    assert (ended.code, "pyACL cannot be imported" in ended.complaint) == (1, True)
    ended = run("tools.bench.main", *flags, env=env)
    assert (ended.code, "install runtime-cache[sim,convert,bench]" in ended.complaint) == (1, True)


@pytest.mark.parametrize("has_bundle", [False, True])
def test_through_a_module_called_acl(null_bundle: Path, tmp_path: Path, has_bundle: bool):
    """As on a card; and it does nothing that a card would not forgive."""
    flags = ("--device", "npu:0", "--seconds", "1", "--output", str(tmp_path))
    bundle = ("--bundle", str(null_bundle)) if has_bundle else ()
    program = ("runtime_cache.aclsim", "run", str(device_main.__file__))
    patient = {"RTCACHE_ACLSIM_GIL_LIMIT_MS": "600000"}
    ended = run(*program, "device", *flags, *bundle, env=patient)
    assert ended.code == 0, ended.complaint
    assert ended.complaint.endswith(" calls, and nothing that a card would not forgive")
    result = json.loads(ended.out.splitlines()[-1])
    assert result["device"] == "npu:0"
    assert ("steps and first tokens: no --bundle" in result["not_measured"]) != has_bundle
    assert has_bundle == (result["load_s"] is not None)


@pytest.mark.parametrize(
    ("max_tokens", "prompt"),
    [(2048, Prompt(550, 500)), (551, Prompt(550, 500)), (550, Prompt(549, 499)), (2, Prompt(1, 0))],
)
def test_the_prompt_fits_the_bundle(max_tokens: int, prompt: Prompt):
    assert Prompt.fitting(max_tokens) == prompt


def test_the_gears_that_tell_the_most_come_first():
    prefill = [Gear(1, chunk, past) for chunk in (8, 16, 32) for past in (64, 128, 256)]
    decode = [Gear(batch, 1, past) for batch in (1, 4) for past in (64, 256)]
    ordered = device.corners_first({"prefill": prefill, "decode": decode})
    assert len(ordered) == 13
    assert ordered[:4] == [("prefill", Gear(1, *shape)) for shape in CORNERS]
    assert ordered[4:8] == [("decode", gear) for gear in decode]


CORNERS = [(8, 64), (8, 256), (32, 64), (32, 256)]


def test_a_first_run_does_not_count():
    calls: list[int] = []
    assert len(repeat(lambda: calls.append(1), 0.0)) == LEAST_RUNS == len(calls) - 1
    assert len(repeat(lambda: None, 60.0)) == MOST_RUNS


def test_appends_are_cut_where_blocks_end():
    slots = np.array([6, 7, 8, 9, 3, 4], np.int32)
    assert _runs(slots, 4) == ((6, 2), (8, 2), (3, 1), (4, 1))


def test_what_a_past_slot_costs():
    report = device_report.Report("sim:0", Console(file=io.StringIO()))
    for past, ms in ((64, 1.0), (512, 1.5), (2048, 2.984)):
        report.add_step("decode", Gear(4, 1, past), [ms / 1000], is_scattered=True)
    report.add_step("decode", Gear(4, 1, 2048), [9.0], is_scattered=False)
    report.add_step("prefill", Gear(1, 8, 64), [1.0], is_scattered=True)
    report.note_gather()
    # 1.984 ms for 4 · 1984 slots.
    cost = {"role": "decode", "batch": 4, "chunk": 1, "us_per_1000_slots": 250.0}
    assert report.result()["gather"] == [cost]
