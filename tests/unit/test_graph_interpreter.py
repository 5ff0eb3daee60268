"""The interpreter computes what ONNX Runtime does, and rounds where that does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from om_models.graph import GraphOptions, write_llama
from om_models.manifest import Gear, KvSpec
from om_models.spec import ModelSpec
from tests.support.graph_interpreter import OPERATORS, GraphInterpreter
from tests.support.graph_runner import GraphRunner, Row
from tests.support.tiny import FAMILY_SPECS, tiny_source, tiny_spec

ROOT = Path(__file__).parents[2]
GEARS = (Gear(1, 4, 4), Gear(2, 1, 16))
PADDED = tiny_spec(num_heads=3, num_kv_heads=3, head_dim=6, num_layers=4, tie_embeddings=False)


def test_it_knows_exactly_the_operators_of_the_kernel_table():
    text = (ROOT / "docs/kernels.md").read_text("utf-8")
    listed = set(re.findall(r"^\| ([A-Z]\w+) \|", text, re.MULTILINE)) - {"ONNX"}
    assert set(OPERATORS) | {"Cast"} == listed


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("spec", [tiny_spec(), PADDED, *FAMILY_SPECS.values()])
def test_a_graph_gives_what_onnx_runtime_gives(
    tmp_path: Path, spec: ModelSpec, dtype: Any, bound: float
):
    kv = KvSpec(dtype, 256, 2, spec.num_layers // 2, -(-spec.kv_dim // 32) * 32)
    path = tmp_path / "model.onnx"
    write_llama(tiny_source(spec), GraphOptions(dtype, "int32", kv, 64), path, lambda *_: None)
    ours, theirs = GraphRunner(path, kv), GraphRunner(path, kv)
    ours.session = GraphInterpreter(path)
    for gear, rows in zip(GEARS, two_steps(ours, theirs), strict=True):
        np.testing.assert_allclose(ours.run(gear, rows), theirs.run(gear, rows), atol=bound, rtol=0)
    for one, other in zip(ours.pools, theirs.pools, strict=True):
        np.testing.assert_allclose(one, other, atol=bound, rtol=0)


def two_steps(*runners: GraphRunner) -> tuple[list[Row], list[Row]]:
    """A prompt of three tokens with one padded, then two rows that go on from it."""
    slots, _ = (runner.take_slots(5) for runner in runners)
    prompt = [Row([7, 50, 200], [], slots[:3])]
    return prompt, [Row([9], slots[:3], [slots[3]]), Row([77], slots[:2], [slots[4]])]


# --- what a float16 node is -----------------------------------------------------------------------


def one_node(op: str, dtype: int, inputs: int = 1, **attributes: Any) -> onnx.ModelProto:
    """A model of one node named `node`; all its values are of one type."""
    names = [f"x{i}" for i in range(inputs)]
    values = [helper.make_tensor_value_info(name, dtype, None) for name in (*names, "y")]
    node = helper.make_node(op, names, ["y"], name="node", **attributes)
    graph = helper.make_graph([node], "one", values[:-1], values[-1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def compute(op: str, *inputs: Any, in_half: bool = False, **attributes: Any) -> Any:
    arrays = [np.asarray(x) for x in inputs]
    dtype = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
    model = one_node(op, dtype, len(arrays), **attributes)
    interpreter = GraphInterpreter(model, ["node"] if in_half else [])
    return interpreter.run(["y"], {f"x{i}": x for i, x in enumerate(arrays)})[0]


@pytest.mark.parametrize(("value", "expected"), [(255.9, 65504), (256.0, np.inf)])
def test_a_result_beyond_float16_is_infinite(value: float, expected: float):
    squared = compute("Pow", np.float16([value]), np.float16(2))
    assert squared.dtype == np.float16
    assert squared[0] == expected or abs(squared[0] - expected) < 64


def test_a_sum_of_float16_is_one():
    assert compute("ReduceMean", np.full(4, 30000, np.float16), axes=[-1], keepdims=1)[0] == np.inf
    mean = compute("ReduceMean", np.full(4, 30000, np.float32), axes=[-1], keepdims=1)
    assert mean[0] == 30000


@pytest.mark.parametrize(("count", "share"), [(2047, 1 / 2047), (2048, 1 / 2048), (4096, 1 / 2048)])
def test_a_softmax_in_float16_stops_adding_at_2048(count: int, share: float):
    assert compute("Softmax", np.zeros(count, np.float16), axis=-1)[0] == np.float16(share)
    exact = compute("Softmax", np.zeros(count, np.float32), axis=-1)[0]
    assert exact == pytest.approx(1 / count)


def test_a_product_adds_in_float32_and_rounds_once():
    row, column = np.float16([[60000, 60000, -60000]]), np.float16([[1], [1], [1]])
    assert compute("MatMul", row, column)[0, 0] == np.float16(60000)
    assert compute("MatMul", row, np.float16([[1], [1], [0]]))[0, 0] == np.inf
    assert compute("Gemm", row, column.T, transB=1)[0, 0] == np.float16(60000)


def test_a_sigmoid_far_from_zero_is_finite():
    ends = compute("Sigmoid", np.float16([-60000, 60000, 0]))
    assert ends.tolist() == [0, 1, 0.5]


def test_a_wide_node_can_be_computed_in_float16():
    assert compute("Add", np.float32([65504]), np.float32([1000]))[0] == 66504
    narrow = compute("Add", np.float32([65504]), np.float32([1000]), in_half=True)
    assert (narrow.dtype, narrow[0]) == (np.float16, np.inf)


def test_largest_magnitudes_are_kept():
    interpreter = GraphInterpreter(one_node("Sqrt", TensorProto.FLOAT))
    interpreter.run(["y"], {"x0": np.float32([4, 81])})
    assert interpreter.largest == {"node": 9.0}


def test_names_that_no_node_has_are_refused():
    with pytest.raises(AssertionError):
        GraphInterpreter(one_node("Sqrt", TensorProto.FLOAT), ["other"])
