"""Output shapes: inferred by ONNX, or where that does not reach, seen in trial runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.atc.graph import element_type, fixed
from runtime_cache.aclsim.om import Gear, TensorInfo

Dims = list[int | None]
#: Output dims for given input dims by running the model, None where they depend on the data.
Trial = Callable[[Sequence[Sequence[int]]], list[Dims]]
# Their outputs may have no elements without a problem: nothing is computed from them.
_MAY_BE_EMPTY = ("Constant", "ConstantOfShape", "Identity")
# Lists of dims may be empty too: ATC folds arithmetic on shapes before it looks at tensors.
_DIMS_TYPE, _DIMS_RANK = onnx.TensorProto.INT64, 1


class ShapeTable:
    """Output shapes for any input shapes.

    Inferred once with names for the open dims; a gear then only looks names up. Where that leaves a
    dim open, the gear is inferred again with its numbers, and then tried out.

    Args:
        model: checked; its inputs are rewritten to `inputs`.
        inputs: with -1 for open dims.
        trial: runs the model on made-up data.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Sequence[TensorInfo], trial: Trial) -> None:
        self._model = model
        self._inputs = inputs
        self._trial = trial
        self._names = [_dim_names(_value(model, info.name), info) for info in inputs]
        for info, names in zip(inputs, self._names, strict=True):
            _set_dims(_value(model, info.name), info.dims, names)
        inferred = infer(model)
        _check_no_zero(inferred)
        self._outputs = list(inferred.graph.output)

    @property
    def outputs(self) -> list[TensorInfo]:
        """Outputs by name and type; dims are -1 where gears or runs decide."""
        return [
            TensorInfo(value.name, element_type(value), self._open_dims(value))
            for value in self._outputs
        ]

    def _open_dims(self, value: onnx.ValueInfoProto) -> list[int]:
        dims = _resolve(value, {})
        if dims is None:  # not even the rank is known
            index = [each.name for each in self._outputs].index(value.name)
            tried = self._trial([[max(dim, 1) for dim in info.dims] for info in self._inputs])
            return [-1] * len(tried[index])
        return [dim or -1 for dim in dims]

    def gear(self, values: Sequence[int], inputs: list[list[int]]) -> Gear | None:
        """The shapes of one gear, or None if they depend on data.

        Raises:
            AtcError: E20001 for contradicting or empty shapes.
        """
        sizes = self._sizes_by_name(inputs)
        outputs = [_resolve(value, sizes) for value in self._outputs]
        if not _is_known(outputs):
            outputs = self._infer_concrete(inputs)
        if not _is_known(outputs):
            outputs = list(self._trial(inputs))
        final = [[dim for dim in dims or [] if dim is not None] for dims in outputs]
        if not _is_known(outputs):
            return None
        if any(0 in dims for dims in final):
            raise AtcError("E20001", f"an output shape is empty: {final}")
        return Gear(list(values), inputs, final)

    def _sizes_by_name(self, inputs: Sequence[Sequence[int]]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for names, dims in zip(self._names, inputs, strict=True):
            for name, dim in zip(names, dims, strict=True):
                if name and sizes.setdefault(name, dim) != dim:
                    raise AtcError("E20001", f"dim [{name}] is {sizes[name]} and {dim} in one gear")
        return sizes

    def _infer_concrete(self, inputs: Sequence[list[int]]) -> list[Dims | None]:
        concrete = onnx.ModelProto()
        concrete.CopyFrom(self._model)
        for info, dims in zip(self._inputs, inputs, strict=True):
            _set_dims(_value(concrete, info.name), dims, [""] * len(dims))
        for value in concrete.graph.output:
            value.type.tensor_type.ClearField("shape")
        inferred = infer(concrete)
        _check_no_zero(inferred)
        return [_resolve(value, {}) for value in inferred.graph.output]


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with what ONNX can say of its shapes.

    Raises:
        AtcError: E20001 if they contradict each other.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise AtcError("E20001", f"shape inference failed: {error}") from error


def _check_no_zero(inferred: onnx.ModelProto) -> None:
    """ATC takes no tensor without elements.

    Raises:
        AtcError: E20001 with the node that makes one.
    """
    makers = {name: node for node in inferred.graph.node for name in node.output}
    for value in inferred.graph.value_info:
        maker = makers.get(value.name)
        tensor = value.type.tensor_type
        is_dims = (tensor.elem_type, len(tensor.shape.dim)) == (_DIMS_TYPE, _DIMS_RANK)
        if maker is None or maker.op_type in _MAY_BE_EMPTY or is_dims:
            continue
        if any(fixed(dim) == 0 for dim in tensor.shape.dim):
            reason = f"node [{maker.name}] ({maker.op_type}) makes [{value.name}] with a dim of 0"
            raise AtcError("E20001", reason)


def _value(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    inputs: Sequence[onnx.ValueInfoProto] = model.graph.input
    return next(value for value in inputs if value.name == name)


def _dim_names(value: onnx.ValueInfoProto, info: TensorInfo) -> list[str]:
    """The names of an input's dims: the model's own, or made up for open ones."""
    names = [dim.dim_param for dim in value.type.tensor_type.shape.dim] or [""] * len(info.dims)
    return [
        name or (f"{info.name}_dim{axis}" if dim == -1 else "")
        for axis, (name, dim) in enumerate(zip(names, info.dims, strict=True))
    ]


def _set_dims(value: onnx.ValueInfoProto, dims: Sequence[int], names: Sequence[str]) -> None:
    shape = value.type.tensor_type.shape
    shape.ClearField("dim")
    shape.SetInParent()  # no dims are a scalar; no shape would be an unknown rank
    for dim, name in zip(dims, names, strict=True):
        entry = shape.dim.add()
        if dim == -1:
            entry.dim_param = name
        else:
            entry.dim_value = dim


def _resolve(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> Dims | None:
    """The dims of an output, None for open ones; None if not even the rank is known."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    dims = value.type.tensor_type.shape.dim
    return [fixed(dim) if dim.HasField("dim_value") else sizes.get(dim.dim_param) for dim in dims]


def _is_known(outputs: Sequence[Dims | None]) -> bool:
    return all(dims is not None and None not in dims for dims in outputs)
