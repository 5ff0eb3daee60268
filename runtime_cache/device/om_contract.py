"""The inputs and outputs a bundle's `.om` must have, and the check of what it has. Pure.

The contract is in `docs/design.md`; the manifest gives its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from om_models.manifest import Gear, Manifest
from runtime_cache.device.acl_api import GEAR_INPUT, DataType
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.errors import BundleError

#: The inputs written anew for every step; the others are the pool and the gear.
STEP_INPUTS = ("input_ids", "position_ids", "past_rows", "mask", "last")

_DATA_TYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.FLOAT16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
}
_NAMES = {int(data_type): name for name, data_type in _DATA_TYPES.items()}
_ITEM_BYTES = {"float32": 4, "float16": 2, "int32": 4, "int64": 8}


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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one input or output must be in one gear."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the gear's data."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class OmContract:
    """The contract of one bundle, in numbers.

    Attributes:
        index_dtype: of ids, positions, rows.
    """

    layout: KvLayout
    index_dtype: str
    vocab_size: int

    @classmethod
    def of(cls, manifest: Manifest, layout: KvLayout) -> OmContract:
        """The contract that the manifest's numbers make."""
        return cls(layout, manifest.index_dtype, manifest.model.vocab_size)

    def inputs(self, gear: Gear) -> dict[str, TensorSpec]:
        """Every input but the gear input, in the contract's order."""
        index, layout = self.index_dtype, self.layout
        batch, chunk, past = gear.batch, gear.chunk, gear.past
        pool = TensorSpec(layout.dtype, (layout.rows_per_group, layout.row_elements))
        return {
            "input_ids": TensorSpec(index, (batch, chunk)),
            "position_ids": TensorSpec(index, (batch, chunk)),
            "past_rows": TensorSpec(index, (batch, past)),
            "mask": TensorSpec(layout.dtype, (batch, 1, chunk, past + chunk)),
            "last": TensorSpec(index, (batch,)),
            **{f"kv_pool_{group}": pool for group in range(layout.num_groups)},
        }

    def outputs(self, gear: Gear) -> dict[str, TensorSpec]:
        """Every output, in the contract's order."""
        layout = self.layout
        new_kv = TensorSpec(
            layout.dtype, (gear.batch, gear.chunk, layout.rows_per_slot, layout.row_elements)
        )
        return {
            "logits": TensorSpec("float32", (gear.batch, self.vocab_size)),
            **{f"new_kv_{group}": new_kv for group in range(layout.num_groups)},
        }

    def gear_dims(self, gear: Gear, input_names: Iterable[str]) -> tuple[int, ...]:
        """All inputs' dims one after the other, in the model's order, as gears are named."""
        specs = self.inputs(gear)
        return tuple(dim for name in input_names if name in specs for dim in specs[name].shape)


def check_desc(path: str, desc: OmDesc, contract: OmContract, gears: Sequence[Gear]) -> None:
    """Checks that an `.om` is the one its manifest describes.

    Args:
        path: for the message.
        gears: those the manifest lists for this file, at least one.

    Raises:
        BundleError: the first difference, in words.
    """
    inputs = [contract.inputs(gear) for gear in gears]
    outputs = [contract.outputs(gear) for gear in gears]
    gear_input = {GEAR_INPUT} if desc.gears else set()
    _check_names(f"{path}: the inputs", desc.input_names, set(inputs[0]) | gear_input)
    _check_names(f"{path}: the outputs", desc.output_names, set(outputs[0]))
    for name, tensor in zip(desc.input_names, desc.inputs, strict=True):
        if name != GEAR_INPUT:
            _check_tensor(f"{path}: input {name!r}", tensor, [spec[name] for spec in inputs])
    for name, tensor in zip(desc.output_names, desc.outputs, strict=True):
        _check_tensor(f"{path}: output {name!r}", tensor, [spec[name] for spec in outputs])
    _check_gears(path, desc, contract, gears)
    _check_pool_bytes(path, desc, contract.layout)


def _check_names(what: str, found: tuple[str, ...], expected: set[str]) -> None:
    """Each expected name once, in any order."""
    if sorted(found) != sorted(expected):
        raise BundleError(
            f"{what} are {', '.join(found)}; missing: {_listed(expected - set(found))};"
            f" unknown: {_listed(set(found) - expected)}"
        )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _check_tensor(what: str, tensor: TensorDesc, specs: Sequence[TensorSpec]) -> None:
    """`specs` has one entry per gear; they differ in shape alone."""
    dtype = specs[0].dtype
    if tensor.data_type != _DATA_TYPES[dtype]:
        found = _NAMES.get(tensor.data_type, f"aclDataType {tensor.data_type}")
        raise BundleError(f"{what} is {found}; the manifest says {dtype}")
    expected = _common_dims([spec.shape for spec in specs])
    if not _agree(tensor.dims, expected):
        raise BundleError(
            f"{what} has shape {list(tensor.dims)}; the manifest says {list(expected)}"
            " (-1: differs between gears)"
        )
    num_bytes = max(spec.num_bytes for spec in specs)
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


def _check_gears(path: str, desc: OmDesc, contract: OmContract, gears: Sequence[Gear]) -> None:
    if not desc.gears and len(gears) > 1:
        raise BundleError(f"{path}: has one fixed shape; the manifest lists {len(gears)} gears")
    for gear in gears:
        if desc.gears and contract.gear_dims(gear, desc.input_names) not in desc.gears:
            raise BundleError(
                f"{path}: not compiled for batch {gear.batch}, chunk {gear.chunk},"
                f" past {gear.past}, which the manifest lists"
            )


def _check_pool_bytes(path: str, desc: OmDesc, layout: KvLayout) -> None:
    for tensor in desc.inputs:
        if tensor.name.startswith("kv_pool_") and tensor.num_bytes != layout.group_bytes:
            raise BundleError(
                f"{path}: input {tensor.name!r} takes {tensor.num_bytes} bytes; the manifest's"
                f" pool gives it {layout.group_bytes}"
            )
