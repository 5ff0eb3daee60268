"""What is reused, exactly: prompts, answers, parts of blocks; and what is told of it.

Blocks hold four tokens; prefill chunks are 4 or 8. The numbers in brackets are those of the reports
in facts/peers.md (d) that a test answers.
"""

from __future__ import annotations

from collections import Counter

import pytest

from om_models.manifest import Gear
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.results import CacheReport
from runtime_cache.engine.batch import RowCopy
from runtime_cache.engine.commands import FinishRequest
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.request import SamplingParams
from tests.support.engine_rig import EngineRig, expected_answer, limits, small_gears

PROMPT = list(range(20, 30))


def answered(rig: EngineRig, prompt: list[int], max_tokens: int) -> list[int]:
    """The prompt and its answer, which is now in the cache."""
    request_id = rig.arrive(prompt, max_tokens=max_tokens)
    rig.run()
    assert rig.token_ids[request_id] == expected_answer(prompt, max_tokens)
    return prompt + rig.token_ids[request_id]


def cached_tokens(rig: EngineRig, prompt: list[int]) -> int:
    """What a request with this prompt reuses; checked against what the device computes."""
    before = rig.pool.num_rows_written
    request_id = rig.arrive(prompt, max_tokens=1)
    rig.run()
    usage = rig.finished(request_id).usage
    assert rig.pool.num_rows_written - before == len(prompt) - usage.cached_tokens
    return usage.cached_tokens


# -- token-exact --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shared", range(11))
def test_every_shared_token_but_the_last_is_reused(num_shared: int) -> None:
    """[28, 29]: what the device computes falls, by as much as the two have in common."""
    rig = EngineRig()
    answered(rig, PROMPT, 1)
    assert cached_tokens(rig, [*PROMPT[:num_shared], 50, 51]) == num_shared


def test_a_prompt_sent_again_computes_its_last_token() -> None:
    """[47], also for prompts of one token and of whole blocks."""
    for num_tokens in (1, 4, 8, 10):
        rig = EngineRig()
        prompt = PROMPT[:num_tokens]
        answered(rig, prompt, 3)
        request_id = rig.arrive(prompt, max_tokens=3)
        assert rig.rows() == [(request_id, num_tokens - 1, 1)]
        rig.run()
        assert rig.token_ids[request_id] == expected_answer(prompt, 3)


def test_the_first_step_carries_the_copy() -> None:
    rig = EngineRig()
    answered(rig, PROMPT, 1)
    rig.arrive([*PROMPT[:6], *range(40, 50)], max_tokens=1)
    rig.step_done()
    first, second = rig.batches[-2:]
    # Blocks 1 to 3 are the first request's; the copy goes into the first new block.
    assert first.rows[0].copies == (RowCopy(2 * 4, 4 * 4, 2),)
    assert first.rows[0].past_slots.tolist() == [4, 5, 6, 7, 16, 17]
    assert second.rows[0].copies == ()


def test_both_blocks_are_held_until_the_copy_is_done() -> None:
    rig = EngineRig()
    answered(rig, PROMPT, 1)
    rig.arrive([*PROMPT[:6], *range(40, 50)], max_tokens=1)
    # Four blocks for sixteen tokens, and the source.
    assert rig.gauges() == (5, 1, 17)
    rig.evict()
    assert rig.gauges() == (5, 0, 18)
    rig.step_done()
    assert rig.gauges() == (4, 1, 18)


def test_two_requests_copy_from_one_block_in_one_step() -> None:
    rig = EngineRig()
    answered(rig, PROMPT, 1)
    ids = [rig.arrive([*PROMPT[:7], token], max_tokens=3) for token in (50, 51)]
    rig.run()
    for request_id, token in zip(ids, (50, 51), strict=True):
        assert rig.token_ids[request_id] == expected_answer([*PROMPT[:7], token], 3)
    assert rig.pool.num_rows_copied == 6


@pytest.mark.parametrize("end", ["cancelled", "failed", "bad", "deadline"])
def test_a_copy_that_comes_to_nothing_gives_its_source_back(end: str) -> None:
    """[40]: also in the step that copies."""
    rig = EngineRig()
    answered(rig, PROMPT, 1)
    request_id = rig.arrive(PROMPT, max_tokens=4, deadline_s=rig.now_s + 1.0)
    assert len(rig.batches[-1].rows[0].copies) == 1
    if end == "cancelled":
        rig.cancel(request_id)
        rig.step_done()
    elif end == "failed":
        rig.step_failed()
    else:
        rig.step_done(bad=request_id if end == "bad" else None)
    assert rig.cache.num_live == 0
    # Bad logits may come from any row that was read, the copied ones included.
    assert cached_tokens(rig, PROMPT) == (0 if end == "bad" else 9)


def test_the_block_to_copy_from_may_be_the_one_that_is_missing() -> None:
    """Found by `tests/property/test_engine.py`: this request was refused in an idle engine."""
    rig = EngineRig(num_blocks=5)
    prompt = list(range(14))
    answered(rig, prompt, 2)
    request_id = rig.arrive([*prompt, 0, 0], max_tokens=1)
    assert rig.batches[-1].rows[0].copies == ()
    rig.run()
    usage = rig.finished(request_id).usage
    assert (usage.cached_tokens, usage.prefilled_tokens) == (12, 4)
    assert usage.cache is not None
    assert (usage.cache.cached_tokens, usage.cache.reason) == (12, "evicted")


# -- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_a_finished_answer_is_reused_but_for_its_last_token(max_tokens: int) -> None:
    """[25]: the last token of an answer was never fed, so it has no KV."""
    rig = EngineRig()
    turn = answered(rig, PROMPT, max_tokens)
    assert cached_tokens(rig, [*turn, 50, 51]) == len(turn) - 1


def test_a_stopped_answer_is_reused() -> None:
    rig = EngineRig()
    text = "".join(chr(ord("A") + token) for token in expected_answer(PROMPT, 3))
    rig.arrive(PROMPT, params=SamplingParams(temperature=0.0, stop=(text[2],)))
    rig.run()
    assert rig.finished(1).reason == "stop"
    assert cached_tokens(rig, PROMPT + rig.token_ids[1] + [50]) == 12


@pytest.mark.parametrize("is_in_step", [False, True])
@pytest.mark.parametrize("is_deadline", [False, True])
def test_an_answer_that_was_ended_early_is_reused(is_in_step: bool, is_deadline: bool) -> None:
    rig = EngineRig()
    prompt = PROMPT[:9]
    rig.arrive(prompt, max_tokens=9, deadline_s=rig.now_s + 50.0)
    for _ in range(3):
        rig.step_done()
    assert rig.rows() == [(1, 10, 1)]
    if not is_in_step:
        rig.arrive([40, 41, 42], max_tokens=1)
        rig.step_done()
        assert rig.rows() == [(2, 0, 3)]
    if is_deadline:
        rig.tick(50.0)
    else:
        rig.cancel(1)
    rig.run()
    assert rig.finished(1).reason == ("deadline" if is_deadline else "cancelled")
    # The step in which it ended counts, whether it was in flight or just done.
    assert cached_tokens(rig, [*prompt, *expected_answer(prompt, 3), 50]) == 11


def test_a_prompt_can_be_reused_while_it_is_being_answered() -> None:
    rig = EngineRig()
    rig.arrive(PROMPT, max_tokens=9)
    rig.step_done()
    rig.step_done()
    request_id = rig.arrive([*PROMPT, 50, 51], max_tokens=2)
    rig.run()
    assert rig.finished(request_id).usage.cached_tokens == 10


@pytest.mark.parametrize("is_failed", [True, False])
def test_what_a_failed_answer_computed_is_not_reused(is_failed: bool) -> None:
    rig = EngineRig()
    rig.arrive(PROMPT, max_tokens=9)
    for _ in range(4):
        rig.step_done()
    if is_failed:
        rig.step_failed()
    else:
        rig.step_done(bad=1)
    turn = PROMPT + expected_answer(PROMPT, 4)
    assert cached_tokens(rig, [*turn, 50]) == (12 if is_failed else 0)


# -- preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9])
def test_answers_are_the_same_however_often_requests_give_way(
    num_blocks: int, is_enabled: bool
) -> None:
    """[2]: with the cache off, on, and on with a pool too small for all."""
    rig = EngineRig(num_blocks=num_blocks, policy=CachePolicy(is_enabled=is_enabled))
    prompts = [list(range(start, start + 5)) for start in (10, 10, 30, 40)]
    ids = [rig.arrive(prompt, max_tokens=11) for prompt in prompts]
    rig.run()
    assert rig.state.snapshot().engine.preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert rig.token_ids[request_id] == expected_answer(prompt, 11)


def test_a_preempted_request_goes_on_from_what_is_left_and_counts_once() -> None:
    rig = EngineRig(num_blocks=5)
    first = rig.arrive(range(5), max_tokens=8)
    second = rig.arrive(range(20, 25), max_tokens=9)
    while rig.state.snapshot().engine.preemptions == 0:
        rig.step_done()
    while rig.rows()[0][0] == first:
        rig.step_done()
    # It had four tokens in one block and two in another, which went to the older answer.
    assert rig.rows() == [(second, 4, 3)]
    rig.run()
    assert rig.token_ids[second] == expected_answer(range(20, 25), 9)
    usage = rig.finished(second).usage
    assert (usage.cached_tokens, usage.cache) == (0, CacheReport(0, "cold"))
    snapshot = rig.state.snapshot()
    assert snapshot.cache.queried_tokens == 5 + 5
    assert snapshot.requests_by_reason == {"cold": 2}


def test_a_preempted_prompt_goes_on_within_a_block() -> None:
    gears = GearTable([Gear(1, 6, 32)], [Gear(4, 1, 32)])
    rig = EngineRig(num_blocks=10, gears=gears)
    older = rig.arrive([10, 11, 12, 13], max_tokens=6)
    rig.step_done()
    younger = rig.arrive(range(20, 48), max_tokens=1)
    while rig.state.snapshot().engine.preemptions == 0:
        rig.step_done()
    while rig.rows()[0][0] == older:
        rig.step_done()
    # Three chunks of six had been done; the room it gave up was that of the tokens behind them.
    assert rig.rows() == [(younger, 18, 6)]
    assert [copy.num_tokens for copy in rig.batches[-1].rows[0].copies] == [2]
    rig.run()
    assert rig.token_ids[younger] == expected_answer(range(20, 48), 1)


# -- single flight ------------------------------------------------------------------------------


def test_equal_cold_prompts_are_computed_once() -> None:
    """[44]: 64 at once cost one prompt, and a last token each."""
    rig = EngineRig(num_blocks=400, gears=small_gears(64, max_batch=16))
    prompt = list(range(40))
    ids = [rig.arrive(prompt, max_tokens=2) for _ in range(64)]
    rig.run()
    assert rig.pool.num_rows_written == 40 + 63 + 64
    assert [rig.finished(i).usage.prefilled_tokens for i in ids] == [40] + [1] * 63
    assert {tuple(rig.token_ids[i]) for i in ids} == {tuple(expected_answer(prompt, 2))}


def test_prompts_with_one_beginning_share_it() -> None:
    rig = EngineRig(num_blocks=400, gears=small_gears(64, max_batch=16))
    for token in range(16):
        rig.arrive([*range(22), token, 50], max_tokens=1)
    rig.run()
    assert rig.pool.num_rows_written == 24 + 15 * 2


@pytest.mark.parametrize("end", ["cancelled", "failed", "bad"])
def test_a_waiter_takes_over_from_what_was_committed(end: str) -> None:
    rig = EngineRig()
    prompt = list(range(22))
    first, second = rig.arrive(prompt, max_tokens=1), rig.arrive(prompt, max_tokens=1)
    rig.step_done()
    rig.step_done()
    assert rig.rows() == [(first, 16, 6)]
    if end == "cancelled":
        rig.cancel(first)
        rig.step_done()
    elif end == "failed":
        rig.step_failed()
    else:
        rig.step_done(bad=first)
    # A cancelled step is done all the same; a failed one leaves what was done before it.
    expected = {"cancelled": (second, 21, 1), "failed": (second, 16, 6), "bad": (second, 0, 8)}
    assert rig.rows() == [expected[end]]
    rig.run()
    assert rig.token_ids[second] == expected_answer(prompt, 1)


def test_the_deadline_of_a_waiter_holds() -> None:
    rig = EngineRig()
    prompt = list(range(22))
    rig.arrive(prompt, max_tokens=1)
    waiter = rig.arrive(prompt, max_tokens=1, deadline_s=rig.now_s + 2.0)
    rig.step_done()
    rig.step_done()
    final = rig.finished(waiter)
    assert (final.reason, final.usage.cache) == ("deadline", None)


# -- cache off for one request ------------------------------------------------------------------


def test_a_request_without_the_cache_neither_reads_nor_leaves_anything() -> None:
    rig = EngineRig()
    answered(rig, PROMPT, 1)
    before = rig.gauges()
    request_id = rig.arrive(PROMPT, max_tokens=4, use_cache=False)
    assert rig.rows() == [(request_id, 0, 8)]
    rig.run()
    assert rig.gauges() == before
    usage = rig.finished(request_id).usage
    assert usage.cache == CacheReport(0, "disabled", detail="the request says so (use_cache)")
    assert (usage.cached_tokens, usage.prefilled_tokens) == (0, 10)
    snapshot = rig.state.snapshot()
    assert snapshot.requests_by_reason == {"cold": 1, "disabled": 1}
    assert snapshot.cache.queried_tokens == 10


def test_what_a_request_leaves_has_its_priority() -> None:
    rig = EngineRig(num_blocks=8)
    rig.arrive(range(8), max_tokens=1, cache_priority=60)
    rig.run()
    rig.arrive(range(20, 36), max_tokens=1, cache_priority=40)
    rig.run()
    rig.arrive(range(40, 52), max_tokens=1)
    rig.run()
    assert cached_tokens(rig, list(range(8))) == 7


# -- counters -----------------------------------------------------------------------------------


def test_counters_equal_those_of_a_log() -> None:
    """[50]: recomputed from the answers, monotonic, each request once."""
    rig = EngineRig(num_blocks=9, config=limits(max_running=3))
    prompts = [[*PROMPT[: n % 7], *range(n % 5 + 1)] for n in range(40)]
    before = rig.state.snapshot()
    for number, prompt in enumerate(prompts):
        rig.arrive(prompt, max_tokens=1 + number % 9, use_cache=number % 6 > 0)
        if number % 3 and rig.batch is not None:
            rig.step_done()
        now = rig.state.snapshot()
        assert now.cache.queried_tokens >= before.cache.queried_tokens
        assert now.cache.hit_tokens >= before.cache.hit_tokens
        assert not before.requests_by_reason - now.requests_by_reason
        before = now
    rig.run()
    usages = [f.usage for f in rig.finals.values() if isinstance(f, FinishRequest)]
    assert len(usages) == 40
    assert all(0 <= u.cached_tokens <= u.prompt_tokens for u in usages)
    told = [(u, u.cache) for u in usages if u.cache is not None]
    assert all(u.cached_tokens == report.cached_tokens for u, report in told)
    looked_up = [u for u, report in told if report.reason != "disabled"]
    snapshot = rig.state.snapshot()
    assert snapshot.engine.preemptions > 0
    assert snapshot.requests_by_reason == Counter(report.reason for _, report in told)
    assert snapshot.cache.queried_tokens == sum(u.prompt_tokens for u in looked_up)
    assert snapshot.cache.hit_tokens == sum(u.cached_tokens for u in looked_up)
    assert snapshot.engine.prefill_tokens == sum(u.prefilled_tokens for u in usages)


# -- failures at every step ---------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cancelled", "failed", "bad"])
@pytest.mark.parametrize("num_steps", range(7))
def test_an_end_at_any_step_leaves_nothing_held(num_steps: int, end: str) -> None:
    """[39, 40]: the rig compares every hold with its owner after each event."""
    rig = EngineRig()
    answered(rig, PROMPT[:7], 2)
    rig.arrive([*PROMPT[:6], *range(40, 56)], max_tokens=4)
    for _ in range(num_steps):
        if rig.batch is not None:
            rig.step_done()
    if rig.batch is not None and end == "cancelled":
        rig.cancel(2)
        rig.step_done()
    elif rig.batch is not None and end == "failed":
        rig.step_failed()
    elif rig.batch is not None:
        rig.step_done(bad=2)
    rig.run()
    assert rig.cache.num_live == 0
    assert sum(rig.gauges()) == 23
    rig.evict()
    assert rig.gauges() == (0, 0, 23)
