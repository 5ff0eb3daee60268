"""ATC's command line, and what happens when the compiler is missing or fails."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from om_models import atc
from om_models.atc import (
    atc_arguments,
    check_soc_version,
    compiler,
    dynamic_dims,
    find_compiled,
    input_shape,
    run_atc,
    shell_script,
)
from om_models.contract import GraphContract
from om_models.manifest import FORMAT, Gear, KvSpec, Manifest, OmFile
from runtime_cache.errors import ConversionError
from tests.support.tiny import BASE_SPEC

KV = KvSpec(dtype="float16", num_slots=128, num_groups=2, layers_per_group=1, row_elements=32)
PREFILL = (Gear(1, 16, 64), Gear(1, 16, 128))
DECODE = (Gear(1, 1, 128), Gear(8, 1, 128))
OM = OmFile(path="model.om", prefill=PREFILL, decode=DECODE)
MANIFEST = Manifest(
    format=FORMAT,
    name="m",
    digest="00",
    target="ascend",
    soc_version="Ascend310B4",
    layout="fused",
    dtype="float16",
    index_dtype="int32",
    model=BASE_SPEC,
    kv=KV,
    oms=(OM,),
    bos_token_id=None,
    eos_token_ids=(),
    chat_template=None,
    files={},
    made_by={},
)


def test_the_command_line_is_exactly_this():
    assert atc_arguments(MANIFEST, OM, "/x/model.onnx", "/y/model") == [
        "--framework=5",
        "--model=/x/model.onnx",
        "--output=/y/model",
        "--input_format=ND",
        "--input_shape=input_ids:-1,-1;position_ids:-1,-1;past_rows:-1,-1;mask:-1,1,-1,-1;last:-1;"
        "kv_pool_0:256,32;kv_pool_1:256,32",
        "--dynamic_dims=1,16,1,16,1,64,1,16,80,1;1,16,1,16,1,128,1,16,144,1;"
        "1,1,1,1,1,128,1,1,129,1;8,1,8,1,8,128,8,1,129,8",
        "--soc_version=Ascend310B4",
        "--precision_mode=must_keep_origin_dtype",
        "--log=error",
    ]


def test_every_gear_gives_a_value_for_every_free_dimension():
    inputs = GraphContract.of(MANIFEST).inputs
    num_free = input_shape(inputs, PREFILL).count("-1")
    gears = dynamic_dims(inputs, PREFILL).split(";")
    assert [len(gear.split(",")) for gear in gears] == [num_free] * len(PREFILL)


def test_a_single_gear_is_compiled_as_a_fixed_shape():
    om = OmFile(path="prefill.om", prefill=(Gear(1, 16, 64),), decode=())
    arguments = atc_arguments(MANIFEST, om, "m.onnx", "prefill")
    assert arguments[4] == (
        "--input_shape=input_ids:1,16;position_ids:1,16;past_rows:1,64;mask:1,1,16,80;last:1;"
        "kv_pool_0:256,32;kv_pool_1:256,32"
    )
    assert not any(argument.startswith("--dynamic_dims") for argument in arguments)


def test_both_targets_get_the_same_command_line():
    sim = msgspec.structs.replace(MANIFEST, target="sim")
    assert atc_arguments(sim, OM, "a", "b") == atc_arguments(MANIFEST, OM, "a", "b")


def test_the_script_quotes_what_the_shell_would_split():
    script = shell_script("ascend", [["--model=a b.onnx", "--input_shape=x:1;y:2"]])
    assert script.splitlines()[:3] == ["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"']
    assert shlex.split(script.splitlines()[3]) == [
        "atc",
        "--model=a b.onnx",
        "--input_shape=x:1;y:2",
    ]


def test_the_script_calls_the_compiler_of_its_target():
    line = shell_script("sim", [["--model=m.onnx"]]).splitlines()[3]
    assert line == "python3 -m runtime_cache.aclsim atc --model=m.onnx"


def test_a_soc_that_the_software_device_does_not_know():
    check_soc_version("sim", "Ascend310P3")
    check_soc_version("ascend", "Ascend999")  # the real compiler will say
    with pytest.raises(ConversionError, match=r"Ascend999 is not known .*; known: .*Ascend310P3"):
        check_soc_version("sim", "Ascend999")


def test_compiler_of_the_software_device():
    assert compiler("sim") == [sys.executable, "-m", "runtime_cache.aclsim", "atc"]


def test_a_missing_atc_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConversionError, match=r"source set_env\.sh of CANN, or use --export-only"):
        compiler("ascend")


def test_the_real_atc_is_taken_from_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = run_fake(tmp_path, monkeypatch, 'echo "args: $*"; pwd; touch kernel_meta')
    assert lines[0] == "args: --model=a b"
    assert not (Path.cwd() / "kernel_meta").exists()
    assert not Path(lines[1]).exists(), "the compiler's litter is removed"


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = "for i in $(seq 30); do echo line $i; done; echo E10036 >&2; exit 3"
    with pytest.raises(ConversionError) as caught:
        run_fake(tmp_path, monkeypatch, script)
    shown = caught.value.message.splitlines()
    assert shown[0] == "atc failed with exit code 3:"
    assert shown[1] == "line 17"
    assert shown[-1] == "E10036"


def run_fake(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Run a shell script in ATC's place; returns the lines it printed."""
    program = directory / "atc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(atc.shutil, "which", lambda name: str(program))
    lines: list[str] = []
    run_atc("ascend", ["--model=a b"], directory, lines.append)
    return lines


def test_the_software_compiler_refuses_what_atc_refuses(tmp_path: Path):
    with pytest.raises(ConversionError, match=r"E10007"):
        run_atc("sim", ["--framework=5"], tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_what_atc_wrote_is_found(tmp_path: Path):
    assert find_compiled(tmp_path, OM) is None
    (tmp_path / "model_linux_aarch64.om").touch()
    assert find_compiled(tmp_path, OM) == tmp_path / "model_linux_aarch64.om"
    (tmp_path / "model_linux_x86_64.om").touch()
    with pytest.raises(ConversionError, match=r"several of model\.om: .*aarch64.*x86_64"):
        find_compiled(tmp_path, OM)
    (tmp_path / "model.om").touch()
    assert find_compiled(tmp_path, OM) == tmp_path / "model.om"
