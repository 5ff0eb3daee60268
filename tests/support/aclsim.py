"""A fresh software device for a test, small models for it, and arrays in and out of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect, settings
from runtime_cache.aclsim.atc import compiler
from runtime_cache.aclsim.atc.options import parse_options

MIB = 1 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
POISON = bytes.fromhex("fe7ffe7f")
Array = npt.NDArray[Any]


@contextmanager
def fresh_process(**changes: Any) -> Iterator[None]:
    """A fresh process with device 0 set in this thread; everything is forgotten at the end."""
    inspect.reset()
    settings.configure(**changes)
    ok(acl.init())
    ok(acl.rt.set_device(0))
    try:
        yield
    finally:
        inspect.reset()


def ok(result: Any) -> Any:
    """Checks the code, which stands last, and returns the values before it."""
    values = result if isinstance(result, tuple) else (result,)
    assert values[-1] == 0, f"{values[-1]}: {acl.get_recent_err_msg()}"
    rest = values[:-1]
    return rest[0] if len(rest) == 1 else rest


def upload(array: Array) -> int:
    """Device memory that holds a copy of `array`."""
    ptr: int = ok(acl.rt.malloc(array.nbytes, 0))
    put(ptr, array)
    return ptr


def put(ptr: int, array: Array) -> None:
    """Copies an array to device memory, now."""
    ok(acl.rt.memcpy(ptr, array.nbytes, array.ctypes.data, array.nbytes, HOST_TO_DEVICE))


def download(ptr: int, dtype: npt.DTypeLike, count: int) -> Array:
    """Copies `count` elements out of device memory, now."""
    array = np.zeros(count, dtype)
    ok(acl.rt.memcpy(array.ctypes.data, array.nbytes, ptr, array.nbytes, DEVICE_TO_HOST))
    return array


def device_bytes(ptr: int, count: int) -> bytes:
    """Copies bytes out of device memory, now."""
    return download(ptr, np.uint8, count).tobytes()


def pinned(size: int) -> tuple[int, Array]:
    """Pinned host memory: its address and a view of its bytes."""
    ptr: int = ok(acl.rt.malloc_host(size))
    return ptr, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ptr))


def add_model(*, opset: int = 17, weight: Array | None = None) -> onnx.ModelProto:
    """y[B, S] = table[x[B, S]] + bias[S]: int32 ids in, fp32 out; table has 600 entries."""
    table = weight if weight is not None else np.arange(600, dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "x"], ["picked"], name="pick"),
            helper.make_node("Add", ["picked", "bias"], ["y"], name="add"),
        ],
        "add",
        [
            helper.make_tensor_value_info("x", TensorProto.INT32, ["B", "S"]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["S"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "S"])],
        [numpy_helper.from_array(table, "table")],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


STATIC = ("--input_shape=x:2,3;bias:3",)
GEARS = ("--input_shape=x:-1,-1;bias:-1", "--dynamic_dims=1,2,2;2,2,2;2,4,4")


def compile_om(
    directory: Path, flags: Sequence[str] = STATIC, model: onnx.ModelProto | None = None
) -> Path:
    """Compiles a model (by default `add_model`), for Ascend310P3 unless the flags name another SoC,
    into `<directory>/model.om`."""
    source = directory / "model.onnx"
    onnx.save_model(model if model is not None else add_model(), source)
    base = ["--framework=5", f"--model={source}", f"--output={directory / 'model'}"]
    defaults = ("--soc_version=Ascend310P3", "--input_format=ND")
    given = {flag.partition("=")[0] for flag in flags}
    unset = [flag for flag in defaults if flag.partition("=")[0] not in given]
    options = [*base, *unset, *flags]
    return compiler.compile_model(parse_options(options, compiler.tables().soc_versions))


class Run:
    """A loaded model with its datasets and a buffer for each input and for its first output."""

    def __init__(self, path: Path) -> None:
        self._open(ok(acl.mdl.load_from_file(str(path))))

    @classmethod
    def of(cls, model: int) -> Run:
        """One of a model that is loaded already."""
        run = cls.__new__(cls)
        run._open(model)
        return run

    def _open(self, model: int) -> None:
        self.model = model
        self.desc: int = acl.mdl.create_desc()
        ok(acl.mdl.get_desc(self.desc, self.model))
        sizes = [
            acl.mdl.get_input_size_by_index(self.desc, index)
            for index in range(acl.mdl.get_num_inputs(self.desc))
        ]
        self.inputs, self.input_ptrs, self.input_buffers = _dataset(sizes)
        self.outputs, self.output_ptrs, self.output_buffers = _dataset(
            [acl.mdl.get_output_size_by_index(self.desc, 0)]
        )
        self.stream: int = ok(acl.rt.create_stream())

    def feed(self, x: Sequence[int], bias: Sequence[float]) -> None:
        """Writes the inputs of `add_model`."""
        put(self.input_ptrs[0], np.array(x, np.int32))
        put(self.input_ptrs[1], np.array(bias, np.float32))

    def launch(self) -> int:
        """Queues one execution; returns the code."""
        code: int = acl.mdl.execute_async(self.model, self.inputs, self.outputs, self.stream)
        return code

    def finish(self) -> int:
        """Synchronises the stream; returns the code."""
        code: int = acl.rt.synchronize_stream(self.stream)
        return code

    def select(self, *dims: int) -> int:
        """Chooses a gear by all dims of all inputs; returns the code."""
        wanted = {"dimCount": len(dims), "dims": list(dims)}
        code: int = acl.mdl.set_input_dynamic_dims(self.model, self.inputs, 2, wanted)
        return code

    def result(self, count: int) -> list[float]:
        """The first elements of the output."""
        values: list[float] = download(self.output_ptrs[0], np.float32, count).tolist()
        return values


def _dataset(sizes: Sequence[int]) -> tuple[int, list[int], list[int]]:
    dataset = acl.mdl.create_dataset()
    ptrs = [ok(acl.rt.malloc(size, 0)) for size in sizes]
    buffers = [acl.create_data_buffer(ptr, size) for ptr, size in zip(ptrs, sizes, strict=True)]
    for buffer in buffers:
        ok(acl.mdl.add_dataset_buffer(dataset, buffer))
    return dataset, ptrs, buffers
