"""`write_inputs` against a per-element reference that follows the words of the contract."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from om_models.manifest import Gear
from runtime_cache.engine.batch import (
    _MANY_ROWS,
    BatchRow,
    InputViews,
    RowCopy,
    SlotRun,
    StepBatch,
    check_batch,
    write_inputs,
)
from runtime_cache.errors import InternalError
from runtime_cache.ids import RequestId, StepId

ROWS_PER_SLOT = 6
BLOCK = 4


def row(num_fed: int, num_past: int, first: int = 0) -> BatchRow:
    """A row with recognisable tokens and scattered, non-null slots."""
    return BatchRow(
        request_id=RequestId(first),
        token_ids=np.arange(100 + first, 100 + first + num_fed, dtype=np.int32),
        num_past=num_past,
        past_slots=(np.arange(num_past, dtype=np.int32) * 7 + first) % 50 + BLOCK,
        appends=(SlotRun(BLOCK, num_fed),),
        sampler=None,
    )


def step(gear: Gear, *rows: BatchRow) -> StepBatch:
    return StepBatch(StepId(1), "prefill" if gear.chunk > 1 else "decode", gear, rows)


def dirty_views(gear: Gear, index: Any = np.int32, kv: Any = np.float16) -> InputViews:
    """Arrays full of an earlier step's values."""
    batch, chunk, past = gear.batch, gear.chunk, gear.past
    return InputViews(
        input_ids=np.full((batch, chunk), 77, index),
        position_ids=np.full((batch, chunk), 77, index),
        past_rows=np.full((batch, past), 77, index),
        mask=np.full((batch, 1, chunk, past + chunk), 77, kv),
        last=np.full((batch,), 77, index),
    )


def expected_views(batch: StepBatch, index: Any, kv: Any) -> InputViews:
    """The contract, one element at a time."""
    views = dirty_views(batch.gear, index, kv)
    size, chunk, past = batch.gear.batch, batch.gear.chunk, batch.gear.past
    for b in range(size):
        fed = batch.rows[b] if b < len(batch.rows) else row(0, 0)
        num_fed = len(fed.token_ids)
        views.last[b] = b * chunk + max(num_fed - 1, 0)
        for s in range(chunk):
            views.input_ids[b, s] = fed.token_ids[s] if s < num_fed else 0
            views.position_ids[b, s] = fed.num_past + s if s < num_fed else 0
        for p in range(past):
            is_past = p < fed.num_past
            views.past_rows[b, p] = fed.past_slots[p] * ROWS_PER_SLOT if is_past else 0
        for s, key in product(range(chunk), range(past + chunk)):
            views.mask[b, 0, s, key] = 0 if is_visible(fed, s, key, past) else -1e4
    return views


def is_visible(fed: BatchRow, query: int, key: int, past: int) -> bool:
    if query >= len(fed.token_ids):
        return key == past + query
    return key < fed.num_past or past <= key <= past + query


def assert_same(found: InputViews, expected: InputViews) -> None:
    for name in ("input_ids", "position_ids", "past_rows", "mask", "last"):
        left: npt.NDArray[Any] = getattr(found, name)
        right: npt.NDArray[Any] = getattr(expected, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right, err_msg=name)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("kv", [np.float16, np.float32])
@pytest.mark.parametrize("gear", [Gear(1, 3, 4), Gear(1, 1, 4), Gear(2, 1, 3), Gear(3, 2, 1)])
def test_every_padding_of_a_small_gear(gear: Gear, index: Any, kv: Any) -> None:
    shapes = list(product(range(1, gear.chunk + 1), range(gear.past + 1)))
    for num_rows in range(1, gear.batch + 1):
        for chosen in product(shapes, repeat=num_rows):
            batch = step(gear, *(row(fed, past, 10 * i) for i, (fed, past) in enumerate(chosen)))
            views = dirty_views(gear, index, kv)
            check_batch(batch)
            write_inputs(batch, views, ROWS_PER_SLOT)
            assert_same(views, expected_views(batch, index, kv))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_gear_and_rows(data: st.DataObject) -> None:
    draw = data.draw
    sizes = st.integers(1, 9)
    gear = Gear(draw(st.integers(1, 4)), draw(sizes), draw(sizes))
    rows = [
        row(draw(st.integers(1, gear.chunk)), draw(st.integers(0, gear.past)), 10 * i)
        for i in range(draw(st.integers(1, gear.batch)))
    ]
    batch = step(gear, *rows)
    views = dirty_views(gear)
    write_inputs(batch, views, ROWS_PER_SLOT)
    assert_same(views, expected_views(batch, np.int32, np.float16))


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("kv", [np.float16, np.float32])
@pytest.mark.parametrize("num_rows", [_MANY_ROWS - 1, _MANY_ROWS, _MANY_ROWS + 1])
def test_many_rows_of_one_token(num_rows: int, index: Any, kv: Any) -> None:
    gear = Gear(_MANY_ROWS + 1, 1, 9)
    batch = step(gear, *(row(1, i % 10, 10 * i) for i in range(num_rows)))
    views = dirty_views(gear, index, kv)
    write_inputs(batch, views, ROWS_PER_SLOT)
    assert_same(views, expected_views(batch, index, kv))


def test_decode_inputs_in_full() -> None:
    batch = step(Gear(2, 1, 3), row(1, 2, first=5))
    views = dirty_views(batch.gear)
    write_inputs(batch, views, ROWS_PER_SLOT)
    assert views.input_ids.tolist() == [[105], [0]]
    assert views.position_ids.tolist() == [[2], [0]]
    assert views.past_rows.tolist() == [[9 * 6, 16 * 6, 0], [0, 0, 0]]
    assert views.mask[:, 0, 0].tolist() == [[0, 0, -1e4, 0], [-1e4, -1e4, -1e4, 0]]
    assert views.last.tolist() == [0, 1]


def test_prefill_mask_in_full() -> None:
    batch = step(Gear(1, 3, 2), row(2, 1))
    views = dirty_views(batch.gear)
    write_inputs(batch, views, ROWS_PER_SLOT)
    hidden = -1e4
    assert views.mask[0, 0].tolist() == [
        [0, hidden, 0, hidden, hidden],
        [0, hidden, 0, 0, hidden],
        [hidden, hidden, hidden, hidden, 0],
    ]
    assert views.last.tolist() == [1]


def test_slots_above_int16_are_exact_in_int32() -> None:
    fed = row(1, 1)
    far = BatchRow(fed.request_id, fed.token_ids, 1, np.array([2**20], np.int32), fed.appends, None)
    views = dirty_views(Gear(1, 1, 1))
    write_inputs(step(Gear(1, 1, 1), far), views, 64)
    assert views.past_rows.tolist() == [[2**26]]


def test_a_batch_that_fills_its_gear_is_accepted() -> None:
    check_batch(step(Gear(2, 3, 4), row(3, 4), row(3, 4, 10)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (step(Gear(1, 1, 4)), "0 rows"),
        (step(Gear(1, 1, 4), row(1, 0), row(1, 0)), "2 rows"),
        (step(Gear(1, 2, 4), row(3, 0)), "3 tokens fed"),
        (step(Gear(1, 2, 4), row(0, 0)), "0 tokens fed"),
        (step(Gear(1, 2, 4), row(1, 5)), "5 past tokens"),
    ],
)
def test_a_batch_that_does_not_fit_is_our_bug(batch: StepBatch, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_batch(batch)


@pytest.mark.parametrize(
    ("appends", "past_slots", "message"),
    [
        ((), [4], "2 tokens fed, 0 appended"),
        ((SlotRun(4, 1),), [4], "2 tokens fed, 1 appended"),
        ((SlotRun(4, 2), SlotRun(8, 1)), [4], "2 tokens fed, 3 appended"),
        ((SlotRun(4, 2),), [], "0 past slots for 1 past tokens"),
        ((SlotRun(4, 2),), [4, 5], "2 past slots for 1 past tokens"),
    ],
)
def test_a_row_whose_parts_disagree_is_our_bug(
    appends: tuple[SlotRun, ...], past_slots: list[int], message: str
) -> None:
    bad = BatchRow(
        RequestId(1),
        np.array([1, 2], np.int32),
        1,
        np.array(past_slots, np.int32),
        appends,
        None,
    )
    with pytest.raises(InternalError, match=message):
        check_batch(step(Gear(1, 2, 4), bad))


PAST = [8, 9, 10, 11, 40, 41, 42]  # a whole block, and three tokens of the next


def copying(*copies: RowCopy, past_slots: list[int] = PAST) -> StepBatch:
    """One row, two tokens fed behind the past."""
    tokens, past = np.array([1, 2], np.int32), np.array(past_slots, np.int32)
    return step(
        Gear(1, 2, 8),
        BatchRow(
            RequestId(1), tokens, len(past), past, (SlotRun(43, 1), SlotRun(16, 1)), None, copies
        ),
    )


@pytest.mark.parametrize(
    "copies",
    [
        (),
        (RowCopy(20, 40, 3),),
        (RowCopy(37, 40, 3),),  # adjacent slots are not the same slots
        (RowCopy(43, 40, 3),),
        (RowCopy(22, 42, 1),),
        (RowCopy(20, 40, 2), RowCopy(30, 42, 1)),
        (RowCopy(20, 8, 4), RowCopy(24, 40, 3)),  # the whole past
    ],
)
def test_copies_that_fill_the_end_of_the_past_are_accepted(copies: tuple[RowCopy, ...]) -> None:
    check_batch(copying(*copies))


@pytest.mark.parametrize(
    "copies",
    [
        (RowCopy(20, 40, 2),),  # ends before the past does
        (RowCopy(20, 40, 4),),  # goes on behind it
        (RowCopy(20, 41, 3),),
        (RowCopy(20, 39, 4),),
        (RowCopy(20, 8, 4),),  # not at the end
        (RowCopy(30, 42, 1), RowCopy(20, 40, 2)),  # not in token order
        (RowCopy(20, 41, 2), RowCopy(20, 41, 2)),
        (RowCopy(20, 4, 4), RowCopy(20, 8, 4), RowCopy(24, 40, 3)),  # more than the past
        (RowCopy(40, 40, 3),),  # onto itself
        (RowCopy(38, 40, 3),),  # source and target have slot 40 in common
        (RowCopy(42, 40, 3),),
        (RowCopy(20, 40, 3), RowCopy(20, 43, 0)),  # empty
        (RowCopy(20, 43, -1),),
    ],
)
def test_copies_that_go_elsewhere_are_our_bug(copies: tuple[RowCopy, ...]) -> None:
    with pytest.raises(InternalError, match="do not fill the end of 7 past tokens"):
        check_batch(copying(*copies))


def test_a_copy_without_a_past_is_our_bug() -> None:
    check_batch(copying(past_slots=[]))
    with pytest.raises(InternalError, match="the end of 0 past tokens"):
        check_batch(copying(RowCopy(20, 40, 1), past_slots=[]))
