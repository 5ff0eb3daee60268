"""Writes an ONNX model: nodes in a row, small constants inline, weights streamed beside it.

Knows nothing of Llama. Weights go to one external data file, one tensor at a time, each aligned to
4096 bytes so that a loader can map it; the host never holds more than the tensor at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from om_models.contract import TensorSpec
from om_models.weights import Array

#: One opset import, the newest that ATC registers for every op used (docs/kernels.md).
OPSET = 17
#: IR version of ONNX 1.12, the reference of the ATC documentation for opset 17.
IR_VERSION = 8
ALIGNMENT_BYTES = 4096
PRODUCER = "runtime-cache"

ONNX_DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


class OnnxWriter:
    """One model being written. Values are named by strings, as in ONNX itself.

    Used through `open_onnx`, which closes the data file and saves the `.onnx` at the end.
    """

    def __init__(self, data_name: str, data_file: BinaryIO) -> None:
        self._data_name = data_name
        self._data_file = data_file
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._weight_digests: dict[str, str] = {}
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of values and nodes made inside: ATC names them in its errors."""
        outer, self._scope = self._scope, f"{self._scope}{name}/"
        yield
        self._scope = outer

    def inputs(self, specs: Mapping[str, TensorSpec]) -> None:
        """Declare the model's inputs; dims that are letters are free."""
        self._inputs += [_value_info(name, spec) for name, spec in specs.items()]

    def outputs(self, values: Sequence[str], specs: Mapping[str, TensorSpec]) -> None:
        """Declare the values, which no node consumes, the model's outputs under these names."""
        for value, (name, spec) in zip(values, specs.items(), strict=True):
            # No Identity node: the value itself is renamed.
            for node in reversed(self._nodes):
                if value in node.output:
                    node.output[list(node.output).index(value)] = name
                    break
            self._outputs.append(_value_info(name, spec))

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        return self.op_outputs(op_type, 1, *inputs, **attributes)[0]

    def op_outputs(
        self, op_type: str, num_outputs: int, *inputs: str, **attributes: Any
    ) -> tuple[str, ...]:
        """Add a node with several outputs; returns their names."""
        name = f"{self._scope}{op_type}_{len(self._nodes)}"
        outputs = [name if i == 0 else f"{name}:{i}" for i in range(num_outputs)]
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **attributes))
        return tuple(outputs)

    def constant(self, value: Array) -> str:
        """A small constant, stored inline; equal constants are stored once."""
        key = hashlib.sha256(value.tobytes()).hexdigest()[:12]
        shape = "x".join(map(str, value.shape)) or "scalar"
        name = f"const_{value.dtype}_{shape}_{key}"
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def ints(self, *values: int) -> str:
        """An int64 vector: shapes, split sizes, pads."""
        return self.constant(np.array(values, dtype=np.int64))

    def weight(
        self, name: str, value: Array, *, is_transposed: bool = False, factor: float = 1
    ) -> str:
        """Stream a weight to the data file.

        The digest names the weight, not how it is stored.

        Args:
            is_transposed: [out, in] is stored as [in, out].
            factor: what is stored is so many times the weight.
        """
        self._weight_digests[name] = _digest_of(value.dtype, value.shape, [value])
        stored = value if factor == 1 else value * value.dtype.type(factor)
        return self.table(name, stored.T if is_transposed else stored)

    def weight_rows(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[Array]
    ) -> str:
        """Stream a weight to the data file whose rows come in blocks, so that none holds it all."""
        offset = self._begin()
        self._weight_digests[name] = _digest_of(dtype, shape, map(self._written, blocks))
        return self._end(name, dtype, shape, offset)

    def table(self, name: str, value: Array) -> str:
        """Stream a constant that follows from the spec and so is no part of the weights."""
        offset = self._begin()
        self._written(value)
        return self._end(name, value.dtype, value.shape, offset)

    def _begin(self) -> int:
        """Go to where the next tensor begins in the data file; returns its offset."""
        offset = -(-self._data_file.tell() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._data_file.seek(offset)

    def _written(self, value: Array) -> Array:
        self._data_file.write(_bytes_of(value))
        return value

    def _end(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> str:
        """Declare what was written since `_begin` as the initializer `name`."""
        tensor = TensorProto(name=name, dims=shape, data_type=ONNX_DTYPES[dtype.name])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (
            ("location", self._data_name),
            ("offset", str(offset)),
            ("length", str(self._data_file.tell() - offset)),
        ):
            tensor.external_data.add(key=key, value=text)
        self._initializers[name] = tensor
        return name

    def weights_digest(self) -> str:
        """SHA-256 over all weights written, independent of their order in the file [hex]."""
        lines = [f"{name} {digest}\n" for name, digest in sorted(self._weight_digests.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def model(self) -> onnx.ModelProto:
        """The model as written so far."""
        graph = helper.make_graph(
            self._nodes, PRODUCER, self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=PRODUCER
        )


@contextmanager
def open_onnx(onnx_path: Path) -> Iterator[OnnxWriter]:
    """Write `onnx_path` and, beside it, `<name>.data`; the model is saved if no error is raised."""
    data_path = onnx_path.with_name(onnx_path.name + ".data")
    with data_path.open("wb") as data_file:
        writer = OnnxWriter(data_path.name, data_file)
        yield writer
    onnx_path.write_bytes(writer.model().SerializeToString())


def _value_info(name: str, spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_DTYPES[spec.dtype], spec.dims)


def _digest_of(dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[Array]) -> str:
    digest = hashlib.sha256(f"{dtype.name} {list(shape)}\n".encode())
    for block in blocks:
        digest.update(_bytes_of(block))
    return digest.hexdigest()


def _bytes_of(value: Array) -> memoryview:
    """The array's bytes in C order, without a copy where they already are."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
