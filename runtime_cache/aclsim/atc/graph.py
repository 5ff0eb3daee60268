"""The ONNX side of the compiler: what ATC's parser checks, and the inputs with their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from om_models.socs import Soc
from runtime_cache.aclsim import codes
from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.atc.shapes import Bounds
from runtime_cache.aclsim.external_data import all_initializers, all_nodes, subgraphs
from runtime_cache.aclsim.om import TensorInfo

OpsetRanges = Mapping[str, Sequence[tuple[int, int]]]
_DEFAULT_DOMAINS = ("", "ai.onnx")
_MAX_MODEL_BYTES = (1 << 31) - 1  # of protobuf
#: Operators whose output shape depends on the values of their inputs.
DATA_DEPENDENT_OPS = frozenset(("NonZero", "Unique", "NonMaxSuppression", "Compress"))


def read_model(path: Path) -> onnx.ModelProto:
    """Reads a model without its external data.

    Raises:
        AtcError: E10014 unreadable, E16004 no graph, E16001 no node.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise AtcError("E10014", f"cannot read model [{path}]: it is no file")
        if path.stat().st_size > _MAX_MODEL_BYTES:
            reason = "it is larger than 2 GiB: save it with external data"
            raise AtcError("E10014", f"cannot read model [{path}]: {reason}")
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
    if len(model.opset_import) != 1 or model.opset_import[0].domain not in _DEFAULT_DOMAINS:
        reason = f"exactly one opset import of ai.onnx is allowed, found: {imports_of(model)}"
        raise AtcError("E16005", reason)
    opset = model.opset_import[0].version
    for node in all_nodes(model.graph):
        ranges = registered.get(node.op_type, ())
        is_default = node.domain in _DEFAULT_DOMAINS
        if not is_default or not any(low <= opset <= high for low, high in ranges):
            name = f"{node.domain or 'ai.onnx'}::{opset}::{node.op_type}"
            raise AtcError("E16002", f"no parser is registered for op [{name}], node [{node.name}]")


def imports_of(model: onnx.ModelProto) -> str:
    """The opset imports in words."""
    return ", ".join(f"{each.domain or 'ai.onnx'} {each.version}" for each in model.opset_import)


def data_dependent_node(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """A node whose output shape depends on data, or None."""
    nodes = all_nodes(model.graph)
    return next((node for node in nodes if node.op_type in DATA_DEPENDENT_OPS), None)


def has_bfloat16(model: onnx.ModelProto) -> bool:
    """Whether a tensor of the graph is of that type, as far as the model says types."""
    wanted = TensorProto.BFLOAT16
    if any(tensor.data_type == wanted for tensor in all_initializers(model.graph)):
        return True
    if any(value.type.tensor_type.elem_type == wanted for value in _values(model.graph)):
        return True
    return any(_makes(node, wanted) for node in all_nodes(model.graph))


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _values(inner)


def _makes(node: onnx.NodeProto, onnx_type: int) -> bool:
    """Whether an attribute of a node names a type: `to` of Cast, `dtype`, or a tensor's own."""
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i == onnx_type:
            return True
        if attribute.t.data_type == onnx_type:
            return True
    return False


def check_soc(model: onnx.ModelProto, soc: Soc | None) -> None:
    """Refuses types that the SoC does not have.

    Raises:
        AtcError: E20001.
    """
    if soc is not None and not soc.has_bfloat16 and has_bfloat16(model):
        raise AtcError("E20001", f"the model has bfloat16 tensors, which {soc.name} does not have")


def model_inputs(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """The inputs that a program gives, by name; initializers may be listed as inputs too."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    return {value.name: value for value in model.graph.input if value.name not in initializers}


def apply_input_shapes(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]],
    ranges: Mapping[str, Sequence[Bounds]],
    *,
    has_gears: bool,
) -> list[TensorInfo]:
    """Checks `--input_shape` against the model and returns the inputs, with -1 for open dims.

    Raises:
        AtcError: E10016 unknown name, E10049 another rank, E10050 a size that contradicts the
            model, E10001 an input left without a size or of a type the device does not know, or
            a scalar that is not named beside gears, E10011 an input with a dim of 0.
    """
    inputs = model_inputs(model)
    for name in shapes:
        if name not in inputs:
            raise AtcError("E10016", f"--input_shape: the model has no input [{name}]")
    for name, value in inputs.items():
        if has_gears and name not in shapes and _known_dims(value) == []:
            reason = f"beside gears, the scalar [{name}] must stand in --input_shape, as [{name}:]"
            raise AtcError("E10001", reason)
    return [
        _input_info(value, shapes.get(name), ranges.get(name)) for name, value in inputs.items()
    ]


def _input_info(
    value: onnx.ValueInfoProto, given: Sequence[int] | None, ranges: Sequence[Bounds] | None
) -> TensorInfo:
    onnx_type = element_type(value)
    known = _known_dims(value)
    if given is None:
        given = [-1 if dim is None else dim for dim in known or []]
        if known is None or -1 in given:
            reason = f"input [{value.name}] needs all of its dims in --input_shape"
            raise AtcError("E10001", reason)
        if 0 in given:
            raise AtcError("E10011", f"input [{value.name}] {list(given)} has a dim of 0")
    elif known is not None:
        bounds = ranges or [(dim, dim) for dim in given]
        _check_against_model(value.name, given, known, bounds)
    return TensorInfo(value.name, onnx_type, list(given))


def _check_against_model(
    name: str, given: Sequence[int], known: Sequence[int | None], bounds: Sequence[Bounds]
) -> None:
    if len(given) != len(known):
        raise AtcError("E10049", f"input [{name}]: {len(given)} dims given, model {len(known)}")
    for size, (least, most) in zip(known, bounds, strict=True):
        # A gear's -1 may stand where the model has a size.
        if size is None or least == -1:
            continue
        if size < least or (most != -1 and size > most):
            reason = f"input [{name}]: {list(given)} contradicts the model's {list(known)}"
            raise AtcError("E10050", reason)


def element_type(value: onnx.ValueInfoProto) -> int:
    """ONNX type of an input or output.

    Raises:
        AtcError: E10001 for one that the device does not know, or no tensor at all.
    """
    onnx_type = int(value.type.tensor_type.elem_type)
    if onnx_type not in codes.ACL_DTYPES:
        raise AtcError("E10001", f"[{value.name}] has ONNX type {onnx_type}, unknown to the device")
    return onnx_type


def _known_dims(value: onnx.ValueInfoProto) -> list[int | None] | None:
    """The dims the model says, None where it leaves one open; None if not even the rank."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return [fixed(dim) for dim in value.type.tensor_type.shape.dim]


def fixed(dim: onnx.TensorShapeProto.Dimension) -> int | None:
    """The size of a dim, or None if the model leaves it open."""
    return int(dim.dim_value) if dim.HasField("dim_value") else None
