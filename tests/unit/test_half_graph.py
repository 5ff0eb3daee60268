"""Large activations in the float16 graph: it holds as exported, and no protection can be left out.

A model with the outliers of models trained in bfloat16 (`tests.support.outliers`) goes through an
interpreter that rounds every node (`tests.support.graph_interpreter`): on the CPU, ONNX Runtime
would show no overflow. Each island of float32 nodes is then computed in float16 for once, which is
what the graph would do without the casts around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper

from om_models.graph import GraphOptions, write_llama
from om_models.manifest import Gear, KvSpec
from om_models.reference import KvCache, ReferenceLlama
from om_models.spec import ModelSpec
from tests.support.graph_interpreter import HALF, SINGLE, GraphInterpreter
from tests.support.graph_runner import NULL_SLOTS, GraphRunner, Row
from tests.support.outliers import CHANNEL, NUM_PAST, SPECS, long_past, outlier_weights
from tests.support.weights import MemorySource

FloatArray = npt.NDArray[np.float32]
TOKENS = np.array([7, 99, 200, 31])
GEAR = Gear(1, len(TOKENS), NUM_PAST)
#: Logits are up to 38, K and V up to 8. Seen: 0.018 and 0.006; without a protection 0.27 at least.
LOGIT_BOUND, KV_BOUND = 4e-2, 2e-2
ISLANDS = ("input_norm", "softmax", "attention_sum", "mlp_norm", "mlp_sum")


@dataclass(frozen=True)
class Outcome:
    """What a run gave, beside what it should have."""

    logit_error: float
    kv_error: float

    @property
    def holds(self) -> bool:
        """Finite and within the bounds; NaN is not."""
        return self.logit_error <= LOGIT_BOUND and self.kv_error <= KV_BOUND


class Rig:
    """One outlier model: its float16 graph, and what float32 makes of the same step."""

    def __init__(
        self,
        spec: ModelSpec,
        directory: Path,
        weights: dict[str, FloatArray],
        *,
        mlp_scale: int = 1,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.spec = spec
        self.kv = KvSpec(
            dtype="float16",
            num_slots=NUM_PAST + len(TOKENS) + NULL_SLOTS,
            num_groups=1,
            layers_per_group=spec.num_layers,
            row_elements=spec.kv_dim,
        )
        options = GraphOptions("float16", "int32", self.kv, spec.max_position, mlp_scale)
        self.path = directory / "model.onnx"
        source = MemorySource(spec, weights)
        self.weights_digest = write_llama(source, options, self.path, lambda *_: None)
        self.model = onnx.load(self.path)
        self.past = long_past(spec)
        after = self.past.copy()
        self.logits = ReferenceLlama(spec, weights).forward(TOKENS, after)[-1]
        self.new_rows = rows_of(after, NUM_PAST)

    def run(
        self, in_half: Collection[str] = (), model: onnx.ModelProto | None = None
    ) -> tuple[Outcome, GraphInterpreter]:
        """One step after the long past."""
        interpreter = GraphInterpreter(model or self.model, in_half)
        runner = GraphRunner(self.path, self.kv)
        runner.session = interpreter
        past, new = runner.take_slots(NUM_PAST), runner.take_slots(len(TOKENS))
        runner.pools[0][past] = rows_of(self.past, 0)
        logits = runner.run(GEAR, [Row(TOKENS.tolist(), past, new)])[0]
        new_rows = runner.pools[0][new].astype(np.float32)
        return Outcome(
            largest(logits - self.logits), largest(new_rows - self.new_rows)
        ), interpreter


def rows_of(cache: KvCache, first: int) -> FloatArray:
    """KV as the pool has it: K and V of each layer [tokens, 2·layers, row]."""
    both = [part for pair in zip(cache.keys, cache.values, strict=True) for part in pair]
    return np.stack([part[first:].reshape(len(part) - first, -1) for part in both], axis=1)


def largest(values: FloatArray) -> float:
    return float(np.abs(values).max())


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    @cache
    def make(name: str) -> Rig:
        return Rig(SPECS[name], tmp_path_factory.mktemp(name), outlier_weights(SPECS[name]))

    return make


def island_of(name: str) -> str | None:
    """`layer0/softmax` of `layer0/softmax/Softmax_42`; None for a node outside of islands."""
    match = re.fullmatch(r"((?:layer\d+/)?(?!layer\d)\w+)/[A-Z]\w+", name)
    return match[1] if match else None


def islands(name: str) -> list[str]:
    """The islands that a model should have."""
    of_layer = ISLANDS + (("q_norm", "k_norm") if SPECS[name].qk_norm else ())
    layers = range(SPECS[name].num_layers)
    return [f"layer{layer}/{island}" for layer in layers for island in of_layer] + ["final_norm"]


@pytest.mark.parametrize("name", SPECS)
def test_the_graph_as_exported_holds(rigs: Callable[[str], Rig], name: str):
    rig = rigs(name)
    outcome, interpreter = rig.run()
    assert outcome.holds
    sums = [n for n in interpreter.nodes if (island_of(n.name) or "").endswith("_sum")]
    assert len(sums) == 2 * rig.spec.num_layers
    assert min(interpreter.largest[node.name] for node in sums) > float(np.finfo(np.float16).max)


@pytest.mark.parametrize("name", SPECS)
def test_every_wide_node_is_in_an_island(rigs: Callable[[str], Rig], name: str):
    """So the test below leaves out every protection there is."""
    interpreter = GraphInterpreter(rigs(name).model)
    wide = [
        node
        for node in interpreter.nodes
        if interpreter.dtypes[node.output[0]] == SINGLE and node.op_type != "Cast"
    ]
    outside = {node.op_type for node in wide if island_of(node.name) is None}
    assert outside == {"Reshape", "Gather"}, "only the asked rows of the stream are picked outside"
    found = {island_of(node.name) for node in wide} - {None}
    assert found == set(islands(name))


@pytest.mark.parametrize("name", SPECS)
def test_every_cast_leads_into_an_island_or_out_of_one(rigs: Callable[[str], Rig], name: str):
    interpreter = GraphInterpreter(rigs(name).model)
    by_output = {node.output[0]: node for node in interpreter.nodes}
    for cast in (node for node in interpreter.nodes if node.op_type == "Cast"):
        if cast.output[0] == "logits":  # float32 by contract; protects nothing
            continue
        if interpreter.dtypes[cast.output[0]] == HALF:
            assert island_of(by_output[cast.input[0]].name) is not None, cast.name
        else:
            users = [node for node in interpreter.nodes if cast.output[0] in node.input]
            assert users
            assert all(island_of(node.name) is not None for node in users), cast.name


@pytest.mark.parametrize(
    ("name", "island"), [(name, island) for name in SPECS for island in islands(name)]
)
def test_no_island_can_be_left_out(rigs: Callable[[str], Rig], name: str, island: str):
    rig = rigs(name)
    nodes = {node.name for node in rig.model.graph.node if island_of(node.name) == island}
    assert nodes
    outcome, _ = rig.run(in_half=nodes)
    assert not outcome.holds
    errors = np.array([outcome.logit_error, outcome.kv_error]) / (LOGIT_BOUND, KV_BOUND)
    assert np.isnan(errors).any() or errors.max() > 5, "clearly, not by a hair"


@pytest.mark.parametrize("name", SPECS)
def test_q_is_scaled_before_the_product(rigs: Callable[[str], Rig], name: str):
    """Scaling the product instead overflows; by a power of two, so nothing else changes."""
    rig = rigs(name)
    scale = rig.spec.head_dim**-0.5
    late = onnx.ModelProto()
    late.CopyFrom(rig.model)
    for tensor in late.graph.initializer:
        if tensor.name.startswith("rope.q_"):
            unscaled = (numpy_helper.to_array(tensor) / scale).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(unscaled, tensor.name))
    late.graph.initializer.append(numpy_helper.from_array(np.float16(scale), "scale"))
    masked = [i for i, node in enumerate(late.graph.node) if "mask" in node.input]
    for index in reversed(masked):
        add = late.graph.node[index]
        scores, add.input[0] = add.input[0], f"{add.name}/scaled"
        late.graph.node.insert(index, helper.make_node("Mul", [scores, "scale"], [add.input[0]]))
    outcome, _ = rig.run(model=late)
    assert not outcome.holds


def overflowing_weights(part: str) -> dict[str, FloatArray]:
    """The first layer's MLP makes more than float16 holds: of itself, or in its output."""
    weights = outlier_weights(SPECS["llama"])
    gate, up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    weights[gate][0] = weights[up][0] = 0
    # From the channel that is NORMED after the norm: gate times up is 400 · 400, or 40 · 40.
    weights[gate][0, CHANNEL] = weights[up][0, CHANNEL] = 100 if part == "product" else 10
    weights[down][:, 0] = 0
    weights[down][CHANNEL, 0] = 1 if part == "product" else 100
    return weights


@pytest.mark.parametrize("part", ["product", "output"])
@pytest.mark.parametrize("scale", [1, 2, 4, 16, 256])
def test_an_mlp_that_overflows_needs_its_scale(tmp_path: Path, part: str, scale: int):
    """160 000 in either place: without room for it the logits are NaN, so no wrong text."""
    rig = Rig(SPECS["llama"], tmp_path, overflowing_weights(part), mlp_scale=scale)
    assert np.isfinite(rig.logits).all()
    outcome, _ = rig.run()
    assert outcome.holds if scale >= 4 else np.isnan(outcome.logit_error)


@pytest.mark.parametrize("scale", [2, 16, 256])
def test_a_scale_changes_no_more_than_roundings(tmp_path: Path, scale: int):
    """Powers of two are exact, so only numbers that become subnormal differ."""
    plain, scaled = (
        Rig(SPECS["qwen3"], tmp_path / str(n), outlier_weights(SPECS["qwen3"]), mlp_scale=n)
        for n in (1, scale)
    )
    expected, found = plain.run()[0], scaled.run()[0]
    assert abs(found.logit_error - expected.logit_error) < 2e-3
    assert plain.weights_digest == scaled.weights_digest
