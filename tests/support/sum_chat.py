"""Sequences to feed a `SumModel` with, and what it must answer. The engine's part, by hand."""

from __future__ import annotations

from typing import cast

import numpy as np

from om_models.manifest import Gear
from runtime_cache.engine.batch import BatchRow, RowCopy, SlotRun, StepBatch
from runtime_cache.engine.gears import Role
from runtime_cache.ids import RequestId, StepId
from tests.support.sum_model import SPEC, SumModel

BLOCK = 4
SMALL, LARGE = Gear(1, 4, 8), Gear(1, 8, 16)
ONE, FOUR = Gear(1, 1, 16), Gear(4, 1, 16)


class Fed:
    """One sequence of any model: its tokens, and the slots they live in, block by block."""

    def __init__(self, blocks: list[int]) -> None:
        self._slots = [block * BLOCK + i for block in blocks for i in range(BLOCK)]
        self._copies: tuple[RowCopy, ...] = ()
        self.ids: list[int] = []

    def feed(self, *ids: int, wants_logits: bool = True) -> BatchRow:
        """A row that feeds these ids behind what was fed before."""
        past = len(self.ids)
        slots = self._slots[past : past + len(ids)]
        row = BatchRow(
            request_id=RequestId(0),
            token_ids=np.array(ids, np.int32),
            num_past=past,
            past_slots=np.array(self._slots[:past], np.int32),
            appends=runs(slots),
            sampler=cast("None", object()) if wants_logits else None,
            copies=self._copies,
        )
        self._copies = ()
        self.ids += ids
        return row

    def share(self, other: Fed, num_tokens: int) -> None:
        """Starts as the first tokens of another sequence, in its slots."""
        self.ids = other.ids[:num_tokens]
        self._slots = other._slots[:num_tokens] + self._slots

    def adopt(self, other: Fed, num_tokens: int) -> None:
        """Starts as another did: shares whole blocks, and copies the rest with the next feed."""
        num_copied = num_tokens % BLOCK
        num_shared = num_tokens - num_copied
        self.share(other, num_shared)
        if num_copied:
            source, target = other._slots[num_shared], self._slots[num_shared]
            self._copies = (RowCopy(source, target, num_copied),)
        self.ids = other.ids[:num_tokens]


class Chat(Fed):
    """A sequence for a `SumModel`."""

    def __init__(self, model: SumModel, blocks: list[int]) -> None:
        super().__init__(blocks)
        self._model = model

    def logits(self) -> list[float]:
        """What the model must answer for the last fed token."""
        total = sum(self.ids) * self._model.id_weight
        return [
            float(value) for value in (total, len(self.ids) - 1, 7, *[0] * (SPEC.vocab_size - 3))
        ]


def runs(slots: list[int]) -> tuple[SlotRun, ...]:
    """Slots cut into runs that stay inside their block."""
    found: list[SlotRun] = []
    for slot in slots:
        last = found[-1] if found else SlotRun(-1, 0)
        if slot == last.first_slot + last.num_tokens and slot % BLOCK:
            found[-1] = SlotRun(last.first_slot, last.num_tokens + 1)
        else:
            found.append(SlotRun(slot, 1))
    return tuple(found)


def step(gear: Gear, *rows: BatchRow) -> StepBatch:
    role: Role = "decode" if gear.chunk == 1 else "prefill"
    return StepBatch(StepId(1), role, gear, rows)
