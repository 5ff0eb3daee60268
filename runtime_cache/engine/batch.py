"""One step's batch, as data, and how it is written into the model's inputs. Pure.

The scheduler decides a `StepBatch`; the executor owns the buffers and calls `write_inputs` to fill
them (`docs/design.md`). Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from om_models.manifest import Gear
from runtime_cache.engine.gears import Role
from runtime_cache.engine.request import TokenArray
from runtime_cache.errors import InternalError
from runtime_cache.ids import RequestId, StepId

if TYPE_CHECKING:
    from runtime_cache.engine.sampler import SamplerState

IndexArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
MaskArray = npt.NDArray[np.float16] | npt.NDArray[np.float32]

#: What a visible and a hidden position add to the attention score. Finite in fp16, so that a row
#: of nothing but hidden positions never becomes NaN.
VISIBLE = 0.0
HIDDEN = -1e4
#: From so many one-token rows on, one pass over all of them costs less than one over each.
_MANY_ROWS = 16


class SlotRun(NamedTuple):
    """A run of consecutive slots.

    Attributes:
        first_slot: slot of the first token.
        num_tokens: length of the run; runs never cross a block.
    """

    first_slot: int
    num_tokens: int


class RowCopy(NamedTuple):
    """A run of tokens whose KV is copied inside the pool, in every layer group.

    Attributes:
        source_slot: slot of the first token read.
        target_slot: slot of the first token written.
        num_tokens: length of the run; it crosses a block on neither side.
    """

    source_slot: int
    target_slot: int
    num_tokens: int


class BatchRow(Struct, frozen=True):
    """One sequence's part of a step.

    Attributes:
        token_ids: the tokens fed [int32, 1..chunk].
        num_past: tokens of the sequence already in the pool; the first fed token's position.
        past_slots: slot of each past token [int32, num_past].
        appends: where the new KV goes, in token order; covers all fed tokens.
        sampler: None when the row's logits are not wanted (a chunk that is not the last).
        copies: what is copied before the model runs, so that it reads the copies; together they
            fill the end of the past, in token order.
    """

    request_id: RequestId
    token_ids: TokenArray
    num_past: int
    past_slots: TokenArray
    appends: tuple[SlotRun, ...]
    sampler: SamplerState | None
    copies: tuple[RowCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step runs: 1..gear.batch rows in one gear."""

    step_id: StepId
    role: Role
    gear: Gear
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class InputViews:
    """The host side of one gear's inputs: arrays over the staging buffer, made once at load.

    B, S, P are the gear's batch, chunk and past.

    Attributes:
        input_ids: [B, S], index type.
        position_ids: [B, S], index type.
        past_rows: [B, P], index type; first pool row of each past slot.
        mask: [B, 1, S, P + S], KV type; additive.
        last: [B], index type; flat row `b * S + i` of the fed token whose logits are wanted.
    """

    input_ids: IndexArray
    position_ids: IndexArray
    past_rows: IndexArray
    mask: MaskArray
    last: IndexArray


def check_batch(batch: StepBatch) -> None:
    """Checks that the rows fit the gear, and that appends and copies go where they belong.

    Raises:
        InternalError: they do not; nothing was run.
    """
    gear = batch.gear
    if not 1 <= len(batch.rows) <= gear.batch:
        raise InternalError(f"step {batch.step_id}: {len(batch.rows)} rows in {gear}")
    for row in batch.rows:
        num_fed = len(row.token_ids)
        num_appended = sum([run.num_tokens for run in row.appends])
        fits = 1 <= num_fed <= gear.chunk and row.num_past <= gear.past
        if not fits or num_appended != num_fed or len(row.past_slots) != row.num_past:
            raise InternalError(
                f"step {batch.step_id}, request {row.request_id}: {num_fed} tokens fed,"
                f" {num_appended} appended, {len(row.past_slots)} past slots for"
                f" {row.num_past} past tokens, in {gear}"
            )
        if row.copies:
            _check_copies(batch.step_id, row)


def _check_copies(step_id: StepId, row: BatchRow) -> None:
    """The copies fill the end of the past and nothing else, and none reads what it writes."""
    targets = [slot for copy in row.copies for slot in _run(copy.target_slot, copy.num_tokens)]
    first_copied = row.num_past - len(targets)
    is_end_of_past = first_copied >= 0 and targets == row.past_slots[first_copied:].tolist()
    if not is_end_of_past or not all(_is_sound(copy) for copy in row.copies):
        raise InternalError(
            f"step {step_id}, request {row.request_id}: {list(row.copies)} do not fill the end of"
            f" {row.num_past} past tokens from other slots"
        )


def _is_sound(copy: RowCopy) -> bool:
    """Not empty, and source and target have no slot in common."""
    return abs(copy.source_slot - copy.target_slot) >= copy.num_tokens >= 1


def _run(first_slot: int, num_tokens: int) -> range:
    return range(first_slot, first_slot + num_tokens)


def write_inputs(batch: StepBatch, inputs: InputViews, rows_per_slot: int) -> None:
    """Writes every element of `inputs`; nothing of an earlier step remains.

    Fed tokens see the row's past and the fed tokens up to themselves. Padding (queries behind the
    fed tokens, whole rows behind the batch) sees exactly its own fed token, past padding points to
    the null block.

    Args:
        batch: the step; its gear is the one `inputs` was made for.
        inputs: host arrays, written in place.
        rows_per_slot: pool rows of one token in one layer group (2 * layers in the group).
    """
    num_rows = len(batch.rows)
    if batch.gear.chunk == 1 and num_rows >= _MANY_ROWS:
        _write_one_token_rows(inputs, batch.rows, rows_per_slot)
    else:
        write_row = _write_one_token_row if batch.gear.chunk == 1 else _write_chunk_row
        for index, row in enumerate(batch.rows):
            write_row(inputs, index, row, rows_per_slot)
    if num_rows < batch.gear.batch:
        _write_padded_rows(inputs, num_rows)


def _write_one_token_row(inputs: InputViews, index: int, row: BatchRow, rows_per_slot: int) -> None:
    """The decode case, one query per row: no padding inside the row, no causal triangle."""
    num_past = row.num_past
    inputs.input_ids[index] = row.token_ids
    inputs.position_ids[index] = num_past
    _write_past_rows(inputs.past_rows[index], row, rows_per_slot)
    mask = inputs.mask[index, 0, 0]
    mask[:num_past] = VISIBLE
    mask[num_past:-1] = HIDDEN
    mask[-1] = VISIBLE
    inputs.last[index] = index


def _write_one_token_rows(
    inputs: InputViews, rows: tuple[BatchRow, ...], rows_per_slot: int
) -> None:
    """As `_write_one_token_row` for each row, with the arrays' own passes."""
    num_rows = len(rows)
    inputs.input_ids[:num_rows, 0] = np.concatenate([row.token_ids for row in rows])
    num_past = np.array([row.num_past for row in rows])
    inputs.position_ids[:num_rows, 0] = num_past
    past_rows = inputs.past_rows[:num_rows]
    is_past = _positions(past_rows.shape[1]) < num_past[:, None]
    past_rows[:] = 0
    past_rows[is_past] = np.concatenate([row.past_slots for row in rows]) * rows_per_slot
    mask = inputs.mask[:num_rows, 0, 0]
    mask[:, :-1] = HIDDEN
    np.copyto(mask[:, :-1], VISIBLE, where=is_past)
    mask[:, -1] = VISIBLE
    inputs.last[:num_rows] = _positions(num_rows)


def _write_chunk_row(inputs: InputViews, index: int, row: BatchRow, rows_per_slot: int) -> None:
    chunk = inputs.input_ids.shape[1]
    num_fed, num_past = len(row.token_ids), row.num_past
    inputs.input_ids[index, :num_fed] = row.token_ids
    inputs.input_ids[index, num_fed:] = 0
    inputs.position_ids[index, :num_fed] = np.arange(num_past, num_past + num_fed)
    inputs.position_ids[index, num_fed:] = 0
    _write_past_rows(inputs.past_rows[index], row, rows_per_slot)
    _write_chunk_mask(inputs.mask[index, 0], num_fed, num_past)
    inputs.last[index] = index * chunk + num_fed - 1


def _write_past_rows(past_rows: IndexArray, row: BatchRow, rows_per_slot: int) -> None:
    num_past = row.num_past
    np.multiply(row.past_slots, rows_per_slot, out=past_rows[:num_past])
    past_rows[num_past:] = 0


def _write_chunk_mask(mask: npt.NDArray[Any], num_fed: int, num_past: int) -> None:
    """`mask` is one row's [S, P + S]."""
    chunk = mask.shape[0]
    past = mask.shape[1] - chunk
    mask[:num_fed, :num_past] = VISIBLE
    mask[:num_fed, num_past:past] = HIDDEN
    mask[num_fed:, :past] = HIDDEN
    # Queries before `num_fed` cannot see behind themselves, so the triangle hides the padding too.
    mask[:num_fed, past:] = _causal(chunk)[:num_fed]
    mask[num_fed:, past:] = _own_only(chunk)[num_fed:]


def _write_padded_rows(inputs: InputViews, num_rows: int) -> None:
    batch, chunk = inputs.input_ids.shape
    past = inputs.past_rows.shape[1]
    inputs.input_ids[num_rows:] = 0
    inputs.position_ids[num_rows:] = 0
    inputs.past_rows[num_rows:] = 0
    inputs.mask[num_rows:, :, :, :past] = HIDDEN
    inputs.mask[num_rows:, :, :, past:] = _own_only(chunk)
    inputs.last[num_rows:] = np.arange(num_rows, batch) * chunk


@lru_cache(maxsize=8)
def _positions(count: int) -> npt.NDArray[np.int64]:
    """0 to `count` - 1."""
    return np.arange(count)


# The fp16 tables are exact for both values (10000 is a multiple of fp16's step there, 8).
@lru_cache(maxsize=8)
def _causal(chunk: int) -> npt.NDArray[np.float16]:
    """[S, S] additive: each fed token sees itself and those before it."""
    return _additive(np.tri(chunk, dtype=np.bool_))


@lru_cache(maxsize=8)
def _own_only(chunk: int) -> npt.NDArray[np.float16]:
    """[S, S] additive: each fed token sees itself alone."""
    return _additive(np.eye(chunk, dtype=np.bool_))


def _additive(is_visible: npt.NDArray[np.bool_]) -> npt.NDArray[np.float16]:
    return np.where(is_visible, VISIBLE, HIDDEN).astype(np.float16)
