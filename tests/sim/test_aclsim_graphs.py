"""Kinds of graphs that other people's models have, compiled and run on the software device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import runtime_cache.aclsim as acl
from runtime_cache.aclsim.atc.options import AtcError
from runtime_cache.aclsim.om import read_om
from tests.support.aclsim import Array, compile_om, download, fresh_process, ok, put

FLOAT, FLOAT16, INT8, UINT8, INT32, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
)
Value = tuple[str, int, Sequence[Any] | None]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_process(memory_bytes=1 << 30):
        yield


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: dict[str, Array] | None = None,
    **kwargs: Any,
) -> onnx.ModelProto:
    """A model of opset 17 unless said otherwise."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    imports = kwargs.pop("imports", [("", 17)])
    opsets = [helper.make_opsetid(domain, version) for domain, version in imports]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **kwargs)


def run_om(path: Path, *arrays: Array) -> list[bytes]:
    """Loads a static model, runs it once, and returns the bytes of its outputs."""
    model = ok(acl.mdl.load_from_file(str(path)))
    desc = acl.mdl.create_desc()
    ok(acl.mdl.get_desc(desc, model))
    inputs, outputs = acl.mdl.create_dataset(), acl.mdl.create_dataset()
    for index, array in enumerate(arrays):
        assert acl.mdl.get_input_size_by_index(desc, index) == array.nbytes
        ptr = ok(acl.rt.malloc(array.nbytes, 0))
        put(ptr, array)
        ok(acl.mdl.add_dataset_buffer(inputs, acl.create_data_buffer(ptr, array.nbytes)))
    made = []
    for index in range(acl.mdl.get_num_outputs(desc)):
        size = acl.mdl.get_output_size_by_index(desc, index)
        made.append((ok(acl.rt.malloc(size, 0)), size))
        ok(acl.mdl.add_dataset_buffer(outputs, acl.create_data_buffer(*made[-1])))
    ok(acl.mdl.execute(model, inputs, outputs))
    return [download(ptr, np.uint8, size).tobytes() for ptr, size in made]


def test_convolutions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 3, 8, 8), np.float32)
    kernel = rng.standard_normal((4, 3, 3, 3), np.float32)
    model = model_of(
        [
            helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["y"]),
        ],
        [("x", FLOAT, [1, 3, 8, 8])],
        [("y", FLOAT, [1, 4])],
        {"k": kernel},
    )
    (y,) = run_om(compile_om(tmp_path, ("--input_format=NCHW",), model), x)
    padded = np.pad(x[0], ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    expected = np.maximum(np.einsum("cijkl,ockl->oij", windows, kernel), 0).mean((1, 2))
    assert np.allclose(np.frombuffer(y, np.float32), expected, atol=1e-5)


def test_multi_layer_perceptron_in_half_precision(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 16)).astype(np.float16)
    first, second = (rng.standard_normal((16, 16)).astype(np.float16) / 4 for _ in range(2))
    model = model_of(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "b"], ["y"]),
        ],
        [("x", FLOAT16, [2, 16])],
        [("y", FLOAT16, [2, 16])],
        {"a": first, "b": second},
    )
    (y,) = run_om(compile_om(tmp_path, (), model), x)
    wide = [array.astype(np.float32) for array in (x, first, second)]
    expected = np.maximum(wide[0] @ wide[1], 0) @ wide[2]
    assert np.allclose(np.frombuffer(y, np.float16).reshape(2, 16), expected, atol=2e-2)


def test_bytes_in_several_outputs_out(tmp_path: Path) -> None:
    model = model_of(
        [
            helper.make_node("Cast", ["a"], ["wide"], to=INT32),
            helper.make_node("Cast", ["b"], ["other"], to=INT32),
            helper.make_node("Add", ["wide", "other"], ["sum"]),
            helper.make_node("Greater", ["wide", "other"], ["is_greater"]),
            helper.make_node("Cast", ["sum"], ["half"], to=FLOAT16),
        ],
        [("a", INT8, [4]), ("b", UINT8, [4])],
        [("sum", INT32, [4]), ("is_greater", BOOL, [4]), ("half", FLOAT16, [4])],
    )
    a, b = np.array([-1, 2, 3, -128], np.int8), np.array([255, 1, 3, 0], np.uint8)
    total, greater, half = run_om(compile_om(tmp_path, (), model), a, b)
    assert np.frombuffer(total, np.int32).tolist() == [254, 3, 6, -128]
    assert np.frombuffer(greater, np.bool_).tolist() == [False, True, False, False]
    assert np.frombuffer(half, np.float16).tolist() == [254, 3, 6, -128]


def scalar_model() -> onnx.ModelProto:
    """y = x * s, with a scalar s; t = s + s."""
    return model_of(
        [
            helper.make_node("Mul", ["x", "s"], ["y"]),
            helper.make_node("Add", ["s", "s"], ["t"]),
        ],
        [("x", FLOAT, ["n"]), ("s", FLOAT, [])],
        [("y", FLOAT, ["n"]), ("t", FLOAT, [])],
    )


@pytest.mark.parametrize("shape", ["x:3;s:", "x:3"])
def test_scalars(tmp_path: Path, shape: str) -> None:
    path = compile_om(tmp_path, (f"--input_shape={shape}",), scalar_model())
    assert read_om(str(path)).header.inputs[1].dims == []
    x, s = np.array([1, 2, 3], np.float32), np.array(3, np.float32)
    y, t = run_om(path, x, s)
    assert np.frombuffer(y, np.float32).tolist() == [3, 6, 9]
    assert np.frombuffer(t, np.float32).tolist() == [6]


def test_scalars_beside_gears(tmp_path: Path) -> None:
    flags = ("--input_shape=x:-1;s:", "--dynamic_batch_size=1,3")
    header = read_om(str(compile_om(tmp_path, flags, scalar_model()))).header
    assert [gear.inputs for gear in header.gears] == [[[1], []], [[3], []]]
    assert [gear.outputs for gear in header.gears] == [[[1], []], [[3], []]]


def test_scalars_must_be_named_beside_gears(tmp_path: Path) -> None:
    flags = ("--input_shape=x:-1", "--dynamic_batch_size=1,3")
    with pytest.raises(AtcError, match=r"^E10001: beside gears, the scalar \[s\]"):
        compile_om(tmp_path, flags, scalar_model())


def test_branches_with_weights_of_their_own(tmp_path: Path) -> None:
    big = np.arange(1000, dtype=np.float32)

    def branch(name: str, weight: Array) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("Add", ["x", f"{name}_w"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", FLOAT, [1000])],
            [numpy_helper.from_array(weight, f"{name}_w")],
        )

    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("a", big), else_branch=branch("b", big + 1)
    )
    model = model_of([node], [("x", FLOAT, [1000]), ("c", BOOL, [])], [("y", FLOAT, [1000])])
    x = np.ones(1000, np.float32)
    for kind in ("0", "1", "2"):
        path = compile_om(tmp_path, (f"--external_weight={kind}",), model)
        assert path.stat().st_size > 8000 or kind != "0"
        for condition, added in ((True, 0), (False, 1)):
            (y,) = run_om(path, x, np.array(condition))
            assert (np.frombuffer(y, np.float32) == x + big + added).all()


def test_initializers_that_are_listed_as_inputs_are_none(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [("x", FLOAT, [2]), ("w", FLOAT, [2])],
        [("y", FLOAT, [2])],
        {"w": np.array([1, 2], np.float32)},
    )
    path = compile_om(tmp_path, (), model)
    assert [info.name for info in read_om(str(path)).header.inputs] == ["x"]
    (y,) = run_om(path, np.zeros(2, np.float32))
    assert np.frombuffer(y, np.float32).tolist() == [1, 2]
    with pytest.raises(AtcError, match=r"^E10016"):
        compile_om(tmp_path, ("--input_shape=w:2",), model)


def test_optional_inputs_and_outputs_are_left_out(tmp_path: Path) -> None:
    model = model_of(
        [
            helper.make_node("Clip", ["x", "", "high"], ["c"]),
            helper.make_node("Dropout", ["c"], ["y", ""]),
        ],
        [("x", FLOAT, [3])],
        [("y", FLOAT, [3])],
        {"high": np.array(1, np.float32)},
    )
    (y,) = run_om(compile_om(tmp_path, (), model), np.array([-5, 0, 5], np.float32))
    assert np.frombuffer(y, np.float32).tolist() == [-5, 0, 1]


def test_shapes_that_inference_does_not_find_are_tried_out(tmp_path: Path) -> None:
    """Reshape to a shape that the graph computes through a float, past what ONNX propagates."""
    model = model_of(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Cast", ["shape"], ["real"], to=FLOAT),
            helper.make_node("ReduceProd", ["real"], ["total"], keepdims=1),
            helper.make_node("Cast", ["total"], ["target"], to=INT64),
            helper.make_node("Reshape", ["x", "target"], ["y"]),
        ],
        [("x", FLOAT, ["n", "m"])],
        [("y", FLOAT, None)],
    )
    path = compile_om(tmp_path, ("--input_shape=x:2,3",), model)
    assert read_om(str(path)).header.gears[0].outputs == [[6]]
    (y,) = run_om(path, np.arange(6, dtype=np.float32))
    assert np.frombuffer(y, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    gears = ("--input_shape=x:-1,-1", "--dynamic_dims=2,3;4,4")
    header = read_om(str(compile_om(tmp_path, gears, model))).header
    assert [gear.outputs for gear in header.gears] == [[[6]], [[16]]]


def test_a_shape_that_an_input_gives_makes_a_dynamic_model(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("Expand", ["x", "shape"], ["y"])],
        [("x", FLOAT, [1]), ("shape", INT64, [1])],
        [("y", FLOAT, None)],
    )
    header = read_om(str(compile_om(tmp_path, (), model))).header
    assert header.has_ranges
    assert header.outputs[0].dims == [-1]


def test_a_tensor_without_elements_is_refused(tmp_path: Path) -> None:
    model = model_of(
        [
            helper.make_node("Slice", ["x", "zero", "zero"], ["none"], name="cut"),
            helper.make_node("ReduceSum", ["none"], ["y"], keepdims=0),
        ],
        [("x", FLOAT, [4])],
        [("y", FLOAT, [])],
        {"zero": np.zeros(1, np.int64)},
    )
    with pytest.raises(AtcError, match=r"^E20001: node \[cut\] \(Slice\) makes \[none\]"):
        compile_om(tmp_path, (), model)
    for dims in ([0], [2, 0]):
        empty = model_of(
            [helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, dims)], [("y", FLOAT, dims)]
        )
        with pytest.raises(AtcError, match=r"^E10011"):
            compile_om(tmp_path, (), empty)


def test_types_that_models_cannot_have_at_their_ends(tmp_path: Path) -> None:
    text = model_of(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.STRING, [1])],
        [("y", TensorProto.STRING, [1])],
    )
    with pytest.raises(AtcError, match=r"^E10001: \[x\] has ONNX type 8"):
        compile_om(tmp_path, (), text)


def test_an_input_of_unknown_rank_takes_any(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, None)], [("y", FLOAT, None)]
    )
    with pytest.raises(AtcError, match=r"^E10001"):
        compile_om(tmp_path, (), model)
    header = read_om(str(compile_om(tmp_path, ("--input_shape=x:2,3",), model))).header
    assert header.outputs[0].dims == [2, 3]


@pytest.mark.parametrize("where", ["input", "weight", "cast"])
def test_bfloat16_is_refused_where_the_soc_has_none(tmp_path: Path, where: str) -> None:
    bf16 = TensorProto.BFLOAT16
    outer = bf16 if where == "input" else FLOAT
    nodes = [helper.make_node("Cast", ["x"], ["h"], to=bf16)] if where == "cast" else []
    if where == "cast":
        nodes.append(helper.make_node("Cast", ["h"], ["y"], to=FLOAT))
    else:
        nodes.append(helper.make_node("Identity", ["x"], ["y"]))
    model = model_of(nodes, [("x", outer, [2])], [("y", outer, [2])])
    if where == "weight":
        model.graph.initializer.append(helper.make_tensor("w", bf16, [1], [1.0]))
    with pytest.raises(AtcError, match=r"^E20001: the model has bfloat16"):
        compile_om(tmp_path, (), model)
    path = compile_om(tmp_path, ("--soc_version=Ascend910B4",), model)
    assert read_om(str(path)).header.has_bfloat16


# --- what the command line changes ---


def two_outputs() -> onnx.ModelProto:
    return model_of(
        [
            helper.make_node("Add", ["x", "x"], ["twice"], name="add"),
            helper.make_node("Relu", ["twice"], ["y"], name="relu"),
        ],
        [("x", FLOAT, [2])],
        [("y", FLOAT, [2])],
    )


X2 = np.array([-1, 300], np.float32)


def test_output_types_are_cast(tmp_path: Path) -> None:
    path = compile_om(tmp_path, ("--output_type=FP16",), two_outputs())
    (y,) = run_om(path, X2)
    assert np.frombuffer(y, np.float16).tolist() == [0, 600]
    assert read_om(str(path)).header.outputs[0].name == "y"


def test_other_nodes_can_be_outputs_with_types_of_their_own(tmp_path: Path) -> None:
    flags = ("--out_nodes=relu:0;add:0", "--output_type=add:0:INT32")
    path = compile_om(tmp_path, flags, two_outputs())
    y, twice = run_om(path, X2)
    assert np.frombuffer(y, np.float32).tolist() == [0, 600]
    assert np.frombuffer(twice, np.int32).tolist() == [-2, 600]
    for wrong in ("--out_nodes=add:1", "--out_nodes=sub:0"):
        with pytest.raises(AtcError, match=r"^E10016"):
            compile_om(tmp_path, (wrong,), two_outputs())


def test_inputs_can_be_given_in_half_precision(tmp_path: Path) -> None:
    path = compile_om(tmp_path, ("--input_fp16_nodes=x",), two_outputs())
    (y,) = run_om(path, X2.astype(np.float16))
    assert np.frombuffer(y, np.float32).tolist() == [0, 600]
    with pytest.raises(AtcError, match=r"^E10016"):
        compile_om(tmp_path, ("--input_fp16_nodes=z",), two_outputs())


# --- rules that can be lifted ---


def gelu_model() -> onnx.ModelProto:
    """Gelu of opset 20, and a node of another domain: ATC's parser takes neither."""
    return model_of(
        [
            helper.make_node("Gelu", ["x"], ["g"], name="gelu"),
            helper.make_node("FusedMatMul", ["g", "w"], ["y"], domain="com.microsoft"),
        ],
        [("x", FLOAT, [1, 2])],
        [("y", FLOAT, [1, 2])],
        {"w": np.eye(2, dtype=np.float32)},
        imports=[("", 20), ("com.microsoft", 1)],
    )


def test_rules_of_the_parser_can_be_lifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AtcError, match=r"^E16005"):
        compile_om(tmp_path, (), gelu_model())
    path = compile_om(tmp_path, ("--no-atc-rules",), gelu_model())
    assert "rules lifted by --no-atc-rules, the real ATC refuses this: E16005" in (
        capsys.readouterr().out
    )
    header = read_om(str(path)).header
    assert not header.has_atc_rules
    assert header.versions["opset"] == "ai.onnx 20, com.microsoft 1"
    assert "--no-atc-rules" in header.atc_command
    (y,) = run_om(path, np.array([[0, 10]], np.float32))
    assert np.frombuffer(y, np.float32).tolist() == [0, 10]


def test_a_model_that_keeps_the_rules_keeps_them(tmp_path: Path) -> None:
    path = compile_om(tmp_path, ("--no-atc-rules",), two_outputs())
    assert read_om(str(path)).header.has_atc_rules


# --- weights ---


def equal_weights() -> onnx.ModelProto:
    """y = x + a + b + c, where a and b are equal."""
    a = np.arange(1000, dtype=np.float32)
    return model_of(
        [
            helper.make_node("Add", ["x", "a"], ["1"]),
            helper.make_node("Add", ["1", "b"], ["2"]),
            helper.make_node("Add", ["2", "c"], ["y"]),
        ],
        [("x", FLOAT, [1000])],
        [("y", FLOAT, [1000])],
        {"a": a, "b": a, "c": a + 1},
    )


def test_equal_weights_share_a_file(tmp_path: Path) -> None:
    path = compile_om(tmp_path, ("--external_weight=1",), equal_weights())
    assert len(list((tmp_path / "weight").iterdir())) == 2
    header = read_om(str(path)).header
    assert header.external_bytes == 8000
    assert header.weights.length == 0
    (y,) = run_om(path, np.zeros(1000, np.float32))
    assert (np.frombuffer(y, np.float32) == 3 * np.arange(1000) + 1).all()


def test_combined_weights_start_at_512_bytes(tmp_path: Path) -> None:
    path = compile_om(tmp_path, ("--external_weight=2",), equal_weights())
    data = (tmp_path / "model_weight_combined").read_bytes()
    assert len(data) == 2 * 4096 + 4000
    for index, first in enumerate((0, 0, 1)):
        assert np.frombuffer(data, np.float32, 1, index * 4096)[0] == first
    (y,) = run_om(path, np.zeros(1000, np.float32))
    assert (np.frombuffer(y, np.float32) == 3 * np.arange(1000) + 1).all()


@pytest.mark.parametrize("kind", ["1", "2"])
def test_a_refused_model_leaves_no_weights_behind(tmp_path: Path, kind: str) -> None:
    model = equal_weights()
    model.graph.node[0].input[0] = "nowhere"
    flags = (f"--external_weight={kind}",)
    with pytest.raises(AtcError):
        compile_om(tmp_path, flags, model)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    # Files that another compilation made stay as they are.
    path = compile_om(tmp_path, flags, equal_weights())
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.ones(1000, np.float32), tensor.name))
    before = sorted(each.name for each in tmp_path.rglob("*"))
    with pytest.raises(AtcError):
        compile_om(tmp_path, flags, model)
    assert sorted(each.name for each in tmp_path.rglob("*")) == before
    (y,) = run_om(path, np.zeros(1000, np.float32))
    assert (np.frombuffer(y, np.float32) == 3 * np.arange(1000) + 1).all()


@pytest.mark.parametrize("kind", ["1", "2"])
def test_compiling_again_replaces_weights_and_leaves_no_others(tmp_path: Path, kind: str) -> None:
    for _ in range(2):
        compile_om(tmp_path, (f"--external_weight={kind}",), equal_weights())
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == (4 if kind == "1" else 3)


def test_external_data_of_the_model_in_a_directory_and_in_attributes(tmp_path: Path) -> None:
    value = np.arange(2000, dtype=np.float32)
    model = model_of(
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(value, "k")),
            helper.make_node("Add", ["k", "w"], ["s"]),
            helper.make_node("Add", ["x", "s"], ["y"]),
        ],
        [("x", FLOAT, [2000])],
        [("y", FLOAT, [2000])],
        {"w": value},
    )
    (tmp_path / "parts").mkdir()
    onnx.save_model(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="parts/data",
        size_threshold=0,
        convert_attribute=True,
    )
    path = compile_om(
        tmp_path, (), onnx.load_model(tmp_path / "model.onnx", load_external_data=False)
    )
    (y,) = run_om(path, np.zeros(2000, np.float32))
    assert (np.frombuffer(y, np.float32) == 2 * value).all()
