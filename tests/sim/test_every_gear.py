"""The portable graph, as converted, served through every gear of its plan, in both layouts.

Requests are chosen so that the scheduler itself uses each gear; answers are the numpy oracle's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from om_models.bundle import Bundle
from om_models.manifest import Gear
from om_models.plan import ConvertOptions
from om_models.reference import ReferenceLlama
from om_models.spec import ModelSpec
from runtime_cache.engine.gears import Role
from tests.support.served import Comparison, Served, oracle, random_prompt, served
from tests.support.tiny import FAMILY_SPECS, make_bundle, tiny_reference, tiny_spec

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

GEARS = "prefill=4,8,16@8,24,48 decode=1,2,4@8,24,48"
#: Name → model, conversion options, bound of a logit's error.
VARIANTS: dict[str, tuple[ModelSpec, dict[str, Any], float]] = {
    "fused": (tiny_spec(), {}, 1e-4),
    "split": (tiny_spec(), {"layout": "split"}, 1e-4),
    "half, two groups, int64": (
        tiny_spec(num_kv_heads=1, tie_embeddings=False),
        {"dtype": "float16", "num_kv_groups": 2, "index_dtype": "int64"},
        2e-2,
    ),
    **{family: (spec, {}, 1e-4) for family, spec in FAMILY_SPECS.items()},
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, ReferenceLlama, float]:
    spec, changes, bound = VARIANTS[request.param]
    options = ConvertOptions("sim", kv_tokens=1024, gears=GEARS, **changes)
    bundle = make_bundle(tmp_path_factory.mktemp("gears"), spec, options=options)
    return bundle, tiny_reference(spec), bound


def compiled_gears(bundle: Bundle) -> set[tuple[Role, Gear]]:
    oms = bundle.manifest.oms
    prefill: set[tuple[Role, Gear]] = {("prefill", gear) for om in oms for gear in om.prefill}
    return prefill | {("decode", gear) for om in oms for gear in om.decode}


async def ask_all(host: Served, model: ReferenceLlama, bound: float) -> Comparison:
    """Prompts of every length, in groups of up to four at once."""
    comparison = Comparison(bound)
    groups = [[1, 1, 2, 2]]  # four that decode together while all are short
    for seed, size in enumerate((1, 2, 4, 4, 3)):
        lengths = [length for length in range(1, 44) if length % 5 == seed]
        groups += [lengths[first : first + size] for first in range(0, len(lengths), size)]
    for number, lengths in enumerate(groups):
        prompts = [random_prompt(99 * number + n, length) for n, length in enumerate(lengths)]
        asked = [(prompt, min(20, 48 - len(prompt))) for prompt in prompts]
        answers = await asyncio.gather(*(host.greedy(*one) for one in asked))
        for (prompt, num_tokens), answer in zip(asked, answers, strict=True):
            tokens, margins = oracle(model, prompt, num_tokens)
            comparison.check(answer.token_ids, tokens, margins)
    return comparison


async def test_every_gear_serves_what_the_oracle_says(
    variant: tuple[Bundle, ReferenceLlama, float], record_property: Any
) -> None:
    bundle, model, bound = variant
    async with served(bundle) as host:
        comparison = await ask_all(host, model, bound)
        used = {(batch.role, batch.gear) for batch in host.batches}
        assert used == compiled_gears(bundle)
    assert len(used) == 18
    assert comparison.num_equal > 400
    comparison.report(record_property)


async def test_rows_and_padding_of_every_step_add_up(
    variant: tuple[Bundle, ReferenceLlama, float],
) -> None:
    bundle, model, bound = variant
    async with served(bundle) as host:
        await ask_all(host, model, bound)
        for role, counters in host.runtime.executor.counters.items():
            batches = [batch for batch in host.batches if batch.role == role]
            fed = sum(len(row.token_ids) for batch in batches for row in batch.rows)
            computed = sum(batch.gear.batch * batch.gear.chunk for batch in batches)
            assert counters.num_steps == len(batches)
            assert counters.rows_appended == fed
            assert counters.rows_padded == computed - fed
