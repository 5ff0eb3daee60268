"""Models with ranges: each run decides the shapes (ATC's dynamic shape).

The program says the inputs' shapes in tensor descriptions of the dataset; the outputs' shapes are
known when the run is over, and replace the descriptions of the output dataset.

Source: aclmdlExecute and aclmdlSetDatasetTensorDesc, CANN 9.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.datasets import DataBuffer, Dataset
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.lent_memory import Range
from runtime_cache.aclsim.models import (
    LoadedModel,
    check_aliasing,
    check_device_address,
    needed_ranges,
)
from runtime_cache.aclsim.om import TensorInfo
from runtime_cache.aclsim.tensor_descs import TensorDesc

# Where the data of an input without elements lie; nobody reads them.
_NOTHING = ctypes.create_string_buffer(64)
_MALLOC_POLICY = 0


@dataclass(frozen=True, slots=True)
class RangedPlan:
    """One execution in shapes of its own.

    Attributes:
        dims: of every input.
        reads: (device address, bytes needed) of the inputs.
        writes: (device address, bytes given) of the outputs that have a buffer.
        targets: (device address, bytes) of every output at the call; (0, 0) to be allocated.
        outputs: the dataset whose descriptions, and empty buffers, the run fills.
    """

    model: RangedModel
    dims: tuple[list[int], ...]
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    targets: tuple[Range, ...]
    outputs: Dataset

    def run(self) -> None:
        """Executes now; see `Plan`. Also 500002 for an output that does not fit its buffer."""
        self.model.run(self)


class RangedModel(LoadedModel):
    """A model whose shapes each run decides. Arguments as `LoadedModel`."""

    def plan(self, inputs: Dataset, outputs: Dataset, *, can_allocate: bool = False) -> RangedPlan:
        """See `LoadedModel.plan`. Also 100000 for an input without a description, 145021 for one
        outside of the model's ranges."""
        self._check_counts(len(inputs.buffers), len(outputs.buffers))
        dims = [self._input_dims(index, inputs) for index in range(len(self.header.inputs))]
        given = [(buffer.address, buffer.size_bytes) for buffer in inputs.buffers]
        reads = needed_ranges("input", self.header.inputs, dims, given)
        targets = [(buffer.address, buffer.size_bytes) for buffer in outputs.buffers]
        for info, target in zip(self.header.outputs, targets, strict=True):
            if target != (0, 0) or not can_allocate:
                check_device_address("output", info, target[0])
        writes = [target for target in targets if target != (0, 0)]
        check_aliasing(reads, writes)
        return RangedPlan(self, tuple(dims), tuple(reads), tuple(writes), tuple(targets), outputs)

    def _input_dims(self, index: int, inputs: Dataset) -> list[int]:
        """The dims of an input in this run."""
        info, ranges = self.header.inputs[index], self.header.ranges[index]
        desc = inputs.desc(index)
        if desc is None:
            if -1 in info.dims:
                sentence = f"input {info.name} {info.dims} needs set_dataset_tensor_desc"
                raise AclFailure(codes.INVALID_PARAM, sentence)
            return info.dims
        dims = list(desc.dims)
        if len(dims) != len(ranges) or not all(map(_is_within, dims, ranges)):
            sentence = f"input {info.name}: dims {dims} are outside of the ranges {ranges}"
            raise AclFailure(codes.GE_SHAPE_INVALID, sentence)
        return dims

    def run(self, plan: RangedPlan) -> None:
        """Executes now, on the calling thread; errors as `RangedPlan.run`."""
        ranges = (*plan.reads, *plan.writes, *self._lent.ranges)
        with self.memory.pinned(ranges, codes.RT_AICORE_EXCEPTION) as hosts, self._run_lock:
            binding = self._bind(plan, hosts)
            self._execute(binding)
            self._deliver(plan, binding.get_outputs())

    def _bind(self, plan: RangedPlan, hosts: Sequence[int]) -> Any:
        binding = self._session.io_binding()
        for info, dims, host in zip(self.header.inputs, plan.dims, hosts, strict=False):
            address = host if 0 not in dims else ctypes.addressof(_NOTHING)
            binding.bind_input(info.name, "cpu", 0, info.onnx_type, dims, address)
        for info in self.header.outputs:
            binding.bind_output(info.name, "cpu")
        return binding

    def _deliver(self, plan: RangedPlan, results: Sequence[Any]) -> None:
        """Copies the results to their buffers and describes them; all or none."""
        shapes = [list(result.shape()) for result in results]
        needs = list(map(TensorInfo.size_bytes, self.header.outputs, shapes))
        for info, need, (address, size) in zip(
            self.header.outputs, needs, plan.targets, strict=True
        ):
            if address and size < need:
                sentence = f"output {info.name}: buffer of {size} bytes, the run needs {need}"
                raise AclFailure(codes.GE_FAILURE, sentence)
        for index, (result, need) in enumerate(zip(results, needs, strict=True)):
            address = plan.targets[index][0]
            if not address:
                address = self._allocate(plan.outputs.buffers[index], need)
            if need:
                self.memory.copy(address, result.data_ptr(), need, codes.RT_AICORE_EXCEPTION)
            dtype = self.header.outputs[index].acl_dtype
            desc = TensorDesc(dtype, tuple(shapes[index]), codes.FORMAT_ND)
            plan.outputs.set_desc(index, desc)

    def _allocate(self, buffer: DataBuffer, need: int) -> int:
        """Memory for one output, which is the program's from now on."""
        address = self.memory.malloc(max(need, 1), _MALLOC_POLICY)
        buffer.address, buffer.size_bytes = address, need
        return address


def _is_within(dim: int, bounds: tuple[int, int]) -> bool:
    least, most = bounds
    return least <= dim and (most == -1 or dim <= most)
