"""Which gears a bundle gets, by default and by request."""

from __future__ import annotations

import pytest

from om_models.gears import (
    MAX_GEARS,
    PLANS,
    GearPlan,
    check_plan,
    coarse_plan,
    fine_plan,
    grid,
    model_gears,
    parse_gears,
    small_plan,
)
from om_models.manifest import Gear
from runtime_cache.errors import ConversionError


def sizes(plan: GearPlan) -> tuple[list[int], list[int], list[int]]:
    """Chunks, batches and pasts of a plan that is a full grid."""
    chunks = sorted({gear.chunk for gear in plan.prefill})
    batches = sorted({gear.batch for gear in plan.decode})
    pasts = sorted({gear.past for gear in plan.prefill})
    assert plan == grid(chunks, batches, pasts)
    return chunks, batches, pasts


@pytest.mark.parametrize(
    ("context", "max_batch", "expected"),
    [
        (
            2048,
            16,
            ([16, 32, 64, 128, 256, 512], [1, 2, 4, 8, 16], [64, 128, 256, 512, 1024, 2048]),
        ),
        (100, 1, ([16, 32, 64, 100], [1], [50, 100])),
        (129, 3, ([16, 32, 64, 128, 129], [1, 2, 3], [64, 128, 129])),
        (2, 1, ([2], [1], [1, 2])),
    ],
)
def test_fine_plan(context: int, max_batch: int, expected: tuple[list[int], list[int], list[int]]):
    assert sizes(fine_plan(context, max_batch)) == expected


def test_a_fine_plan_that_would_be_too_large_is_thinned_and_keeps_the_context():
    plan = fine_plan(131072, 64)
    _, batches, pasts = sizes(plan)
    assert batches == [1, 2, 4, 8, 16, 32, 64]
    assert pasts == [128, 512, 2048, 8192, 32768, 131072]
    assert len(plan.prefill) + len(plan.decode) == 78


@pytest.mark.parametrize(
    ("context", "max_batch", "expected"),
    [
        (2048, 8, ([64, 256], [1, 8], [512, 2048])),
        (100, 1, ([64, 100], [1], [50, 100])),
        (1000, 64, ([64, 256], [1, 64], [256, 1000])),
        (2, 1, ([2], [1], [1, 2])),
    ],
)
def test_coarse_plan(
    context: int, max_batch: int, expected: tuple[list[int], list[int], list[int]]
):
    assert sizes(coarse_plan(context, max_batch)) == expected


@pytest.mark.parametrize(
    ("context", "max_batch", "expected"),
    [
        (2048, 8, ([128], [1, 8], [2048])),
        (127, 1, ([127], [1], [127])),
        (2, 2, ([2], [1, 2], [2])),
    ],
)
def test_small_plan(context: int, max_batch: int, expected: tuple[list[int], list[int], list[int]]):
    assert sizes(small_plan(context, max_batch)) == expected


def test_the_named_plans():
    made = {name: make(2048, 8) for name, make in PLANS.items()}
    assert {name: len(plan.prefill) + len(plan.decode) for name, plan in made.items()} == {
        "small": 3,
        "balanced": 8,
        "fine": 60,
    }


def test_default_plans_suit_atc_whatever_is_asked():
    for context in (*range(2, 300), 1023, 1024, 1025, 2048, 8192, 100_000, 131072):
        for max_batch in (1, 2, 3, 7, 16, 33, 64):
            fine, coarse = fine_plan(context, max_batch), coarse_plan(context, max_batch)
            assert len(coarse.prefill) + len(coarse.decode) <= 8
            for plan in (fine, coarse):
                assert plan.max_model_len == context
                assert max(gear.batch for gear in plan.decode) == max_batch
                assert min(len(plan.prefill), len(plan.decode)) >= 2, "ATC wants two gears"
                assert all(1 <= gear.chunk <= context for gear in plan.prefill)
                check_plan(plan, is_fused=True)


def test_explicit_gears():
    assert parse_gears("prefill=64,16@128 decode=1,4@64,128 prefill=32@64") == GearPlan(
        prefill=(Gear(1, 16, 128), Gear(1, 32, 64), Gear(1, 64, 128)),
        decode=(
            Gear(1, 1, 64),
            Gear(1, 1, 128),
            Gear(4, 1, 64),
            Gear(4, 1, 128),
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no prefill gear"),
        ("prefill=16@64", "names no decode gear"),
        ("decode=1@64", "names no prefill gear"),
        ("prefill=16x64", "'prefill=16x64' is none of small, balanced, fine and not of the form"),
        ("warmup=1@2", "'warmup=1@2' is none of small, balanced, fine and not"),
        ("prefill=0@64 decode=1@64", "must list numbers above 0"),
        ("prefill=16@, decode=1@64", "must list numbers above 0"),
    ],
)
def test_explicit_gears_that_do_not_read(text: str, message: str):
    with pytest.raises(ConversionError, match=message):
        parse_gears(text)


def test_the_limit_is_per_model():
    plan = grid(range(2, 52), range(1, 51), [64])
    assert (len(plan.prefill), len(plan.decode)) == (50, 50)
    check_plan(plan, is_fused=True)
    larger = grid(range(2, 53), range(1, 51), [64])
    check_plan(larger, is_fused=False)
    with pytest.raises(ConversionError, match=f"101 gears in one model; ATC takes {MAX_GEARS}"):
        check_plan(larger, is_fused=True)


def test_a_gear_that_serves_both_roles_is_compiled_once():
    plan = parse_gears("prefill=1,8@64 decode=1,2@64")
    assert model_gears(plan.prefill, plan.decode) == (
        Gear(1, 1, 64),
        Gear(1, 8, 64),
        Gear(2, 1, 64),
    )


def test_the_context_is_what_both_roles_reach():
    assert parse_gears("prefill=8@64,256 decode=1@64").max_model_len == 64
