"""The ONNX side of the compiler: checks, shapes in every gear, weights moved out of the graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.atc_options import AtcError
from runtime_cache.aclsim.external_data import refer_to
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.om import WEIGHT_ALIGN_BYTES, Gear, TensorInfo

# Small constants steer shape inference and stay in the graph.
KEEP_INLINE_BYTES = 1024
_CHUNK_BYTES = 4 << 20
OpsetRanges = Mapping[str, Sequence[tuple[int, int]]]


def read_model(path: Path) -> onnx.ModelProto:
    """Reads a model without its external data.

    Raises:
        AtcError: E10014 unreadable, E16004 no graph, E16001 no node.
    """
    try:
        model = onnx.load_model(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise AtcError("E10014", f"cannot read model [{path}]: {error}") from error
    if not model.HasField("graph"):
        raise AtcError("E16004", f"model [{path}] has no graph")
    if not model.graph.node:
        raise AtcError("E16001", f"model [{path}] has no node")
    return model


def check_operators(model: onnx.ModelProto, registered: OpsetRanges) -> None:
    """Checks what ATC's ONNX parser checks: one opset, every operator registered for it.

    Raises:
        AtcError: E16005 several opset imports, E16002 an operator without a parser.
    """
    if len(model.opset_import) != 1 or model.opset_import[0].domain not in ("", "ai.onnx"):
        imports = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in model.opset_import)
        raise AtcError(
            "E16005", f"exactly one opset import of ai.onnx is allowed, found: {imports}"
        )
    opset = model.opset_import[0].version
    for node in _all_nodes(model.graph):
        ranges = registered.get(node.op_type, ())
        is_default = node.domain in ("", "ai.onnx")
        if not is_default or not any(low <= opset <= high for low, high in ranges):
            name = f"{node.domain or 'ai.onnx'}::{opset}::{node.op_type}"
            raise AtcError("E16002", f"no parser is registered for op [{name}], node [{node.name}]")


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g)


def apply_input_shapes(model: onnx.ModelProto, shapes: Mapping[str, list[int]]) -> list[TensorInfo]:
    """Checks `--input_shape` against the model and returns the inputs with -1 for gear dims.

    Raises:
        AtcError: E10016 unknown name, E10049 another rank, E10050 a size that contradicts the
            model, E10001 an input left without a size or of a type the device does not know.
    """
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in initializers}
    for name in shapes:
        if name not in inputs:
            raise AtcError("E10016", f"--input_shape: the model has no input [{name}]")
    return [_input_info(value, shapes.get(name)) for name, value in inputs.items()]


def _input_info(value: onnx.ValueInfoProto, given: list[int] | None) -> TensorInfo:
    known = [_fixed(dim) for dim in value.type.tensor_type.shape.dim]
    dims = known if given is None else given
    if len(dims) != len(known):
        raise AtcError(
            "E10049", f"input [{value.name}]: {len(dims)} dims given, model {len(known)}"
        )
    for dim, fixed in zip(dims, known, strict=True):
        if dim not in (-1, fixed) and fixed is not None:
            raise AtcError(
                "E10050", f"input [{value.name}]: {dims} contradicts the model's {known}"
            )
    sizes = [dim for dim in dims if dim is not None and dim != 0]
    if len(sizes) != len(dims):
        raise AtcError("E10001", f"input [{value.name}] needs all of its dims in --input_shape")
    return TensorInfo(value.name, _element_type(value), sizes)


def _element_type(value: onnx.ValueInfoProto) -> int:
    onnx_type = int(value.type.tensor_type.elem_type)
    if onnx_type not in codes.ACL_DTYPES:
        raise AtcError("E10001", f"[{value.name}] has ONNX type {onnx_type}, unknown to the device")
    return onnx_type


def _fixed(dim: onnx.TensorShapeProto.Dimension) -> int | None:
    return int(dim.dim_value) if dim.HasField("dim_value") else None


def fill_gear(inputs: Sequence[TensorInfo], values: Sequence[int]) -> list[list[int]]:
    """The concrete input dims of a gear: each -1 replaced by the next value."""
    rest = iter(values)
    return [[next(rest) if dim == -1 else dim for dim in info.dims] for info in inputs]


class ShapeTable:
    """Output shapes in every gear.

    Inferred once with names for the open dims; a gear then only looks names up. Where that leaves a
    dim open, the gear is inferred again with its numbers.

    Args:
        model: checked; its inputs are rewritten to `inputs`.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Sequence[TensorInfo]) -> None:
        self._model = model
        self._inputs = inputs
        self._names = [_dim_names(_value(model, info.name), info) for info in inputs]
        for info, names in zip(inputs, self._names, strict=True):
            _set_dims(_value(model, info.name), info.dims, names)
        self._outputs = _infer(model)

    @property
    def outputs(self) -> list[TensorInfo]:
        """Outputs by name and type; dims are -1 where gears decide."""
        return [
            TensorInfo(
                value.name,
                _element_type(value),
                [_fixed(dim) or -1 for dim in value.type.tensor_type.shape.dim],
            )
            for value in self._outputs
        ]

    def gear(self, values: Sequence[int], inputs: list[list[int]]) -> Gear:
        """The shapes of one gear.

        Raises:
            AtcError: E20001 for contradicting, empty or data-dependent shapes.
        """
        sizes = self._sizes_by_name(inputs)
        outputs = [_resolve(value, sizes) for value in self._outputs]
        if any(None in dims for dims in outputs):
            outputs = self._infer_concrete(inputs)
        final = [[dim for dim in dims if dim] for dims in outputs]
        if [len(dims) for dims in final] != [len(dims) for dims in outputs]:
            raise AtcError("E20001", f"an output shape is empty or depends on data: {outputs}")
        return Gear(list(values), inputs, final)

    def _sizes_by_name(self, inputs: Sequence[Sequence[int]]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for names, dims in zip(self._names, inputs, strict=True):
            for name, dim in zip(names, dims, strict=True):
                if name and sizes.setdefault(name, dim) != dim:
                    raise AtcError("E20001", f"dim [{name}] is {sizes[name]} and {dim} in one gear")
        return sizes

    def _infer_concrete(self, inputs: Sequence[list[int]]) -> list[list[int | None]]:
        concrete = onnx.ModelProto()
        concrete.CopyFrom(self._model)
        for info, dims in zip(self._inputs, inputs, strict=True):
            _set_dims(_value(concrete, info.name), dims, [""] * len(dims))
        for value in concrete.graph.output:
            value.type.tensor_type.ClearField("shape")
        return [_resolve(value, {}) for value in _infer(concrete)]


def _value(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    inputs: Sequence[onnx.ValueInfoProto] = model.graph.input
    return next(value for value in inputs if value.name == name)


def _dim_names(value: onnx.ValueInfoProto, info: TensorInfo) -> list[str]:
    """The names of an input's dims: the model's own, or made up for open ones."""
    names = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
    return [
        name or (f"{info.name}_dim{axis}" if dim == -1 else "")
        for axis, (name, dim) in enumerate(zip(names, info.dims, strict=True))
    ]


def _set_dims(value: onnx.ValueInfoProto, dims: Sequence[int], names: Sequence[str]) -> None:
    shape = value.type.tensor_type.shape
    shape.ClearField("dim")
    for dim, name in zip(dims, names, strict=True):
        entry = shape.dim.add()
        if dim == -1:
            entry.dim_param = name
        else:
            entry.dim_value = dim


def _infer(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise AtcError("E20001", f"shape inference failed: {error}") from error
    return list(inferred.graph.output)


def _resolve(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> list[int | None]:
    if not value.type.tensor_type.HasField("shape"):
        return [None]
    dims = value.type.tensor_type.shape.dim
    return [_fixed(dim) if dim.HasField("dim_value") else sizes.get(dim.dim_param) for dim in dims]


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the weights section, still at its source.

    Attributes:
        offset: in the weights section.
        data: the bytes, or None if they are at `path`[`start`:].
    """

    offset: int
    length: int
    data: bytes | None
    path: Path
    start: int


def move_weights_out(model: onnx.ModelProto, directory: Path) -> tuple[list[Weight], int]:
    """Turns the model's large initializers into references to a weights section.

    Args:
        model: changed in place; references are relative to the section's start.
        directory: where the model's own external data lie.

    Returns:
        The tensors in order, and the section's length in bytes.

    Raises:
        AtcError: E10014 if external data are missing or short.
    """
    weights: list[Weight] = []
    end = 0
    for tensor in model.graph.initializer:
        source = _source(tensor, directory)
        if source is None:
            continue
        offset = round_up(end, WEIGHT_ALIGN_BYTES)
        weights.append(Weight(offset, *source))
        end = offset + source[0]
        refer_to(tensor, "weights", offset, source[0])
    return weights, end


def _source(
    tensor: onnx.TensorProto, directory: Path
) -> tuple[int, bytes | None, Path, int] | None:
    """(length, data, path, start) of a tensor to move, or None for one that stays."""
    if uses_external_data(tensor):
        info = ExternalDataInfo(tensor)
        path, start = directory / info.location, info.offset or 0
        size = path.stat().st_size if path.is_file() else 0
        length = info.length or size - start
        if length <= 0 or start + length > size:
            raise AtcError("E10014", f"external data of [{tensor.name}] are not in [{path}]")
        return length, None, path, start
    data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    return (len(data), data, directory, 0) if len(data) >= KEEP_INLINE_BYTES else None


def weight_chunks(weights: Iterable[Weight]) -> Iterator[bytes]:
    """The weights section in chunks of at most 4 MiB, padding included."""
    end = 0
    for weight in weights:
        yield bytes(weight.offset - end)
        yield from _chunks(weight)
        end = weight.offset + weight.length


def _chunks(weight: Weight) -> Iterator[bytes]:
    if weight.data is not None:
        yield weight.data
        return
    with weight.path.open("rb") as file:
        file.seek(weight.start)
        for done in itertools.count(0, _CHUNK_BYTES):
            if done >= weight.length:
                return
            yield file.read(min(_CHUNK_BYTES, weight.length - done))
