"""Model descriptions: what `acl.mdl.get_desc` copies out of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.models import LoadedModel
from runtime_cache.aclsim.om import Gear, TensorInfo


@dataclass(frozen=True, slots=True)
class DescEntry:
    """One input or output.

    Attributes:
        dims: as the description gives them: -1 for inputs with gears, the largest gear for outputs.
        size_bytes: in the largest gear of this tensor.
    """

    name: str
    acl_dtype: int
    dims: Sequence[int]
    size_bytes: int


class Desc:
    """A description, empty until `describe`."""

    def __init__(self) -> None:
        self.inputs: list[DescEntry] = []
        self.outputs: list[DescEntry] = []
        self.gears: list[Gear] = []
        self._model: LoadedModel | None = None

    def describe(self, model: LoadedModel) -> None:
        """Fills the description; a gear model has its selector as one more input."""
        header = model.header
        largest = header.gears[header.largest_gear]
        self._model = model
        self.gears = header.gears if header.has_gears else []
        by_input = [[gear.inputs[i] for gear in header.gears] for i in range(len(header.inputs))]
        by_output = [[gear.outputs[i] for gear in header.gears] for i in range(len(header.outputs))]
        self.inputs = [
            _entry(info, info.dims, shapes)
            for info, shapes in zip(header.inputs, by_input, strict=True)
        ]
        self.outputs = [
            _entry(info, dims, shapes)
            for info, dims, shapes in zip(header.outputs, largest.outputs, by_output, strict=True)
        ]
        if header.has_gears:
            dims = [len(largest.values)]
            selector = TensorInfo(codes.SELECTOR_NAME, codes.ONNX_INT32, dims)
            self.inputs.append(_entry(selector, dims, [dims]))

    def current_output_dims(self, index: int) -> list[int]:
        """Dims of an output in the gear that was set last. Call on a filled description."""
        if self._model is None:
            return []
        return self._model.header.gears[self._model.selected_gear].outputs[index]


def _entry(info: TensorInfo, dims: Sequence[int], shapes: Sequence[list[int]]) -> DescEntry:
    dtype = codes.ACL_DTYPES[info.onnx_type][0]
    return DescEntry(info.name, dtype, dims, max(info.size_bytes(shape) for shape in shapes))
