"""The software device's ATC: what it refuses and with which code, and what it writes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtime_cache.aclsim.atc import compiler
from runtime_cache.aclsim.atc.graph import read_model
from runtime_cache.aclsim.atc.options import AtcError, AtcOptions, parse_options
from runtime_cache.aclsim.om import read_om
from tests.support.aclsim import GEARS, STATIC, add_model, compile_om

SOCS = ("Ascend310P3", "Ascend910B4")


def refusal(directory: Path, flags: Sequence[str], model: onnx.ModelProto | None = None) -> str:
    """The code with which the compiler refuses; nothing may be left behind."""
    with pytest.raises(AtcError) as caught:
        compile_om(directory, flags, model)
    assert sorted(path.name for path in directory.iterdir()) == ["model.onnx"]
    return caught.value.code


# --- models ---


def test_operators_without_a_parser_are_refused(tmp_path: Path) -> None:
    model = add_model()
    model.graph.node[1].op_type = "Gelu"
    assert refusal(tmp_path, STATIC, model) == "E16002"


@pytest.mark.parametrize(("opset", "is_allowed"), [(17, True), (18, True), (19, False), (7, False)])
def test_the_opset_must_be_registered_for_every_operator(
    tmp_path: Path, opset: int, is_allowed: bool
) -> None:
    model = add_model(opset=opset)
    if is_allowed:
        assert compile_om(tmp_path, STATIC, model).is_file()
    else:
        assert refusal(tmp_path, STATIC, model) == "E16002"


def test_operators_in_subgraphs_are_checked_too(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Swish", ["x"], ["b"])],
        "branch",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [1])],
    )
    model = add_model()
    node = helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)
    assert refusal(tmp_path, STATIC, model) == "E16002"


def test_a_second_opset_import_is_refused(tmp_path: Path) -> None:
    model = add_model()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert refusal(tmp_path, STATIC, model) == "E16005"


def test_empty_models_are_refused(tmp_path: Path) -> None:
    model = add_model()
    del model.graph.node[:]
    assert refusal(tmp_path, STATIC, model) == "E16001"
    model.ClearField("graph")
    assert refusal(tmp_path, STATIC, model) == "E16004"


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff" * 100)
    flags = [f"--model={tmp_path / 'model.onnx'}", "--output=x"]
    options = parse_options(["--framework=5", *flags, "--soc_version=Ascend310P3"], SOCS)
    with pytest.raises(AtcError, match=r"^E10014"):
        compiler.compile_model(options)


@pytest.mark.parametrize(
    ("shape", "code"),
    [
        ("x:2,3;bias:3;z:1", "E10016"),
        ("x:6;bias:3", "E10049"),
        ("x:2,3", "E10001"),
        ("x:2,3;bias:4", "E20001"),
    ],
)
def test_shapes_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, shape: str, code: str
) -> None:
    assert refusal(tmp_path, [f"--input_shape={shape}"]) == code


def test_a_size_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    model = add_model()
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 3
    assert refusal(tmp_path, ["--input_shape=x:2,3;bias:4"], model) == "E10050"


def test_a_gear_that_breaks_a_named_dim_is_refused(tmp_path: Path) -> None:
    flags = (GEARS[0], "--dynamic_dims=1,2,2;2,3,4")
    assert refusal(tmp_path, flags) == "E20001"


def test_a_graph_that_does_not_load_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = add_model()
    model.graph.node[0].input[0] = "nowhere"
    assert refusal(tmp_path, STATIC, model) == "E20001"


def test_missing_external_data_are_refused(tmp_path: Path) -> None:
    model = add_model()
    onnx.save_model(
        model, tmp_path / "other.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    lonely = onnx.load_model(tmp_path / "other.onnx", load_external_data=False)
    for name in ("other.onnx", "w"):
        (tmp_path / name).unlink()
    assert refusal(tmp_path, STATIC, lonely) == "E10014"


# --- the file ---


def test_the_header_tells_what_was_compiled(tmp_path: Path) -> None:
    path = compile_om(tmp_path, GEARS)
    header = read_om(str(path)).header
    assert [(t.name, t.onnx_type, t.dims) for t in header.inputs] == [
        ("x", 6, [-1, -1]),
        ("bias", 1, [-1]),
    ]
    assert [(t.name, t.onnx_type, t.dims) for t in header.outputs] == [("y", 1, [-1, -1])]
    assert [gear.outputs for gear in header.gears] == [[[1, 2]], [[2, 2]], [[2, 4]]]
    assert header.largest_gear == 2
    assert header.soc_version == "Ascend310P3"
    assert "--dynamic_dims=1,2,2;2,2,2;2,4,4" in header.atc_command
    assert header.weights.length == 2400
    assert header.versions["opset"] == "17"


def test_weights_lie_page_aligned_behind_the_graph(tmp_path: Path) -> None:
    table = np.arange(3000, dtype=np.float32)
    path = compile_om(tmp_path, model=add_model(weight=table))
    om = read_om(str(path))
    assert om.weights_offset % 4096 == 0
    assert path.read_bytes()[om.weights_offset :] == table.tobytes()
    assert len(om.graph) < 1000


def test_external_and_inline_weights_give_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    inline = read_om(str(compile_om(tmp_path / "a")))
    source = tmp_path / "b" / "model.onnx"
    onnx.save_model(
        add_model(), source, save_as_external_data=True, location="data", size_threshold=0
    )
    flags = ["--framework=5", f"--model={source}", f"--output={tmp_path / 'b' / 'model'}"]
    options = parse_options([*flags, "--soc_version=Ascend310P3", *STATIC], SOCS)
    external = read_om(str(compiler.compile_model(options)))
    assert external.graph == inline.graph
    assert external.header.weights == inline.header.weights


def test_output_shapes_that_need_numbers_are_inferred_for_each_gear(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Concat", ["a", "b"], ["c"], axis=0)],
        "concat",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, ["m"]),
        ],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, ["total"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    flags = ("--input_shape=a:-1;b:-1", "--dynamic_dims=1,2;3,5")
    header = read_om(str(compile_om(tmp_path, flags, model))).header
    assert [gear.outputs for gear in header.gears] == [[[3]], [[8]]]


def nonzero_model() -> onnx.ModelProto:
    """b = NonZero(a[4]): as many columns as there are."""
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["a"], ["b"], name="find")],
        "nonzero",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("b", TensorProto.INT64, [1, "m"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_shapes_that_depend_on_data_make_a_dynamic_model(tmp_path: Path) -> None:
    path = compile_om(tmp_path, ["--input_shape=a:4"], nonzero_model())
    assert path.name == f"model_linux_{platform.machine()}.om"
    header = read_om(str(path)).header
    assert header.has_ranges
    assert header.ranges == [[(4, 4)]]
    assert header.outputs[0].dims == [1, -1]


def test_shapes_that_depend_on_data_are_refused_with_gears_and_on_310b(tmp_path: Path) -> None:
    gears = ["--input_shape=a:-1", "--dynamic_dims=4;8"]
    assert refusal(tmp_path, gears, nonzero_model()) == "E20001"
    flags = ["--input_shape=a:4", "--soc_version=Ascend310B4"]
    assert refusal(tmp_path, flags, nonzero_model()) == "E20001"


def test_the_table_of_operators_is_the_real_parsers() -> None:
    ops = compiler.tables().ops
    assert ops["Trilu"] == [(14, 18)]
    assert ops["GreaterOrEqual"] == [(8, 8), (12, 18)]
    for missing in ("Gelu", "RMSNormalization", "Attention", "Loop", "MatMulNBits"):
        assert missing not in ops


# --- as a program ---


def run_atc(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime_cache.aclsim", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_program_reports_progress_and_success(tmp_path: Path) -> None:
    source = tmp_path / "with space.onnx"
    onnx.save_model(add_model(), source)
    flags = ["--framework=5", f"--model={source}", f"--output={tmp_path / 'out'}"]
    done = run_atc("atc", *flags, "--soc_version=Ascend310P3", *GEARS)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0] == "ATC start working now, please wait for a moment."
    assert [line for line in lines if "gear" in line] == [
        f"ATC progress: compile gear {n}/3" for n in (1, 2, 3)
    ]
    assert lines[-1].startswith("ATC run success")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.om", "with space.onnx"]


def test_the_program_reports_failure(tmp_path: Path) -> None:
    flags = ["--framework=5", f"--model={tmp_path / 'no.onnx'}", f"--output={tmp_path / 'out'}"]
    done = run_atc("atc", *flags, "--soc_version=Ascend310P3")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2].startswith("E10014: cannot read model")
    assert done.stdout.splitlines()[-1].startswith("ATC run failed")
    assert run_atc("compile").returncode == 2


def options_for(tmp_path: Path, output: str, *flags: str) -> AtcOptions:
    source = tmp_path / "model.onnx"
    onnx.save_model(add_model(), source)
    given = ["--framework=5", f"--model={source}", f"--output={output}", *flags]
    return parse_options([*given, "--soc_version=Ascend310P3", *STATIC], SOCS)


def test_the_directory_of_the_output_is_made(tmp_path: Path) -> None:
    options = options_for(tmp_path, str(tmp_path / "new" / "er" / "out"))
    assert compiler.compile_model(options) == tmp_path / "new" / "er" / "out.om"


def test_a_directory_that_was_made_goes_when_the_model_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "_check_loads", interrupt)
    options = options_for(tmp_path, str(tmp_path / "new" / "out"), "--external_weight=1")
    with pytest.raises(KeyboardInterrupt):
        compiler.compile_model(options)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_an_unwritable_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = options_for(tmp_path, str(tmp_path / "file" / "out"))
    with pytest.raises(AtcError, match="cannot write") as refused:
        compiler.compile_model(options)
    assert refused.value.code == "E10001"


@pytest.mark.parametrize("output", ["/", ".", "..", "out/"])
def test_an_output_that_is_a_directory_is_refused(tmp_path: Path, output: str) -> None:
    with pytest.raises(AtcError, match="names a directory") as refused:
        options_for(tmp_path, output)
    assert refused.value.code == "E10001"


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    done = run_atc("atc", *STATIC, "--framework=5", os.fsdecode(b"--output=a\xffb"))
    assert done.returncode == 1
    assert "E10001: value 'a\\udcffb' for parameter [--output] is not UTF-8" in done.stdout


def test_text_with_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtcError, match="not UTF-8") as refused:
        options_for(tmp_path, "a\0b")
    assert refused.value.code == "E10001"


def test_a_pipe_is_no_model_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AtcError, match="it is no file"):
        read_model(tmp_path / "pipe")


def test_a_model_beyond_what_protobuf_reads_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(AtcError, match="larger than 2 GiB") as refused:
        read_model(path)
    assert refused.value.code == "E10014"


def test_paths_that_only_the_software_device_takes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, is_named in (("plain-1.0_x", False), ("with space", True), ("a+b", True)):
        compiler.compile_model(options_for(tmp_path, str(tmp_path / name)))
        assert ("the real ATC refuses these paths" in capsys.readouterr().out) == is_named
