"""ONNX external data: what both the compiler and the loader need."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

_TYPED_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def refer_to(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Makes a tensor refer to `length` bytes at `offset` of a file, and drops its own data."""
    for name in _TYPED_FIELDS:
        tensor.ClearField(name)
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds, such as the branches of an If."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def all_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers of a graph and of its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_initializers(inner)
