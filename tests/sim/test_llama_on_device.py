"""Converted Llamas on the software device, through the driver: every gear, both layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from om_models.bundle import load_bundle
from om_models.manifest import Gear
from om_models.plan import ConvertOptions
from om_models.reference import KvCache
from om_models.spec import ModelSpec
from runtime_cache.engine.batch import BatchRow, SlotRun, StepBatch
from runtime_cache.engine.executor import Executor
from runtime_cache.engine.gears import Role
from runtime_cache.ids import RequestId, StepId
from tests.support.devices import opened
from tests.support.tiny import make_bundle, tiny_reference, tiny_spec

BLOCK = 16
GEARS = "prefill=4,8@8,24 decode=1,3@8,24"
BOUNDS = {"float32": 1e-5, "float16": 2e-2}
TOKENS = np.random.RandomState(5).randint(0, 250, 24).astype(np.int32)

BUNDLES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "fused": (tiny_spec(), {}),
    "split": (tiny_spec(tie_embeddings=False), {"layout": "split"}),
    "half_groups_padded_int64": (
        tiny_spec(num_kv_heads=1),
        {"dtype": "float16", "index_dtype": "int64", "num_kv_groups": 2},
    ),
}


class Served:
    """An open executor beside the oracle of the same weights."""

    def __init__(self, executor: Executor, spec: ModelSpec, bound: float) -> None:
        self.executor = executor
        self.oracle = tiny_reference(spec)
        self.bound = bound
        self._next_block = 1

    def take_block(self) -> int:
        """First slot of a block nobody uses; the pool is large enough for one test."""
        self._next_block += 2
        return (self._next_block - 2) * BLOCK

    def feed(self, base: int, first: int, end: int) -> BatchRow:
        """Feed TOKENS[first:end] into the two blocks at slot `base`, after what is there."""
        slots = np.arange(base, base + 2 * BLOCK, dtype=np.int32)
        return BatchRow(
            request_id=RequestId(0),
            token_ids=TOKENS[first:end],
            num_past=first,
            past_slots=slots[:first],
            appends=tuple(SlotRun(base + i, 1) for i in range(first, end)),
            sampler=cast("None", object()),
        )

    def run(self, gear: Gear, rows: list[BatchRow]) -> Any:
        role: Role = "decode" if gear.chunk == 1 else "prefill"
        return self.executor.run(StepBatch(StepId(1), role, gear, tuple(rows))).copy()


@pytest.fixture(scope="module", params=BUNDLES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec, changes = BUNDLES[request.param]
    options = ConvertOptions(target="sim", kv_tokens=1 << 14, gears=GEARS, **changes)
    made = make_bundle(tmp_path_factory.mktemp(request.param), spec, options=options)
    return load_bundle(made.path)


@pytest.fixture
def served(bundle: Any) -> Iterator[Served]:
    with opened() as device:
        executor = Executor.open(device, bundle.manifest, bundle.path, block_size=BLOCK)
        yield Served(executor, bundle.manifest.model, BOUNDS[bundle.manifest.dtype])
        executor.close()


def test_every_gear_computes_what_the_oracle_computes(bundle: Any, served: Served):
    expected = served.oracle.forward(TOKENS, KvCache())
    prefill = [gear for om in bundle.manifest.oms for gear in om.prefill]
    decode = [gear for om in bundle.manifest.oms for gear in om.decode]
    assert (len(prefill), len(decode)) == (4, 4)
    base = served.take_block()
    for first in range(0, 24, 4):
        gear = next(gear for gear in prefill if gear.chunk == 4 and gear.past >= first)
        served.run(gear, [served.feed(base, first, first + 4)])
    for gear in prefill:
        for past in (0, gear.past // 2 - 1, min(gear.past, 24 - gear.chunk)):
            # Appends what is there already, so that one sequence serves every gear.
            row = served.feed(base, past, past + gear.chunk)
            logits = served.run(gear, [row])
            np.testing.assert_allclose(
                logits[0], expected[past + gear.chunk - 1], atol=served.bound, rtol=0
            )
    for gear in decode:
        pasts = [min(gear.past, 23), 1, gear.past // 2][: gear.batch]
        logits = served.run(gear, [served.feed(base, past, past + 1) for past in pasts])
        np.testing.assert_allclose(logits, expected[pasts], atol=served.bound, rtol=0)


def test_greedy_decoding_through_the_pool(bundle: Any, served: Served):
    expected = served.oracle.forward(TOKENS[:12], KvCache())
    base = served.take_block()
    first_gear = Gear(1, 8, 8)
    served.run(first_gear, [served.feed(base, 0, 7)])
    for position in range(7, 12):
        gear = Gear(1, 1, 8 if position <= 8 else 24)
        logits = served.run(gear, [served.feed(base, position, position + 1)])
        np.testing.assert_allclose(logits[0], expected[position], atol=served.bound, rtol=0)


def test_layouts_of_the_same_weights_have_the_same_digest(tmp_path: Path):
    spec = tiny_spec()
    digests = {
        make_bundle(
            tmp_path / layout,
            spec,
            options=ConvertOptions(target="sim", kv_tokens=1024, gears=GEARS, layout=layout),
        ).manifest.digest
        for layout in ("fused", "split")
    }
    assert len(digests) == 1
