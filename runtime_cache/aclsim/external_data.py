"""ONNX external data: the few lines both the compiler and the loader need."""

from __future__ import annotations

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
