"""What a step that went wrong may have spoilt is neither reused nor copied. [8, 39] of (d)."""

from __future__ import annotations

import pytest

from runtime_cache.engine.batch import RowCopy
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
