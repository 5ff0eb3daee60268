"""The exported graph is portable: what ATC knows, what docs/kernels.md says, no traps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from om_models.bundle import bundle_digest
from om_models.graph import GraphOptions, write_llama
from om_models.manifest import KvSpec
from om_models.null_model import NULL_SPEC, write_null_model
from om_models.onnx_writer import ALIGNMENT_BYTES
from om_models.spec import ModelSpec
from om_models.weights import EMBEDDING
from runtime_cache.errors import ConversionError
from tests.support.tiny import FAMILY_SPECS, random_weights, tiny_source, tiny_spec
from tests.support.weights import MemorySource

ROOT = Path(__file__).parents[2]
OPSET = 17
FORBIDDEN = {"Einsum", "ScatterND", "Trilu", "Slice", "Expand", "Identity", "Where"}

PADDED = tiny_spec(num_heads=3, num_kv_heads=3, head_dim=6, vocab_size=261, tie_embeddings=False)


def kv_spec(spec: ModelSpec, dtype: Any = "float32", groups: int = 1) -> KvSpec:
    return KvSpec(
        dtype=dtype,
        num_slots=64,
        num_groups=groups,
        layers_per_group=spec.num_layers // groups,
        row_elements=-(-spec.kv_dim // 16) * 16,
    )


def export(
    directory: Path, spec: ModelSpec, dtype: Any = "float32", index: Any = "int32", groups: int = 1
) -> onnx.ModelProto:
    path = directory / "model.onnx"
    options = GraphOptions(dtype, index, kv_spec(spec, dtype, groups), max_model_len=64)
    write_llama(tiny_source(spec), options, path, lambda done, total: None)
    return onnx.load(path, load_external_data=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    make = tmp_path_factory.mktemp
    null_path = make("null") / "model.onnx"
    null_options = GraphOptions("float32", "int32", kv_spec(NULL_SPEC), max_model_len=64)
    write_null_model(null_options, null_path, lambda done, total: None)
    return {
        "plain": export(make("plain"), tiny_spec()),
        "half": export(make("half"), tiny_spec(), "float16", "int64"),
        "padded": export(make("padded"), PADDED, groups=2),
        **{name: export(make(name), spec, "float16") for name, spec in FAMILY_SPECS.items()},
        "null": onnx.load(null_path),
    }


def nodes(models: dict[str, onnx.ModelProto]) -> Iterator[tuple[onnx.ModelProto, onnx.NodeProto]]:
    for model in models.values():
        for node in model.graph.node:
            yield model, node


def used_ops(models: dict[str, onnx.ModelProto]) -> set[str]:
    return {node.op_type for _, node in nodes(models)}


def test_every_op_is_registered_for_atc_and_documented(models: dict[str, onnx.ModelProto]):
    table = json.loads((ROOT / "tests/data/atc_onnx_ops.json").read_text("utf-8"))["ops"]
    for op in used_ops(models):
        assert op in table, op
        assert OPSET in table[op]["opsets"], op
        assert table[op]["documented"], op


def test_the_kernel_table_names_exactly_the_ops_used(models: dict[str, onnx.ModelProto]):
    text = (ROOT / "docs/kernels.md").read_text("utf-8")
    listed = re.findall(r"^\| ([A-Z]\w+) \|", text, re.MULTILINE)
    assert [op for op in listed if op != "ONNX"] == sorted(used_ops(models))


def test_one_opset_import_of_the_default_domain(models: dict[str, onnx.ModelProto]):
    for model in models.values():
        assert [(o.domain, o.version) for o in model.opset_import] == [("", OPSET)]
        assert model.ir_version == 8
    assert {node.domain for _, node in nodes(models)} == {""}


def test_traps_are_avoided(models: dict[str, onnx.ModelProto]):
    assert not FORBIDDEN & used_ops(models)
    for _, node in nodes(models):
        if node.op_type == "Split":
            assert len(node.input) == 2, "sizes must be given"


def test_only_gather_consumes_a_pool_input(models: dict[str, onnx.ModelProto]):
    for _, node in nodes(models):
        for position, name in enumerate(node.input):
            if name.startswith("kv_pool_"):
                assert (node.op_type, position) == ("Gather", 0)


def test_every_input_is_used_and_no_dimension_is_zero(models: dict[str, onnx.ModelProto]):
    for model in models.values():
        consumed = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= consumed
        shapes = [list(tensor.dims) for tensor in model.graph.initializer]
        assert all(0 not in shape for shape in shapes)


def test_inputs_and_outputs_are_the_contract(models: dict[str, onnx.ModelProto]):
    fixed = ["input_ids", "position_ids", "past_rows", "mask", "last"]
    graph = models["padded"].graph
    assert [value.name for value in graph.input] == [*fixed, "kv_pool_0", "kv_pool_1"]
    assert [value.name for value in graph.output] == ["logits", "new_kv_0", "new_kv_1"]


def test_contract_shapes_and_types(models: dict[str, onnx.ModelProto]):
    assert described(models["padded"]) == {
        "input_ids": ("INT32", ["B", "S"]),
        "position_ids": ("INT32", ["B", "S"]),
        "past_rows": ("INT32", ["B", "P"]),
        "mask": ("FLOAT", ["B", 1, "S", "T"]),
        "last": ("INT32", ["B"]),
        "kv_pool_0": ("FLOAT", [128, 32]),
        "kv_pool_1": ("FLOAT", [128, 32]),
        "logits": ("FLOAT", ["B", 261]),
        "new_kv_0": ("FLOAT", ["B", "S", 2, 32]),
        "new_kv_1": ("FLOAT", ["B", "S", 2, 32]),
    }
    half = described(models["half"])
    assert half["last"] == ("INT64", ["B"])
    assert half["mask"] == ("FLOAT16", ["B", 1, "S", "T"])
    assert half["kv_pool_0"] == ("FLOAT16", [256, 16])
    assert half["logits"] == ("FLOAT", ["B", 258])


def described(model: onnx.ModelProto) -> dict[str, tuple[str, list[str | int]]]:
    found = {}
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
        found[value.name] = (onnx.TensorProto.DataType.Name(kind.elem_type), dims)
    return found


def test_half_graph_keeps_norms_and_softmax_in_float32(models: dict[str, onnx.ModelProto]):
    inferred = onnx.shape_inference.infer_shapes(models["half"])
    types = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    protected = {"Pow", "ReduceMean", "Sqrt", "Div", "Softmax"}
    wide = [types[n.output[0]] for n in inferred.graph.node if n.op_type in protected]
    narrow = [types[n.output[0]] for n in inferred.graph.node if n.op_type == "MatMul"]
    assert set(wide) == {onnx.TensorProto.FLOAT}
    assert set(narrow) == {onnx.TensorProto.FLOAT16}


def test_float32_graph_has_no_casts(models: dict[str, onnx.ModelProto]):
    assert "Cast" not in {node.op_type for node in models["plain"].graph.node}


def test_tied_embedding_is_stored_once(models: dict[str, onnx.ModelProto]):
    graph = models["plain"].graph
    users = [node.op_type for node in graph.node if EMBEDDING in node.input]
    assert users == ["Gather", "Gemm"]
    shapes = [list(t.dims) for t in graph.initializer if 258 in t.dims]
    assert shapes == [[258, 32]]


def test_weights_lie_aligned_in_one_file(tmp_path: Path):
    model = export(tmp_path, tiny_spec())
    external = [t for t in model.graph.initializer if t.external_data]
    assert len(external) == 1 + 9 * 2 + 1 + 4  # embedding, layers, final norm, cos and sin
    ends = []
    for tensor in external:
        entry = {e.key: e.value for e in tensor.external_data}
        assert entry["location"] == "model.onnx.data"
        assert int(entry["offset"]) % ALIGNMENT_BYTES == 0
        ends.append(int(entry["offset"]) + int(entry["length"]))
    assert (tmp_path / "model.onnx.data").stat().st_size == max(ends)
    inline = [t for t in model.graph.initializer if not t.external_data]
    assert max(numpy_helper.to_array(t).nbytes for t in inline) <= 32


@pytest.mark.parametrize(
    ("dtype", "is_tied", "weights", "bundle"),
    [
        ("float32", True, "4cdf6a0e5e40905b", "9bfbb74369b39f5e"),
        ("float16", True, "d23332d1fdda75e4", "a344d7900e4da6f9"),
        ("float32", False, "08b231bdc815f2fe", "8a82ba0331c0afcc"),
        ("float16", False, "ae967b7ca9248ac0", "3b7e0df1b69e0675"),
    ],
)
def test_digests_of_a_llama_never_change(
    tmp_path: Path, dtype: Any, is_tied: bool, weights: str, bundle: str
):
    """As of the first release, before other families and tables written in blocks."""
    spec = tiny_spec(tie_embeddings=is_tied)
    kv = KvSpec(dtype, num_slots=64, num_groups=1, layers_per_group=2, row_elements=32)
    options = GraphOptions(dtype, "int32", kv, max_model_len=64)
    digest = write_llama(tiny_source(spec), options, tmp_path / "m.onnx", lambda *_: None)
    assert digest.startswith(weights)
    assert bundle_digest(digest, spec, kv).startswith(bundle)


def test_projections_are_stored_transposed(tmp_path: Path):
    export(tmp_path, tiny_spec())
    loaded = {t.name: t for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    name = "model.layers.1.mlp.down_proj.weight"
    weights = random_weights(tiny_spec())
    np.testing.assert_array_equal(numpy_helper.to_array(loaded[name]), weights[name].T)


def test_a_weight_too_large_for_float16_is_refused(tmp_path: Path):
    weights = random_weights(tiny_spec())
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = 70000
    options = GraphOptions("float16", "int32", kv_spec(tiny_spec(), "float16"), 64)
    source = MemorySource(tiny_spec(), weights)
    with pytest.raises(ConversionError, match=r"up_proj.*float16 cannot hold.*--dtype fp32"):
        write_llama(source, options, tmp_path / "m.onnx", lambda done, total: None)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_damaged_weight_is_refused_as_such(tmp_path: Path, dtype: Any, name: str, value: float):
    weights = random_weights(tiny_spec())
    weights[name].flat[0] = value
    options = GraphOptions(dtype, "int32", kv_spec(tiny_spec(), dtype), 64)
    with pytest.raises(ConversionError, match=f"{name} holds NaN or infinity: the checkpoint is"):
        write_llama(
            MemorySource(tiny_spec(), weights),
            options,
            tmp_path / "m.onnx",
            lambda done, all_: None,
        )


def test_the_model_passes_the_checker(tmp_path: Path):
    export(tmp_path, PADDED)
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
