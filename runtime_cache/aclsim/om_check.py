"""Whether the header of a software `.om` agrees with itself: others write such files too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from runtime_cache.aclsim import codes

if TYPE_CHECKING:  # it is `om` that asks
    from runtime_cache.aclsim.om import OmHeader, TensorInfo

_MAX_BYTES = (1 << 63) - 1
_MAX_SELECTED = (1 << 31) - 1  # what stands for a -1 is an int32
_OPEN = -1


def contradiction(header: OmHeader) -> str | None:
    """What cannot be in a header, in words, or None if all is well."""
    sizes = (
        header.workspace_bytes,
        header.graph.length,
        header.weights.length,
        *(file.length for file in header.external),
    )
    if not all(0 <= size <= _MAX_BYTES for size in sizes):
        return "a size is negative or beyond 63 bits"
    if not all(_is_beside(file.name) for file in header.external):
        return "a weight file does not lie beside the .om"
    if not all(_is_sound(info) for info in (*header.inputs, *header.outputs)):
        return "a tensor has an unknown type or dims that cannot be"
    if len(header.output_names) not in (0, len(header.outputs)):
        return "there are not as many names as outputs"
    return _gears(header) if header.gears else _ranges(header)


def _is_beside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_sound(info: TensorInfo) -> bool:
    if info.onnx_type not in codes.ACL_DTYPES:
        return False
    return all(dim >= _OPEN for dim in info.dims) and _fits(info, map(abs, info.dims))


def _fits(info: TensorInfo, dims: Iterable[int]) -> bool:
    """Whether the size can be said in 63 bits, whatever the order of the dims."""
    return info.size_bytes([max(dim, 1) for dim in dims]) <= _MAX_BYTES


def _gears(header: OmHeader) -> str | None:
    num_values = len(header.gears[0].values)
    for gear in header.gears:
        if len(gear.values) != num_values or not all(0 < v <= _MAX_SELECTED for v in gear.values):
            return "the values of a gear cannot be"
        if not (_are_shapes(gear.inputs, header.inputs) and _are_inputs(gear.inputs, header)):
            return "the inputs of a gear are not those of the model"
        if not _are_shapes(gear.outputs, header.outputs):
            return "the outputs of a gear are not those of the model"
    if num_values == 0 and len(header.gears) > 1:
        return "there are gears without values"
    return None


def _are_shapes(shapes: Sequence[Sequence[int]], infos: Sequence[TensorInfo]) -> bool:
    """Whether a gear has dims without open ones for each tensor of one side."""
    if len(shapes) != len(infos):
        return False
    return all(min(dims, default=0) >= 0 for dims in shapes) and all(map(_fits, infos, shapes))


def _are_inputs(shapes: Sequence[Sequence[int]], header: OmHeader) -> bool:
    """Whether a gear differs from the inputs only where those are open."""
    return all(
        len(dims) == len(info.dims)
        and all(wanted in (_OPEN, dim) for dim, wanted in zip(dims, info.dims, strict=True))
        for dims, info in zip(shapes, header.inputs, strict=True)
    )


def _ranges(header: OmHeader) -> str | None:
    if len(header.ranges) != len(header.inputs):
        return "there are not as many ranges as inputs"
    for info, bounds in zip(header.inputs, header.ranges, strict=True):
        is_open = [most == _OPEN for _, most in bounds]
        if len(bounds) != len(info.dims) or not all(
            least >= 0 and (most == _OPEN or least <= most) for least, most in bounds
        ):
            return "the range of a dim cannot be"
        if not any(is_open) and not _fits(info, [most for _, most in bounds]):
            return "a range goes beyond 63 bits"
    return None
