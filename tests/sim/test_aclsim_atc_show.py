"""`atc --mode=1` and `--mode=6`: what an `.om` was made from, of this device and of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_cache.aclsim.atc import compiler
from tests.support.aclsim import GEARS, STATIC, add_model, compile_om
from tests.support.real_om import write_real_om

Printed = pytest.CaptureFixture[str]


def shown(path: Path, capsys: Printed) -> tuple[int, str]:
    """Exit code and output of `--mode=6`."""
    capsys.readouterr()
    return compiler.main(["--mode=6", f"--om={path}"]), capsys.readouterr().out


def as_json(source: Path, target: Path) -> dict[str, Any]:
    assert compiler.main(["--mode=1", f"--om={source}", f"--json={target}"]) == 0
    content: dict[str, Any] = json.loads(target.read_text())
    return content


def test_a_software_om_is_shown(tmp_path: Path, capsys: Printed) -> None:
    path = compile_om(tmp_path, GEARS, add_model(weight=np.zeros(1024, np.float32)))
    code, text = shown(path, capsys)
    assert code == 0
    assert "Original Atc command line: atc --framework=5 --model=model.onnx" in text
    assert "soc_version[Ascend310P3], framework_type[5]." in text
    assert "memory_size[2097152 B], weight_size[4096 B]." in text
    assert "weight_data_size[4096 B], external_weight_size[0 B]." in text
    assert "3 gears of dims" in text
    assert "the rules of ATC's ONNX parser are kept" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (STATIC, "shapes   info: static."),
        (("--input_shape=x:1~4,-1;bias:-1",), "shapes   info: dynamic, host code for linux_"),
        ((*STATIC, "--external_weight=1"), "external_weight_size[4096 B]."),
    ],
)
def test_kinds_of_models_are_told_apart(
    tmp_path: Path, capsys: Printed, flags: tuple[str, ...], words: str
) -> None:
    path = compile_om(tmp_path, flags, add_model(weight=np.zeros(1024, np.float32)))
    assert words in shown(path, capsys)[1]


def test_a_model_that_breaks_the_rules_says_so(tmp_path: Path, capsys: Printed) -> None:
    path = compile_om(tmp_path, (*STATIC, "--no-atc-rules"), add_model(opset=19))
    assert "broken (--no-atc-rules): the real ATC refuses it" in shown(path, capsys)[1]


def test_a_real_om_is_shown_by_its_header(tmp_path: Path, capsys: Printed) -> None:
    code, text = shown(write_real_om(tmp_path / "real.om"), capsys)
    assert code == 0
    assert "is the .om of a real SoC; only its header is read here" in text
    assert "compiled for Ascend310B4 by ATC 7.6.0.1.220" in text


@pytest.mark.parametrize("content", [None, b"", b"IMOD" + bytes(300), b"anything"])
def test_what_is_no_om_is_refused(tmp_path: Path, capsys: Printed, content: bytes | None) -> None:
    path = tmp_path / "x.om"
    if content is not None:
        path.write_bytes(content)
    code, text = shown(path, capsys)
    assert code == 1
    assert "E10014" in text


def test_display_model_info_shows_the_new_file(tmp_path: Path, capsys: Printed) -> None:
    compile_om(tmp_path)
    capsys.readouterr()
    flags = [f"--model={tmp_path / 'model.onnx'}", f"--output={tmp_path / 'out'}", *STATIC]
    soc = ["--framework=5", "--soc_version=Ascend310P3"]
    assert compiler.main([*soc, *flags, "--display_model_info=1"]) == 0
    assert "Display Model Info start" in capsys.readouterr().out


def test_a_software_om_becomes_json_without_its_weights(tmp_path: Path) -> None:
    path = compile_om(tmp_path, GEARS, add_model(weight=np.zeros(100_000, np.float32)))
    target = tmp_path / "om.json"
    content = as_json(path, target)
    assert content["om"]["soc_version"] == "Ascend310P3"
    assert len(content["om"]["gears"]) == 3
    nodes = content["model"]["graph"]["node"]
    assert [node["op_type"] for node in nodes] == ["Gather", "Add"]
    assert target.stat().st_size < 20_000


def test_an_onnx_model_becomes_json_too(tmp_path: Path) -> None:
    compile_om(tmp_path, STATIC, add_model(weight=np.zeros(100_000, np.float32)))
    content = as_json(tmp_path / "model.onnx", tmp_path / "m.json")
    assert content["model"]["graph"]["name"] == "add"
    assert (tmp_path / "m.json").stat().st_size < 20_000


def test_json_of_a_real_om_takes_the_real_atc(tmp_path: Path, capsys: Printed) -> None:
    path = write_real_om(tmp_path / "real.om")
    assert compiler.main(["--mode=1", f"--om={path}", f"--json={tmp_path / 'x.json'}"]) == 1
    assert "its JSON takes the atc of CANN" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


def test_json_that_cannot_be_written_is_refused(tmp_path: Path, capsys: Printed) -> None:
    path = compile_om(tmp_path)
    assert compiler.main(["--mode=1", f"--om={path}", f"--json={tmp_path / 'no' / 'x.json'}"]) == 1
    assert "--json: cannot write" in capsys.readouterr().out
