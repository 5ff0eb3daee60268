"""Deterministic mode: the same tokens are computed by the same runs, hit or miss, preempted or not.

Blocks hold four tokens; the grid is that of the chunk, which need not be a multiple of a block.
"""

from __future__ import annotations

import pytest

from om_models.manifest import Gear
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.state import EngineState
from runtime_cache.errors import ConfigError
from tests.support.engine_rig import EngineRig, expected_answer, limits, make_caches, small_gears

#: Role, gear, tokens before and tokens fed, of one row.
Run = tuple[str, Gear, int, tuple[int, ...]]


def make_rig(
    chunk: int, *, num_blocks: int = 24, max_running: int = 3, is_enabled: bool = True
) -> EngineRig:
    gears = GearTable([Gear(1, chunk, 32)], [Gear(4, 1, 32)]).fixed(chunk)
    return EngineRig(
        num_blocks=num_blocks,
        gears=gears,
        policy=CachePolicy(grid_tokens=gears.chunk, is_enabled=is_enabled),
        config=limits(is_deterministic=True, max_running=max_running),
    )


def runs(rig: EngineRig, request_id: int) -> list[Run]:
    """What was run for a request."""
    return [
        (batch.role, batch.gear, row.num_past, tuple(row.token_ids.tolist()))
        for batch in rig.batches
        for row in batch.rows
        if row.request_id == request_id
    ]


def runs_of_a_miss(chunk: int, prompt: list[int], max_tokens: int) -> list[Run]:
    rig = make_rig(chunk)
    rig.arrive(prompt, max_tokens=max_tokens)
    rig.run()
    return runs(rig, 1)


@pytest.mark.parametrize("chunk", [3, 4, 6, 8])
@pytest.mark.parametrize("num_shared", [0, 1, 3, 4, 5, 6, 8, 9, 12, 13, 14])
def test_a_hit_goes_on_as_a_miss_does(chunk: int, num_shared: int) -> None:
    prompt = list(range(14))
    rig = make_rig(chunk)
    rig.arrive([*prompt[:num_shared], 60, 61], max_tokens=2)
    rig.run()
    second = rig.arrive(prompt, max_tokens=5)
    rig.run()
    hit = min(num_shared, 13) // chunk * chunk
    assert rig.finished(second).usage.cached_tokens == hit
    miss = runs_of_a_miss(chunk, prompt, 5)
    assert runs(rig, second) == [run for run in miss if run[2] >= hit]
    assert rig.token_ids[second] == expected_answer(prompt, 5)


@pytest.mark.parametrize("chunk", [3, 4, 6, 8])
def test_a_preempted_request_is_run_again_as_before(chunk: int) -> None:
    rig = make_rig(chunk, num_blocks=6)
    prompts = [list(range(start, start + 7)) for start in (10, 30)]
    ids = [rig.arrive(prompt, max_tokens=9) for prompt in prompts]
    rig.run()
    assert rig.state.snapshot().engine.preemptions > 0
    miss = runs_of_a_miss(chunk, prompts[1], 9)
    found = runs(rig, ids[1])
    assert len(found) > len(miss)
    assert set(found) == set(miss)
    starts = [run[2] for run in found]
    last = max(place for place in range(len(starts)) if starts[place] <= 7 // chunk * chunk)
    assert found[last:] == [run for run in miss if run[2] >= starts[last]]
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert rig.token_ids[request_id] == expected_answer(prompt, 9)


def test_a_preempted_request_reuses_no_answer_that_another_prefilled() -> None:
    """The older request's prompt is the younger one's with its answer; both are in the cache."""
    prompt = list(range(6))
    rig = make_rig(4, num_blocks=7, max_running=2)
    older = rig.arrive([*prompt, *expected_answer(prompt, 6)], max_tokens=9)
    younger = rig.arrive(prompt, max_tokens=9)
    while rig.state.snapshot().engine.preemptions == 0:
        rig.step_done()
    assert len(rig.token_ids[younger]) == 3
    rig.run()
    assert list(rig.finals) == [older, younger]
    assert rig.token_ids[younger] == expected_answer(prompt, 9)
    assert set(runs(rig, younger)) == {r for r in runs_of_a_miss(4, prompt, 9) if r[2] >= 4}


def test_what_is_fed_again_is_not_sampled_again() -> None:
    rig = make_rig(4, num_blocks=6)
    for start in (10, 30):
        rig.arrive(range(start, start + 7), max_tokens=9)
    rig.run()
    sampled = [row for batch in rig.batches for row in batch.rows if row.sampler is not None]
    assert len(sampled) == 2 * 9
    assert [len(rig.token_ids[i]) for i in (1, 2)] == [9, 9]


def test_answers_are_never_shared() -> None:
    rig = make_rig(4)
    rig.arrive(range(6), max_tokens=9)
    rig.run()
    turn = [*range(6), *expected_answer(range(6), 9)]
    second = rig.arrive([*turn, 50], max_tokens=1)
    rig.run()
    assert rig.finished(second).usage.cached_tokens == 4


def test_the_last_token_of_a_prompt_is_prefilled() -> None:
    rig = make_rig(4)
    rig.arrive(range(5), max_tokens=1)
    rig.run()
    rig.arrive([50], max_tokens=1)
    rig.run()
    assert [(b.role, len(b.rows[0].token_ids)) for b in rig.batches] == [
        ("prefill", 4),
        ("prefill", 1),
        ("prefill", 1),
    ]


def test_chunks_are_not_cut_for_running_answers() -> None:
    rig = make_rig(8)
    rig.arrive([1, 2, 3], max_tokens=9)
    rig.step_done()
    rig.arrive(range(16), max_tokens=1)
    rig.step_done()
    assert rig.rows() == [(2, 0, 8)]


def test_a_decode_step_feeds_one_row() -> None:
    rig = make_rig(4)
    for token in (10, 20, 30):
        rig.arrive([token], max_tokens=3)
    rig.run()
    assert {len(batch.rows) for batch in rig.batches} == {1}
    assert {batch.gear for batch in rig.batches} == {Gear(1, 4, 32), Gear(4, 1, 32)}


def test_a_registration_is_computed_and_kept_on_the_grid() -> None:
    rig = make_rig(6)
    rig.register("p", range(14))
    rig.run()
    assert rig.pool.num_rows_written == 12
    assert [keep.num_tokens for keep in rig.cache.keeps] == [12]
    rig.register("q", range(5))
    assert rig.finished(2).reason == "registered"
    assert [keep.num_tokens for keep in rig.cache.keeps] == [12, 0]


def test_equal_prompts_are_computed_once_up_to_the_grid() -> None:
    rig = make_rig(4, num_blocks=100)
    for _ in range(8):
        rig.arrive(range(18), max_tokens=1)
    rig.run()
    assert rig.pool.num_rows_written == 18 + 7 * 2


def test_a_cache_that_is_off_makes_no_difference() -> None:
    prompt = list(range(14))
    rig = make_rig(4, is_enabled=False)
    rig.arrive(prompt, max_tokens=5)
    rig.run()
    assert runs(rig, 1) == runs_of_a_miss(4, prompt, 5)


@pytest.mark.parametrize(
    ("gears", "grid"),
    [
        (small_gears(), 8),
        (small_gears().fixed(4), 1),
        (small_gears().fixed(4), 8),
        (GearTable([Gear(1, 4, 32)], [Gear(2, 1, 32)]), 4),
    ],
)
def test_gears_and_grid_must_belong_together(gears: GearTable, grid: int) -> None:
    caches = make_caches(24, policy=CachePolicy(grid_tokens=grid))
    with pytest.raises(ConfigError, match="deterministic mode needs"):
        EngineState(caches, gears, limits(is_deterministic=True))
