"""Models with compiled shapes: one (static), or several to choose from (gears).

Checked plans and bound pointers are kept, since a serving loop repeats them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.atc.shapes import GearKind
from runtime_cache.aclsim.datasets import Dataset
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.lent_memory import NOTHING_LENT, LentMemory, Range
from runtime_cache.aclsim.mapping import POISON
from runtime_cache.aclsim.memory import DeviceMemory
from runtime_cache.aclsim.models import (
    LoadedModel,
    check_aliasing,
    needed_ranges,
)
from runtime_cache.aclsim.om import OmFile
from runtime_cache.aclsim.recent import Recent
from runtime_cache.aclsim.settings import SimSettings

# How many combinations of gear and pointers are kept ready.
MAX_PLANS = 64
SELECTOR_ELEMENT_BYTES = 4
_PlanKey = tuple[bytes, tuple[Range, ...], tuple[Range, ...]]


@dataclass(frozen=True, slots=True)
class GearPlan:
    """One execution in one compiled shape.

    Attributes:
        gear: index of the shape.
        reads, writes: (device address, bytes needed) of inputs and outputs, selector excluded.
        ranges: both, and memory of the program that the model uses.
        selector: its device address and the bytes it held at the call; None without gears.
    """

    model: GearedModel
    gear: int
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    ranges: tuple[Range, ...]
    selector: tuple[int, bytes] | None

    def run(self) -> None:
        """Executes now; see `Plan`. Also 507011 if the selector changed after the call."""
        self.model.run(self)


class GearedModel(LoadedModel):
    """A static model, or one with gears. Arguments as `LoadedModel`.

    Attributes:
        selected_gear: the gear set last, else the largest.
    """

    def __init__(
        self,
        om: OmFile,
        memory: DeviceMemory,
        config: SimSettings,
        context: int,
        lent: LentMemory = NOTHING_LENT,
    ) -> None:
        self.selected_gear = om.header.largest_gear
        self._plan_lock = threading.Lock()  # its own: planning must not wait for a run
        self._plans: Recent[_PlanKey, GearPlan] = Recent(MAX_PLANS)
        self._bindings: Recent[tuple[int, tuple[int, ...]], Any] = Recent(MAX_PLANS)
        self._gears = {tuple(gear.values): i for i, gear in enumerate(om.header.gears)}
        super().__init__(om, memory, config, context, lent)

    @property
    def selector_bytes(self) -> int:
        """Size of the gear selector input; 0 without gears."""
        return len(self.header.gears[0].values) * SELECTOR_ELEMENT_BYTES

    @property
    def output_sizes(self) -> list[int]:
        """Bytes of each output in the gear where it is largest."""
        return [
            max(info.size_bytes(gear.outputs[index]) for gear in self.header.gears)
            for index, info in enumerate(self.header.outputs)
        ]

    @property
    def gear_kind(self) -> GearKind | None:
        """What the gears vary, or None without gears."""
        return self.header.gear_kind if self.header.has_gears else None

    def find_gear(self, flat_dims: Sequence[int]) -> int:
        """The gear whose input dims, concatenated, are these.

        Raises:
            AclFailure: 145013 if there is none.
        """
        wanted = list(flat_dims)
        for index, gear in enumerate(self.header.gears):
            if gear.flat_dims == wanted:
                return index
        raise AclFailure(codes.GE_NOT_A_GEAR, f"dims {wanted} are no gear of the model")

    def find_values(self, values: Sequence[int]) -> int:
        """The gear with these values (a batch size, or height and width).

        Raises:
            AclFailure: 145013 if there is none.
        """
        index = self._gears.get(tuple(values))
        if index is None:
            raise AclFailure(codes.GE_NOT_A_GEAR, f"{list(values)} is no gear of the model")
        return index

    def plan(self, inputs: Dataset, outputs: Dataset, *, can_allocate: bool = False) -> GearPlan:
        """See `LoadedModel.plan`; the gear is what the selector holds now. Also 145011 or 145013
        for an unusable selector."""
        given_in = tuple([(buffer.address, buffer.size_bytes) for buffer in inputs.buffers])
        given_out = tuple([(buffer.address, buffer.size_bytes) for buffer in outputs.buffers])
        self._check_counts(len(given_in), len(given_out))
        if inputs.desc_handles:
            self._check_no_descs()
        content = b""
        if self.header.has_gears:
            content = self.memory.read(
                given_in[-1][0], self.selector_bytes, codes.GE_SELECTOR_ADDRESS_INVALID
            )
        key = (content, given_in, given_out)
        with self._plan_lock:
            return self._plans.get(key, lambda: self._new_plan(content, given_in, given_out))

    def _check_no_descs(self) -> None:
        """Gears and tensor descriptions are two ways of which a model has one."""
        sentence = "the model has no ranges: its shapes are not set with set_dataset_tensor_desc"
        raise AclFailure(codes.INVALID_PARAM, sentence)

    def _new_plan(
        self, content: bytes, inputs: tuple[Range, ...], outputs: tuple[Range, ...]
    ) -> GearPlan:
        """A checked plan; `content` is what the selector holds, empty without gears."""
        gear_index, selector = 0, None
        if content:
            gear_index = self._selected(content)
            selector = (inputs[-1][0], content)
            inputs = inputs[:-1]
        gear = self.header.gears[gear_index]
        reads = tuple(needed_ranges("input", self.header.inputs, gear.inputs, inputs))
        writes = tuple(needed_ranges("output", self.header.outputs, gear.outputs, outputs))
        check_aliasing(reads, writes)
        ranges = (*reads, *writes, *self._lent.ranges)
        return GearPlan(self, gear_index, reads, writes, ranges, selector)

    def _selected(self, content: bytes) -> int:
        """The gear that selector bytes name; bytes never written mean the largest."""
        if content == POISON * (len(content) // len(POISON)):
            return self.header.largest_gear
        step = SELECTOR_ELEMENT_BYTES
        parts = [content[i : i + step] for i in range(0, len(content), step)]
        values = tuple(int.from_bytes(part, "little", signed=True) for part in parts)
        index = self._gears.get(values)
        if index is None:
            raise AclFailure(codes.GE_NOT_A_GEAR, f"the selector holds {values}, which is no gear")
        return index

    def run(self, plan: GearPlan) -> None:
        """Executes now, on the calling thread; errors as `GearPlan.run`."""
        if plan.selector is not None:
            self._check_selector(*plan.selector)
        with self.memory.pinned(plan.ranges, codes.RT_AICORE_EXCEPTION) as hosts, self._run_lock:
            key = (plan.gear, tuple(hosts))
            binding = self._bindings.get(key, lambda: self._bind(plan.gear, hosts))
            self._execute(binding)

    def _check_selector(self, address: int, expected: bytes) -> None:
        content = self.memory.read(address, len(expected), codes.RT_AICORE_EXCEPTION)
        if content != expected:
            sentence = "the gear selector was rewritten while the execution was queued"
            raise AclFailure(codes.RT_MODEL_EXECUTE, sentence)

    def _bind(self, gear_index: int, hosts: Sequence[int]) -> Any:
        gear = self.header.gears[gear_index]
        binding = self._session.io_binding()
        addresses = iter(hosts)
        for info, dims in zip(self.header.inputs, gear.inputs, strict=True):
            binding.bind_input(info.name, "cpu", 0, info.onnx_type, dims, next(addresses))
        for info, dims in zip(self.header.outputs, gear.outputs, strict=True):
            binding.bind_output(info.name, "cpu", 0, info.onnx_type, dims, next(addresses))
        return binding

    def unload(self) -> None:
        """See `LoadedModel.unload`."""
        self._bindings.clear()
        super().unload()
