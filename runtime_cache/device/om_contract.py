"""What a loaded `.om` says of itself, and the check that it keeps its bundle's contract. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from om_models.contract import GraphContract, TensorSpec
from om_models.manifest import Gear
from runtime_cache.device.acl_api import GEAR_INPUT, DataType
from runtime_cache.errors import BundleError

_DATA_TYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.FLOAT16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
}
_NAMES = {int(data_type): name for name, data_type in _DATA_TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """One input or output, as the driver describes it.

    Attributes:
        name: of an output, ATC may put the node's name before it (`node:0:logits`).
        data_type: `aclDataType`.
        dims: -1 where gears differ (inputs), or those of the largest gear (outputs).
        num_bytes: what its buffer must have; the largest gear's.
    """

    name: str
    data_type: int
    dims: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OmDesc:
    """What a loaded `.om` says of itself.

    Attributes:
        gears: per gear, the dims of all inputs but the gear input, one after the other; empty for
            a model of one fixed shape.
    """

    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]
    gears: tuple[tuple[int, ...], ...]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names in the model's order."""
        return tuple(tensor.name for tensor in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names in the model's order, without the node's name that ATC may put before them."""
        return tuple(tensor.name.rpartition(":")[2] for tensor in self.outputs)


def check_desc(path: str, desc: OmDesc, contract: GraphContract, gears: Sequence[Gear]) -> None:
    """Checks that an `.om` is the one its manifest describes.

    Args:
        path: for the message.
        gears: those the manifest lists for this file, at least one.

    Raises:
        BundleError: the first difference, in words.
    """
    inputs, outputs = contract.inputs, contract.outputs
    gear_input = {GEAR_INPUT} if desc.gears else set()
    _check_names(f"{path}: the inputs", desc.input_names, set(inputs) | gear_input)
    _check_names(f"{path}: the outputs", desc.output_names, set(outputs))
    for name, tensor in zip(desc.input_names, desc.inputs, strict=True):
        if name != GEAR_INPUT:
            _check_tensor(f"{path}: input {name!r}", tensor, inputs[name], gears)
    for name, tensor in zip(desc.output_names, desc.outputs, strict=True):
        _check_tensor(f"{path}: output {name!r}", tensor, outputs[name], gears)
    _check_gears(path, desc, contract, gears)
    _check_pool_bytes(path, desc, inputs, gears[0])


def _check_names(what: str, found: tuple[str, ...], expected: set[str]) -> None:
    """Each expected name once, in any order."""
    if sorted(found) != sorted(expected):
        raise BundleError(
            f"{what} are {', '.join(found)}; missing: {_listed(expected - set(found))};"
            f" unknown: {_listed(set(found) - expected)}"
        )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _check_tensor(what: str, tensor: TensorDesc, spec: TensorSpec, gears: Sequence[Gear]) -> None:
    if tensor.data_type != _DATA_TYPES[spec.dtype]:
        found = _NAMES.get(tensor.data_type, f"aclDataType {tensor.data_type}")
        raise BundleError(f"{what} is {found}; the manifest says {spec.dtype}")
    expected = _common_dims([spec.shape(gear) for gear in gears])
    if not _agree(tensor.dims, expected):
        raise BundleError(
            f"{what} has shape {list(tensor.dims)}; the manifest says {list(expected)}"
            " (-1: differs between gears)"
        )
    num_bytes = max(spec.num_bytes(gear) for gear in gears)
    if tensor.num_bytes < num_bytes:
        raise BundleError(
            f"{what} has room for {tensor.num_bytes} bytes; the largest gear takes {num_bytes}"
        )


def _common_dims(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The dims all shapes share, -1 where they differ."""
    return tuple(dims[0] if len(set(dims)) == 1 else -1 for dims in zip(*shapes, strict=True))


def _agree(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(found) == len(expected) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(found, expected, strict=True)
    )


def _check_gears(path: str, desc: OmDesc, contract: GraphContract, gears: Sequence[Gear]) -> None:
    if not desc.gears and len(gears) > 1:
        raise BundleError(f"{path}: has one fixed shape; the manifest lists {len(gears)} gears")
    for gear in gears:
        if desc.gears and contract.gear_dims(gear, desc.input_names) not in desc.gears:
            raise BundleError(
                f"{path}: not compiled for batch {gear.batch}, chunk {gear.chunk},"
                f" past {gear.past}, which the manifest lists"
            )


def _check_pool_bytes(
    path: str, desc: OmDesc, inputs: Mapping[str, TensorSpec], gear: Gear
) -> None:
    """The pool is as large as compiled, in every gear."""
    for tensor in desc.inputs:
        if tensor.name.startswith("kv_pool_"):
            num_bytes = inputs[tensor.name].num_bytes(gear)
            if tensor.num_bytes != num_bytes:
                raise BundleError(
                    f"{path}: input {tensor.name!r} takes {tensor.num_bytes} bytes; the manifest's"
                    f" pool gives it {num_bytes}"
                )
