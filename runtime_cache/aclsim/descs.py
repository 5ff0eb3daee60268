"""Model descriptions: what `acl.mdl.get_desc` copies out of a loaded model, or of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.atc.shapes import GearKind
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.geared_models import GearedModel
from runtime_cache.aclsim.models import LoadedModel
from runtime_cache.aclsim.om import Gear, OmHeader, TensorInfo

#: Longer names do not fit `aclmdlIODims.name` (ACL_MAX_TENSOR_NAME_LEN 128, NUL included).
MAX_NAME_BYTES = 127
_IMAGE_RANK = 4
_FORMATS = {"NCHW": codes.FORMAT_NCHW, "NHWC": codes.FORMAT_NHWC}


@dataclass(frozen=True, slots=True)
class DescEntry:
    """One input or output.

    Attributes:
        dims_name: the name that dims carry: the real one, or what stands for one that is too long.
        dims: as the description gives them: -1 for inputs with gears or ranges, the largest gear
            for outputs.
        size_bytes: in the largest gear of this tensor, or at the upper ends of its ranges; 0 if
            nothing bounds it.
        acl_format: ND, or that of images for 4 dims of a model compiled with such a format.
        ranges: (least, most) of each dim; empty for gear models.
    """

    name: str
    dims_name: str
    acl_dtype: int
    dims: Sequence[int]
    size_bytes: int
    acl_format: int = codes.FORMAT_ND
    ranges: Sequence[tuple[int, int]] = ()


class Desc:
    """A description, empty until `describe`."""

    def __init__(self) -> None:
        self.inputs: list[DescEntry] = []
        self.outputs: list[DescEntry] = []
        self.gears: list[Gear] = []
        self.gear_kind: GearKind | None = None
        self._model: LoadedModel | None = None

    def describe(
        self, header: OmHeader, model_id: int = 0, model: LoadedModel | None = None
    ) -> None:
        """Fills the description; a gear model has its selector as one more input.

        Args:
            model_id, model: of a loaded model; a description of a file knows no current gear.
        """
        self._model = model
        self.gears = header.gears if header.has_gears else []
        self.gear_kind = header.gear_kind if header.has_gears else None
        prefix = f"acl_modelId_{model_id}"
        self.inputs = [
            _input_entry(header, index, f"{prefix}_input_{index}")
            for index in range(len(header.inputs))
        ]
        self.outputs = [
            _output_entry(header, index, f"{prefix}_output_{index}")
            for index in range(len(header.outputs))
        ]
        if header.has_gears:
            self.inputs.append(_selector_entry(header))

    def current_output_dims(self, index: int) -> list[int]:
        """Dims of an output in the gear that was set last.

        Raises:
            AclFailure: 100000 for a description of a file and for a model with ranges.
        """
        if not isinstance(self._model, GearedModel):
            what = "of a file" if self._model is None else "of a model with ranges"
            sentence = f"a description {what} has no current output dims"
            raise AclFailure(codes.INVALID_PARAM, sentence)
        return self._model.header.gears[self._model.selected_gear].outputs[index]

    def real_name(self, name: str) -> str | None:
        """The name behind one that dims carry, or None if there is none of that name."""
        entries = (*self.inputs, *self.outputs)
        return next((each.name for each in entries if name in (each.dims_name, each.name)), None)


def _input_entry(header: OmHeader, index: int, short_name: str) -> DescEntry:
    info = header.inputs[index]
    if header.has_ranges:
        ranges = header.ranges[index]
        largest = [most for _, most in ranges]
        size = 0 if -1 in largest else info.size_bytes(largest)
        return _entry(header, info, short_name, info.dims, size, ranges)
    size = max(info.size_bytes(gear.inputs[index]) for gear in header.gears)
    ranges = [] if header.has_gears else [(dim, dim) for dim in info.dims]
    return _entry(header, info, short_name, info.dims, size, ranges)


def _output_entry(header: OmHeader, index: int, short_name: str) -> DescEntry:
    info = header.outputs[index]
    if header.output_names:
        info = msgspec.structs.replace(info, name=header.output_names[index])
    if header.has_ranges:
        size = 0 if -1 in info.dims else info.size_bytes(info.dims)
        return _entry(header, info, short_name, info.dims, size, ())
    dims = header.gears[header.largest_gear].outputs[index]
    size = max(info.size_bytes(gear.outputs[index]) for gear in header.gears)
    return _entry(header, info, short_name, dims, size, ())


def _entry(
    header: OmHeader,
    info: TensorInfo,
    short_name: str,
    dims: Sequence[int],
    size: int,
    ranges: Sequence[tuple[int, int]],
) -> DescEntry:
    is_long = len(info.name.encode()) > MAX_NAME_BYTES
    is_image = len(info.dims) == _IMAGE_RANK
    return DescEntry(
        name=info.name,
        dims_name=short_name if is_long else info.name,
        acl_dtype=info.acl_dtype,
        dims=dims,
        size_bytes=size,
        acl_format=_FORMATS.get(header.input_format, codes.FORMAT_ND)
        if is_image
        else codes.FORMAT_ND,
        ranges=ranges,
    )


def _selector_entry(header: OmHeader) -> DescEntry:
    dims = [len(header.gears[0].values)]
    info = TensorInfo(codes.SELECTOR_NAME, codes.ONNX_INT32, dims)
    return DescEntry(info.name, info.name, info.acl_dtype, dims, info.size_bytes(dims))
