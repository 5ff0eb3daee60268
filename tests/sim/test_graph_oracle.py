"""The exported graph computes what the numpy oracle computes, whatever the padding and layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from om_models.gears import GearPlan, grid
from om_models.graph import GraphOptions, write_llama
from om_models.manifest import Gear, KvSpec
from om_models.reference import KvCache
from om_models.spec import ModelSpec, RopeScaling
from tests.support.graph_runner import GraphRunner, Row
from tests.support.tiny import FAMILY_SPECS, tiny_reference, tiny_source, tiny_spec

#: Logits are about 3. float32: other orders of summation. float16: 11 bits through two layers.
BOUNDS = {"float32": 1e-5, "float16": 2e-2}
PLAN: GearPlan = grid(chunks=(4, 8), batches=(1, 2, 3), pasts=(4, 16))
NUM_TOKENS = 16
TOKENS = np.random.RandomState(3).randint(0, 250, NUM_TOKENS)


@dataclass(frozen=True)
class Variant:
    """One way to export."""

    spec: ModelSpec
    dtype: Any = "float32"
    index_dtype: Any = "int32"
    num_groups: int = 1
    padding: int = 0


VARIANTS = {
    "gqa": Variant(tiny_spec()),
    "mha_untied_int64": Variant(
        tiny_spec(num_kv_heads=4, tie_embeddings=False), index_dtype="int64"
    ),
    "two_groups": Variant(tiny_spec(num_layers=4), num_groups=2),
    "padded_rows": Variant(
        tiny_spec(hidden_size=33, num_heads=3, num_kv_heads=3, head_dim=6, vocab_size=261),
        padding=14,
    ),
    "padded_groups_llama3_rope": Variant(
        tiny_spec(
            num_kv_heads=1,
            head_dim=12,
            rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=16),
        ),
        num_groups=2,
        padding=4,
    ),
    "half": Variant(tiny_spec(num_kv_heads=4), dtype="float16"),
    "half_padded_groups_int64": Variant(
        tiny_spec(), dtype="float16", index_dtype="int64", num_groups=2, padding=16
    ),
    **{family: Variant(spec) for family, spec in FAMILY_SPECS.items()},
    "half_qwen2": Variant(FAMILY_SPECS["qwen2"], dtype="float16", padding=24),
    "half_qwen3": Variant(FAMILY_SPECS["qwen3"], dtype="float16"),
}


class Rig:
    """A graph with one sequence already in its pool, beside what the oracle says of it."""

    def __init__(self, variant: Variant, directory: Path) -> None:
        spec = variant.spec
        kv = KvSpec(
            dtype=variant.dtype,
            num_slots=4096,
            num_groups=variant.num_groups,
            layers_per_group=spec.num_layers // variant.num_groups,
            row_elements=spec.kv_dim + variant.padding,
        )
        options = GraphOptions(variant.dtype, variant.index_dtype, kv, max_model_len=64)
        write_llama(tiny_source(spec), options, directory / "model.onnx", lambda *_: None)
        self.graph = GraphRunner(directory / "model.onnx", kv, variant.index_dtype)
        self.oracle = tiny_reference(spec)
        self.bound = BOUNDS[variant.dtype]
        self.expected = self.oracle.forward(TOKENS, KvCache())
        self.slots = self.graph.take_slots(NUM_TOKENS)

    def check(self, logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
        np.testing.assert_allclose(logits, expected, atol=self.bound, rtol=0)

    def fill(self) -> None:
        """Put the whole sequence into the pool with the smallest prefill gears."""
        for first in range(0, NUM_TOKENS, 4):
            gear = Gear(1, 4, 4 if first <= 4 else 16)
            self.graph.run(gear, [self.row(first, first + 4, self.slots[first : first + 4])])

    def row(self, first: int, last: int, new_slots: list[int]) -> Row:
        """Feed tokens first..last-1 after the sequence's own first tokens."""
        return Row(TOKENS[first:last].tolist(), self.slots[:first], new_slots)


@pytest.fixture(params=VARIANTS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(VARIANTS[request.param], tmp_path)


def prefill_fits(gear: Gear) -> Iterator[tuple[int, int]]:
    """Every (past, end) of the sequence that a gear can run."""
    for num_past in range(min(gear.past, NUM_TOKENS - 1) + 1):
        for num_fed in range(1, min(gear.chunk, NUM_TOKENS - num_past) + 1):
            yield num_past, num_past + num_fed


def test_every_padding_of_every_prefill_gear(rig: Rig):
    rig.fill()
    num_runs = 0
    for gear in PLAN.prefill:
        for first, end in prefill_fits(gear):
            scratch = rig.graph.take_slots(end - first)
            logits = rig.graph.run(gear, [rig.row(first, end, scratch)])
            rig.check(logits[0], rig.expected[end - 1])
            for pool in rig.graph.pools:
                np.testing.assert_allclose(
                    pool[scratch], pool[rig.slots[first:end]], atol=rig.bound, rtol=0
                )
            num_runs += 1
    # chunk 4: 5 pasts × 4, then 16 pasts (the last three cut short); chunk 8 alike.
    assert num_runs == 20 + (13 * 4 + 3 + 2 + 1) + 40 + (9 * 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1)


def test_every_padding_of_every_decode_gear(rig: Rig):
    rig.fill()
    for gear in PLAN.decode:
        for num_rows in range(1, gear.batch + 1):
            for shift in range(min(gear.past, NUM_TOKENS - 1) + 1):
                # Unequal lengths in one batch, each from 0 to what the gear holds.
                pasts = [
                    (shift + 7 * row) % min(gear.past + 1, NUM_TOKENS) for row in range(num_rows)
                ]
                rows = [rig.row(past, past + 1, rig.graph.take_slots(1)) for past in pasts]
                rig.check(rig.graph.run(gear, rows), rig.expected[pasts])


def test_whole_prompt_then_decode(rig: Rig):
    slots = rig.graph.take_slots(12)
    cache = KvCache()
    logits = rig.graph.run(Gear(1, 8, 4), [Row(TOKENS[:7].tolist(), [], slots[:7])])
    rig.check(logits[0], rig.oracle.forward(TOKENS[:7], cache)[-1])
    for step in range(7, 12):
        row = Row([int(TOKENS[step])], slots[:step], [slots[step]])
        logits = rig.graph.run(Gear(2, 1, 16), [row])
        rig.check(logits[0], rig.oracle.forward(TOKENS[step : step + 1], cache)[-1])


def test_sequences_share_a_prefix_in_place(rig: Rig):
    rig.fill()
    rows, expected = [], []
    for token in (5, 77, 200):
        cache = KvCache()
        rig.oracle.forward(TOKENS[:9], cache)
        expected.append(rig.oracle.forward(np.array([token]), cache)[-1])
        rows.append(Row([token], rig.slots[:9], rig.graph.take_slots(1)))
    rig.check(rig.graph.run(Gear(3, 1, 16), rows), np.array(expected))


def test_unwritten_slots_would_show(rig: Rig):
    logits = rig.graph.run(Gear(1, 4, 4), [Row([1], rig.slots[:1], rig.graph.take_slots(1))])
    assert np.isnan(logits).all()
