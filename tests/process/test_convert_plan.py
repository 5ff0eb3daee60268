"""`rtcache-convert --plan`: a table for people, one object for programs, and no weights read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from om_models.bundle import load_bundle
from om_models.memory_plan import plan_memory
from tests.support.tiny import tiny_spec, write_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf
from tools.convert_model import main

CARD = ("--target", "ascend", "--soc-version", "Ascend310P3")


def plan_of(capsys: pytest.CaptureFixture[str], source: Path | str, *words: str) -> dict[str, Any]:
    assert main([str(source), "--plan", "--json", *words]) == 0
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(printed)
    assert printed.count("\n") == 1, "one line, one object"
    return found


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    """A checkpoint's directory before the weights have been fetched."""
    path = write_checkpoint(tmp_path / "tiny")
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    return path


def test_the_table_fits_a_terminal(
    config_alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([str(config_alone), "--plan", *CARD]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "tiny: float16, fused, context 512 tokens"
    first_column = [line for line in lines if line.startswith("  ") and line[2:3].strip()]
    rows = dict(line.strip().split(None, 1) for line in first_column)
    assert rows["device"].strip() == "Ascend310P3, 24.00 GiB"
    assert rows["KV"].split()[:4] == ["pool", "4.00", "GiB:", "16777152"]
    assert "8 x 1 @ 512" in "\n".join(lines)
    assert "subgraphs: 8 (of at most 100 a model); small 3, balanced 8, fine 40" in lines
    assert "files: model.om" in lines


def test_the_same_for_programs(config_alone: Path, capsys: pytest.CaptureFixture[str]):
    found = plan_of(capsys, config_alone, *CARD, "--kv-tokens", "8256", "--gears", "small")
    assert (found["soc_version"], found["dtype"], found["context"]) == (
        "Ascend310P3",
        "float16",
        512,
    )
    assert (found["kv_tokens"], found["prefixes_of_4096"], found["concurrent_requests"]) == (
        8192,
        2,
        16,
    )
    parts = ("system", "weights", "kv", "staging")
    total = sum(found[f"{part}_bytes"] for part in parts) + found["workspace_bytes_estimated"]
    assert found["needed_bytes"] == total
    assert found["free_bytes"] == (24 << 30) - total
    assert found["fits"] is True
    assert [gear["chunk"] for gear in found["gears"]] == [128, 1, 1]
    assert found["subgraphs"] == 3


def test_a_split_model_names_both_files(config_alone: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(config_alone), "--plan", *CARD, "--layout", "split"]) == 0
    assert "files: prefill.om, decode.om" in capsys.readouterr().out


def test_what_does_not_fit(config_alone: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--target", "ascend", "--soc-version", "Ascend310B4", "--kv-capacity", "5GiB")
    words += ("--device-memory", "4GiB")
    assert main([str(config_alone), "--plan", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "left nothing: " in printed
    assert "too much for Ascend310B4: --kv-capacity" in printed
    assert "this board's one memory also serves the host" in printed
    found = plan_of(capsys, config_alone, *words)
    assert found["fits"] is False
    assert found["free_bytes"] < 0


def test_a_device_whose_memory_only_the_user_knows(
    config_alone: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("--target", "ascend", "--soc-version", "Ascend310B1")
    found = plan_of(capsys, config_alone, *words)
    assert (found["device_bytes"], found["free_bytes"], found["fits"]) == (None, None, None)
    assert any("give --device-memory" in note for note in found["notes"])
    found = plan_of(capsys, config_alone, *words, "--device-memory", "16GiB")
    assert found["device_bytes"] == 16 << 30
    assert found["fits"] is True


def test_other_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gguf = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec())
    checkpoint = write_checkpoint(tmp_path / "tiny")
    assert plan_of(capsys, gguf) == plan_of(capsys, checkpoint)
    assert plan_of(capsys, "null")["kv_bytes"] == 8 << 20


def test_an_export_and_the_bundle_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint, export = write_checkpoint(tmp_path / "tiny"), str(tmp_path / "export")
    words = ("--kv-tokens", "256", "--gears", "prefill=8@32,64 decode=1,2@32,64")
    assert main([str(checkpoint), "--output", export, "--export-only", *words]) == 0
    assert main([export, "--output", str(tmp_path / "bundle"), "--from-export"]) == 0
    capsys.readouterr()
    found = plan_of(capsys, export, "--from-export")
    assert found == plan_of(capsys, checkpoint, *words)
    manifest = load_bundle(tmp_path / "bundle").manifest
    assert plan_memory(manifest, manifest.model).needed_bytes == found["needed_bytes"]


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "nothing"), "--plan"]) == 1
    assert "nothing" in capsys.readouterr().err
    checkpoint = write_checkpoint(tmp_path / "tiny")
    assert main([str(checkpoint), "--plan", "--target", "ascend"]) == 1
    assert "needs --soc-version" in capsys.readouterr().err


def test_it_writes_nothing(config_alone: Path, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    assert main([str(config_alone), "--plan", "--output", str(tmp_path / "bundle")]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_plan_an_output_is_needed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["null"])
    assert caught.value.code == 2
    assert "required: --output" in capsys.readouterr().err
