"""One step's batch, as data, and how it is written into the model's inputs. Pure.

The scheduler decides a `StepBatch`; the executor owns the buffers and calls `write_inputs` to fill
them (DESIGN 2.3). Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from runtime_cache.engine.gears import Gear, Role
from runtime_cache.engine.request import TokenArray
from runtime_cache.ids import RequestId, StepId

if TYPE_CHECKING:
    from runtime_cache.engine.sampler import SamplerState


class SlotRun(NamedTuple):
    """A run of consecutive slots.

    Attributes:
        first_slot: slot of the first token.
        num_tokens: length of the run; runs never cross a block.
    """

    first_slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's part of a step.

    Attributes:
        token_ids: the tokens fed [int32, 1..chunk].
        num_past: tokens of the sequence already in the pool; the first fed token's position.
        past_slots: slot of each past token [int32, num_past].
        appends: where the new KV goes, in token order; covers all fed tokens.
        sampler: None when the row's logits are not wanted (a chunk that is not the last).
    """

    request_id: RequestId
    token_ids: TokenArray
    num_past: int
    past_slots: TokenArray
    appends: tuple[SlotRun, ...]
    sampler: SamplerState | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step runs: 1..gear.batch rows in one gear."""

    step_id: StepId
    role: Role
    gear: Gear
    rows: tuple[BatchRow, ...]
