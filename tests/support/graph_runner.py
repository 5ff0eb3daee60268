"""Runs an exported graph in ONNX Runtime over a paged KV pool of plain numpy arrays.

Writes the model's inputs on its own, from the contract in `docs/design.md` alone, so that graph
tests do not depend on the executor whose input writer they would otherwise share a mistake with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from om_models.manifest import Gear, KvSpec
from runtime_cache.aclsim.onnx_runtime import ort

HIDDEN = -1e4
NULL_SLOTS = 16


@dataclass(frozen=True)
class Row:
    """One row of a batch: what is fed, and where its past lies and its new KV goes."""

    token_ids: Sequence[int]
    past_slots: Sequence[int]
    new_slots: Sequence[int]


class GraphRunner:
    """One graph and its pool. Unwritten slots hold NaN: reading one shows in the logits.

    Args:
        index_dtype: of ids, positions and slots.
    """

    def __init__(self, onnx_path: Path, kv: KvSpec, index_dtype: str = "int32") -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(
            str(onnx_path), options, providers=["CPUExecutionProvider"]
        )
        self.kv = kv
        self._index_dtype = np.dtype(index_dtype)
        row_count = 2 * kv.layers_per_group
        self.pools = [
            np.full((kv.num_slots, row_count, kv.row_elements), np.nan, dtype=kv.dtype)
            for _ in range(kv.num_groups)
        ]
        for pool in self.pools:
            pool[:NULL_SLOTS] = 0
        # Scattered on purpose: nothing may depend on neighbouring slots.
        order = np.random.RandomState(7).permutation(np.arange(NULL_SLOTS, kv.num_slots))
        self._free_slots = order.tolist()

    def take_slots(self, count: int) -> list[int]:
        """Slots nobody has used yet."""
        taken, self._free_slots = self._free_slots[:count], self._free_slots[count:]
        return taken

    def run(self, gear: Gear, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """Run one step and append its KV; returns the logits after each row's last token."""
        inputs = self._inputs(gear, rows)
        names = ["logits", *(f"new_kv_{group}" for group in range(self.kv.num_groups))]
        logits, *new_kv = self.session.run(names, inputs)
        for pool, new in zip(self.pools, new_kv, strict=True):
            for index, row in enumerate(rows):
                pool[list(row.new_slots)] = new[index, : len(row.token_ids)]
        result: npt.NDArray[np.float32] = logits[: len(rows)]
        return result

    def _inputs(self, gear: Gear, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        fed_shape = (gear.batch, gear.chunk)
        ids, positions = (np.zeros(fed_shape, self._index_dtype) for _ in range(2))
        past_rows = np.zeros((gear.batch, gear.past), self._index_dtype)
        last = np.arange(gear.batch, dtype=self._index_dtype) * gear.chunk
        mask = np.full((*fed_shape, gear.past + gear.chunk), HIDDEN, self.kv.dtype)
        for query in range(gear.chunk):
            mask[:, query, gear.past + query] = 0
        for index, row in enumerate(rows):
            num_fed, num_past = len(row.token_ids), len(row.past_slots)
            ids[index, :num_fed] = row.token_ids
            positions[index, :num_fed] = num_past + np.arange(num_fed)
            past_rows[index, :num_past] = row.past_slots
            last[index] += num_fed - 1
            mask[index, :num_fed, :num_past] = 0
            for query in range(num_fed):
                mask[index, query, gear.past : gear.past + query + 1] = 0
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "past_rows": past_rows * (2 * self.kv.layers_per_group),
            "mask": mask[:, None],
            "last": last,
        }
        flat = {f"kv_pool_{g}": p.reshape(-1, p.shape[-1]) for g, p in enumerate(self.pools)}
        return {**inputs, **flat}
