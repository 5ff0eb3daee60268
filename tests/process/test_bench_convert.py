"""`rtcache-bench convert` on a small model: what it counts, what it leaves. Nothing is timed."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors import safe_open

from om_models.safetensors_source import SafetensorsSource
from om_models.spec import RopeScaling
from om_models.weights import check_source
from runtime_cache.errors import ConfigError, ConversionError
from tests.support.rtcached import run
from tools.bench import convert
from tools.bench.convert import parse_params
from tools.bench.synthetic import Dtype, llama_spec, num_params, write_checkpoint

SMALL = ("--params", "2M", "--runs", "2", "--json")


@pytest.mark.parametrize("target", ["ascend", "sim"])
def test_a_small_model(tmp_path: Path, target: str):
    where = ("--directory", str(tmp_path), "--target", target, "--checkpoint-dtype", "fp16")
    ended = run("tools.bench.main", "convert", *SMALL, *where)
    assert ended.code == 0
    result: dict[str, Any] = json.loads(ended.out)
    spec = llama_spec(2_000_000)
    assert result["params"] == num_params(spec) == 1_307_200
    header_bytes = result["checkpoint_bytes"] - 2 * result["params"]
    assert 0 < header_bytes < 20_000
    # float16 for a card; float32, and whole, for the software device.
    factor = 1 if target == "ascend" else 2
    assert result["output_bytes"] > factor * 2 * result["params"]
    assert 0 < result["peak_mib"] < result["aim_mib"] == 2048
    assert result["is_within_aim"] is True
    assert (result["benchmark"], result["target"], result["runs"]) == ("convert", target, 2)
    assert result["checkpoint_dtype"] == "fp16"
    assert all(result[name] > 0 for name in ("seconds", "mb_per_s", "copy_mb_per_s"))
    assert "copying" in ended.complaint
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path):
    ended = run("tools.bench.main", "convert", *SMALL, "--directory", str(tmp_path / "none"))
    assert ended.code == 1
    assert f"rtcache-bench: cannot write below {tmp_path / 'none'}: " in ended.complaint


def arguments(directory: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    convert.add_flags(parser)
    return parser.parse_args([*SMALL[:4], "--directory", str(directory)])


def test_a_conversion_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConversionError, match=r"^rtcache-convert ended with 3: no such thing$"):
        convert.run(arguments(tmp_path), Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == [program]


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needed = 2 * 2 * num_params(llama_spec(2_000_000))
    usage = shutil.disk_usage(tmp_path)
    for free, message in ((needed, "ended with"), (needed - 1, "0.0 GB free, 0.0 GB are needed")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ConversionError, match=message):
            convert.run(arguments(tmp_path), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("text", "params"), [("1", 1), ("1000", 1000), ("10K", 10_000), ("1.5m", 1_500_000)]
)
def test_numbers_of_parameters(text: str, params: int):
    assert parse_params(text) == params
    assert parse_params("1.24B") == 1_240_000_000


@pytest.mark.parametrize("text", ["", "0", "-1M", "M", "1.5", "10G", "nan", "infB", "0.0001K"])
def test_what_is_no_number_of_parameters(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 10M"):
        parse_params(text)


def test_the_default_is_llama_3_2_1b():
    spec = llama_spec(1_300_000_000)
    assert num_params(spec) == 1_235_814_400
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (2048, 16, 128256)
    assert spec.rope_scaling == RopeScaling(kind="llama3", factor=32.0)


def test_the_widest_model_that_fits():
    exact = num_params(llama_spec(100_000_000))
    assert exact <= 100_000_000
    assert llama_spec(exact) == llama_spec(100_000_000)
    assert num_params(llama_spec(exact - 1)) < exact
    with pytest.raises(ConfigError, match="the smallest model has 1,307,200 parameters"):
        llama_spec(1_307_199)


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("fp16", "F16")])
def test_a_synthetic_checkpoint_is_a_whole_one(tmp_path: Path, dtype: Dtype, stored: str):
    spec = llama_spec(2_000_000)
    notes: list[tuple[int, int]] = []
    write_checkpoint(tmp_path / "m", spec, dtype, lambda done, total: notes.append((done, total)))
    source = SafetensorsSource(tmp_path / "m")
    assert source.spec == spec
    check_source(source)
    assert notes[-1] == (2 * num_params(spec),) * 2
    name = "model.layers.3.mlp.up_proj.weight"
    with safe_open(tmp_path / "m" / "model.safetensors", framework="numpy") as file:
        assert file.get_slice(name).get_dtype() == stored
    assert 0.015 < source.get(name).astype(np.float32).std() < 0.025
