"""The plan's workspace estimate against the exported graph: the most that is alive at one node, if
memory of dead values is used again and reshapes are free. ATC may plan otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from om_models.contract import GraphContract
from om_models.graph import GraphOptions, write_llama
from om_models.manifest import Gear
from om_models.memory_plan import workspace_bytes
from om_models.plan import ConvertOptions, make_plan
from tests.support.tiny import tiny_source, tiny_spec

#: A small Llama in the proportions of a large one.
SPEC = tiny_spec(
    vocab_size=4000,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)
GEARS = (
    *(Gear(1, 16, 64), Gear(1, 128, 64), Gear(1, 128, 512), Gear(1, 512, 512)),
    *(Gear(1, 1, 64), Gear(1, 1, 512), Gear(8, 1, 64), Gear(16, 1, 512)),
)
ITEM_BYTES = {
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.FLOAT16: 2,
    onnx.TensorProto.INT32: 4,
    onnx.TensorProto.INT64: 8,
}


def sizes_in(model: onnx.ModelProto, contract: GraphContract, gear: Gear) -> dict[str, int]:
    """Bytes of every value between the inputs and the outputs."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    specs = contract.inputs | contract.outputs
    for value in (*fixed.graph.input, *fixed.graph.output):
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, specs[value.name].shape(gear), strict=True):
            dim.Clear()
            dim.dim_value = size
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True, strict_mode=True)
    return {value.name: num_bytes(value.type.tensor_type) for value in inferred.graph.value_info}


def num_bytes(tensor: onnx.TypeProto.Tensor) -> int:
    size = ITEM_BYTES[tensor.elem_type]
    for dim in tensor.shape.dim:
        assert dim.HasField("dim_value")
        size *= dim.dim_value
    return size


def peak_bytes(model: onnx.ModelProto, sizes: dict[str, int]) -> int:
    """The most that is alive at one node."""
    root: dict[str, str] = {}
    last_use: dict[str, int] = {}
    for place, node in enumerate(model.graph.node):
        if node.op_type == "Reshape":
            root[node.output[0]] = root.get(node.input[0], node.input[0])
        for name in node.input:
            last_use[root.get(name, name)] = place
    outputs = {value.name for value in model.graph.output}
    alive: dict[str, int] = {}
    peak = 0
    for place, node in enumerate(model.graph.node):
        alive |= {o: sizes[o] for o in node.output if o not in outputs and o not in root}
        peak = max(peak, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last_use.get(name, -1) > place}
    return peak


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_estimate_is_above_the_least_and_not_far(tmp_path: Path, dtype: Any):
    plan = make_plan(SPEC, ConvertOptions("sim", dtype=dtype, kv_tokens=1024, context=512))
    options = GraphOptions(dtype, "int32", plan.kv, 512)
    write_llama(tiny_source(SPEC), options, tmp_path / "model.onnx", lambda done, total: None)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    contract = GraphContract(plan.kv, "int32", SPEC.vocab_size)
    for gear in GEARS:
        least = peak_bytes(model, sizes_in(model, contract, gear))
        estimate = workspace_bytes(SPEC, dtype, plan.kv, gear)
        assert least <= estimate <= 2 * least, (gear, least, estimate)
