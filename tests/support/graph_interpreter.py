"""Runs an exported graph node by node in numpy, each result rounded to its declared type.

ONNX Runtime computes float16 in float32 on the CPU, so a graph that overflows on a card has fine
logits there. Here every float16 result is one: beyond 65504 it is infinity. It is stricter than a
card may be:

- a float16 node is made of its elementary steps, each rounded; sums, too, are float16, added one
  by one. Which Ascend kernels do so is not known. MatMul and Gemm add in float32, as cube units do;
- a subnormal stays one, as ONNX says.

Knows the operators of docs/kernels.md. A test tool and no part of the product: it serves no
request, and the oracle that does (`om_models.reference`) knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Array = npt.NDArray[Any]
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)


class GraphInterpreter:
    """One graph; `run` has the shape of ONNX Runtime's.

    Attributes:
        largest: largest magnitude of each float node's output in the last run, by node name.
    """

    def __init__(self, model: onnx.ModelProto | Path, in_half: Collection[str] = ()) -> None:
        """Read a graph.

        Args:
            in_half: names of float32 nodes to compute in float16 all the same, as if the casts
                around them were missing.
        """
        loaded = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
        self.nodes: Sequence[onnx.NodeProto] = loaded.graph.node
        self.dtypes = declared_dtypes(loaded)
        self.largest: dict[str, float] = {}
        self._constants = {t.name: numpy_helper.to_array(t) for t in loaded.graph.initializer}
        self._in_half = frozenset(in_half)
        assert self._in_half <= {node.name for node in self.nodes}

    def run(self, names: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
        """Values of the named outputs, or of any others in the graph."""
        values = {**self._constants, **inputs}
        self.largest.clear()
        with np.errstate(all="ignore"):
            for node in self.nodes:
                values.update(self._run_node(node, [values[name] for name in node.input]))
        return [values[name] for name in names]

    def _run_node(self, node: onnx.NodeProto, inputs: list[Array]) -> dict[str, Array]:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        declared = self.dtypes[node.output[0]]
        if node.op_type == "Cast":
            outputs: Sequence[Array] = [inputs[0].astype(declared)]
        else:
            dtype = HALF if node.name in self._in_half else declared
            if dtype in (HALF, SINGLE):
                inputs = [x.astype(dtype) if x.dtype in (HALF, SINGLE) else x for x in inputs]
            outputs = OPERATORS[node.op_type](*inputs, **attributes)
            assert all(output.dtype == dtype for output in outputs), node.name
        if outputs[0].dtype.kind == "f":
            self.largest[node.name] = float(max(np.abs(output).max() for output in outputs))
        return dict(zip(node.output, outputs, strict=True))


def declared_dtypes(model: onnx.ModelProto) -> dict[str, np.dtype[Any]]:
    """The type of every value, by ONNX's own inference."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    found = {v.name: v.type.tensor_type.elem_type for v in values}
    found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: helper.tensor_dtype_to_np_dtype(kind) for name, kind in found.items()}


def _add_up(x: Array) -> Array:
    """The sum over the last axis, kept as an axis; float16 one by one."""
    if x.dtype != HALF:
        return x.sum(axis=-1, keepdims=True)
    return np.add.accumulate(x, axis=-1, dtype=HALF)[..., -1:]


def _softmax(x: Array, axis: int) -> Array:
    assert axis == -1
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / _add_up(exponentials)


def _mean(x: Array, axes: Sequence[int], keepdims: int) -> Array:
    assert (list(axes), keepdims) == ([-1], 1)
    return _add_up(x) / x.dtype.type(x.shape[-1])


def _product(a: Array, b: Array) -> Array:
    return (a.astype(SINGLE) @ b.astype(SINGLE)).astype(a.dtype)


def _gemm(a: Array, b: Array, transB: int) -> Array:
    assert transB == 1
    return _product(a, b.T)


def _sigmoid(x: Array) -> Array:
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def _gather(data: Array, indices: Array, axis: int) -> Array:
    assert axis == 0
    return data[indices]


def _reshape(data: Array, shape: Array) -> Array:
    kept = [data.shape[i] if size == 0 else int(size) for i, size in enumerate(shape)]
    return data.reshape(kept)


def _split(data: Array, sizes: Array, axis: int) -> list[Array]:
    return np.split(data, np.cumsum(sizes)[:-1], axis=axis)


def _pad(data: Array, pads: Array) -> Array:
    before, after = np.split(pads, 2)
    return np.pad(data, list(zip(before, after, strict=True)))


def _one(compute: Callable[..., Array]) -> Callable[..., list[Array]]:
    return lambda *inputs, **attributes: [compute(*inputs, **attributes)]


OPERATORS: dict[str, Callable[..., Sequence[Array]]] = {
    "Add": _one(np.add),
    "Concat": _one(lambda *parts, axis: np.concatenate(parts, axis=axis)),
    "Cos": _one(np.cos),
    "Div": _one(np.divide),
    "Gather": _one(_gather),
    "Gemm": _one(_gemm),
    "MatMul": _one(_product),
    "Mul": _one(np.multiply),
    "Pad": _one(_pad),
    "Pow": _one(np.power),
    "ReduceMean": _one(_mean),
    "Reshape": _one(_reshape),
    "Sigmoid": _one(_sigmoid),
    "Softmax": _one(_softmax),
    "Split": _split,
    "Sqrt": _one(np.sqrt),
    "Sub": _one(np.subtract),
    "Transpose": _one(lambda x, perm: x.transpose(perm)),
}
