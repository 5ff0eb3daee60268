"""What a step that went wrong may have spoilt is neither reused nor copied. [8, 39] of (d)."""

from __future__ import annotations

import pytest

from runtime_cache.engine.batch import RowCopy
from runtime_cache.engine.commands import FinishRequest
from tests.support.engine_rig import EngineRig, expected_answer, limits, small_gears

#: A block and a half.
PROMPT = list(range(10, 16))
#: Two blocks.
LONG = list(range(10, 18))


def with_copy_before_it(prompt: list[int], other: list[int]) -> EngineRig:
    """Request 1 is answering, and request 2 is to copy rows of a block of it in the next step."""
    rig = EngineRig()
    rig.arrive(prompt, max_tokens=9)
    rig.arrive(other, max_tokens=2)
    rig.step_done()
    assert rig.rows() == [(1, len(prompt), 1)]
    (waiting,) = [s for s in rig.state._scheduler.running if s.status == "ready"]
    assert waiting.blocks().copy is not None
    assert waiting.num_computed > 4
    return rig


def end_step(rig: EngineRig, end: str) -> None:
    if end == "failed":
        rig.step_failed()
    else:
        rig.step_done(bad=1)


@pytest.mark.parametrize(("end", "num_left"), [("failed", 4), ("bad", 0)])
def test_a_block_that_a_failed_step_wrote_to_is_not_copied(end: str, num_left: int) -> None:
    """Its first rows are from an earlier step, but nobody knows what became of them."""
    other = [*PROMPT, *range(50, 56)]
    rig = with_copy_before_it(PROMPT, other)
    end_step(rig, end)
    assert rig.rows() == [(2, num_left, 8)]
    assert all(not row.copies for row in rig.batches[-1].rows)
    rig.run()
    assert rig.token_ids[2] == expected_answer(other, 2)
    assert rig.pool.num_rows_copied == 0


@pytest.mark.parametrize(("end", "num_left"), [("failed", 6), ("bad", 0)])
def test_full_blocks_are_left_by_a_failed_step_and_not_by_bad_logits(
    end: str, num_left: int
) -> None:
    other = [*LONG[:6], *range(50, 56)]
    rig = with_copy_before_it(LONG, other)
    end_step(rig, end)
    assert rig.rows() == [(2, num_left, 12 - num_left if num_left else 8)]
    copies = (RowCopy(2 * 4, rig.batches[-1].rows[0].appends[0].first_slot - 2, 2),)
    assert rig.batches[-1].rows[0].copies == (copies if num_left else ())
    rig.run()
    assert rig.token_ids[2] == expected_answer(other, 2)


@pytest.mark.parametrize("end", ["failed", "bad"])
def test_who_went_back_counts_once_and_leaves_nothing_held(end: str) -> None:
    rig = with_copy_before_it(PROMPT, [*PROMPT, 50, 51])
    end_step(rig, end)
    rig.run()
    snapshot = rig.state.snapshot()
    assert snapshot.requests_by_reason == {"cold": 1, "extended": 1}
    assert snapshot.cache.queried_tokens == 6 + 8
    assert (snapshot.num_live_blocks, snapshot.engine.preemptions) == (0, 1)


def test_who_went_back_comes_again_in_order_of_arrival() -> None:
    rig = EngineRig(gears=small_gears(max_batch=1), config=limits(max_running=8))
    rig.arrive(PROMPT, max_tokens=9)
    for last in (50, 51, 52):
        rig.arrive([*PROMPT, last], max_tokens=3)
    rig.step_done()
    assert rig.rows() == [(2, 6, 1)]
    rig.step_failed()  # 3 and 4 had a copy before them
    assert [s.request.request_id for s in rig.state._scheduler.running] == [1, 3, 4]
    rig.run()


# --- bad logits after a hit --------------------------------------------------------------------


def damaged_rig(conversations: int = 2) -> EngineRig:
    """Two prompts that begin with PROMPT have been answered; a third one hits, with bad logits."""
    rig = EngineRig()
    for last in range(conversations):
        rig.arrive([*PROMPT, 30 + last], max_tokens=2)
        rig.run()
    rig.arrive([*PROMPT, 50], max_tokens=2)
    assert rig.rows() == [(3, 6, 1)]
    rig.step_done(bad=3)
    return rig


def test_bad_logits_after_a_hit_are_computed_again_without_the_cache() -> None:
    rig = damaged_rig()
    assert rig.rows() == [(3, 0, 7)]
    rig.run()
    final = rig.finals[3]
    assert isinstance(final, FinishRequest)
    assert rig.token_ids[3] == expected_answer([*PROMPT, 50], 2)
    assert (final.usage.cached_tokens, final.usage.prefilled_tokens) == (6, 7)
    counters = rig.state.snapshot().engine
    assert (counters.recomputed, counters.failed) == (1, 0)


def test_what_was_damaged_leaves_the_cache_with_all_that_goes_on_from_it() -> None:
    rig = damaged_rig()
    rig.run()
    assert len(rig.cache.index) == 0
    assert rig.cache.counters.damaged_blocks == 2  # the copied one went before
    rig.arrive([*PROMPT, 51], max_tokens=1)
    assert rig.rows() == [(4, 0, 7)]


def test_a_request_whose_logits_are_bad_without_the_cache_too_fails_and_the_cache_stays() -> None:
    rig = damaged_rig()
    rig.step_done(bad=3)
    assert rig.failed(3).code == "bad_logits"
    assert not rig.failed(3).retryable
    rig.arrive([*PROMPT, 51], max_tokens=1)
    assert rig.rows() == [(4, 6, 1)]
    rig.run()
    counters = rig.state.snapshot().engine
    assert (counters.recomputed, counters.failed) == (1, 1)


def test_a_request_with_the_damaged_blocks_goes_on_and_leaves_nothing() -> None:
    rig = EngineRig()
    for last in range(2):
        rig.arrive([*PROMPT, 30 + last], max_tokens=2)
        rig.run()
    rig.arrive([*PROMPT, 40], max_tokens=12)
    rig.step_done()
    rig.arrive([*PROMPT, 50], max_tokens=2)
    while 4 not in rig.finals:
        rows = rig.rows()
        rig.step_done(bad=4 if rows[0][:2] == (4, 6) or (4, 6, 1) in rows else None)
    rig.run()
    assert rig.token_ids[3] == expected_answer([*PROMPT, 40], 12)
    assert rig.token_ids[4] == expected_answer([*PROMPT, 50], 2)
    assert len(rig.cache.index) == 0
    assert rig.cache.num_live == 0


def test_who_is_cancelled_with_bad_logits_in_flight_is_not_computed_again() -> None:
    rig = EngineRig()
    rig.arrive(PROMPT, max_tokens=2)
    rig.run()
    rig.arrive([*PROMPT, 50], max_tokens=2)
    rig.cancel(2)
    rig.step_done(bad=2)
    assert rig.batch is None
    assert rig.state.snapshot().engine.recomputed == 0
