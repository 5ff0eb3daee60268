"""The inputs and outputs of a bundle's graph: the contract in `docs/design.md`, in numbers. Pure.

Written once, for the graph that is made, the compiler's command line, and the check of a loaded
`.om`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np

from om_models.manifest import Gear, KvSpec, Manifest


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    Attributes:
        dims: a number, or the letter of a size that gears decide (see `gear_sizes`).
    """

    dtype: str
    dims: tuple[int | str, ...]

    def shape(self, gear: Gear) -> tuple[int, ...]:
        """The dims in one gear."""
        sizes = gear_sizes(gear)
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def num_bytes(self, gear: Gear) -> int:
        """Bytes of the data in one gear."""
        return prod(self.shape(gear)) * np.dtype(self.dtype).itemsize


def gear_sizes(gear: Gear) -> dict[str, int]:
    """What the letters stand for: B sequences, S fed tokens, P past slots, T = P + S."""
    return {"B": gear.batch, "S": gear.chunk, "P": gear.past, "T": gear.past + gear.chunk}


@dataclass(frozen=True, slots=True)
class GraphContract:
    """What the graph of one bundle takes and gives.

    Attributes:
        index_dtype: of ids, positions, rows.
    """

    kv: KvSpec
    index_dtype: str
    vocab_size: int

    @classmethod
    def of(cls, manifest: Manifest) -> GraphContract:
        """The contract that the manifest's numbers make."""
        return cls(manifest.kv, manifest.index_dtype, manifest.model.vocab_size)

    @property
    def step_inputs(self) -> dict[str, TensorSpec]:
        """The inputs written anew for every step, in order."""
        index = self.index_dtype
        return {
            "input_ids": TensorSpec(index, ("B", "S")),
            "position_ids": TensorSpec(index, ("B", "S")),
            "past_rows": TensorSpec(index, ("B", "P")),
            "mask": TensorSpec(self.kv.dtype, ("B", 1, "S", "T")),
            "last": TensorSpec(index, ("B",)),
        }

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """Every input but the gear input, which ATC adds, in order."""
        kv = self.kv
        rows = kv.num_slots * 2 * kv.layers_per_group
        pool = TensorSpec(kv.dtype, (rows, kv.row_elements))
        return self.step_inputs | {f"kv_pool_{group}": pool for group in range(kv.num_groups)}

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """Every output, in order."""
        kv = self.kv
        new_kv = TensorSpec(kv.dtype, ("B", "S", 2 * kv.layers_per_group, kv.row_elements))
        return {
            "logits": TensorSpec("float32", ("B", self.vocab_size)),
            **{f"new_kv_{group}": new_kv for group in range(kv.num_groups)},
        }

    def gear_dims(self, gear: Gear, input_names: Iterable[str]) -> tuple[int, ...]:
        """All inputs' dims one after the other, in the model's order, as gears are named.

        Args:
            input_names: the gear input may be among them.
        """
        inputs = self.inputs
        shapes = (inputs[name].shape(gear) for name in input_names if name in inputs)
        return tuple(dim for shape in shapes for dim in shape)
