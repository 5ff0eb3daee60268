"""Models whose shapes are chosen at run time: ranges with tensor descriptions, gears of batch and
image sizes; output memory of the system, waiting with limits."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from tests.support.aclsim import (
    GEARS,
    STATIC,
    Array,
    Run,
    compile_om,
    download,
    fresh_process,
    ok,
    put,
)

RANGES = ("--input_shape=x:1~4,-1;bias:-1",)
ACL_INT32, ACL_FLOAT, ACL_INT64, FORMAT_ND = 3, 0, 9, 2


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_process(memory_bytes=1 << 30):
        yield


class Ranged:
    """A loaded model with ranges, with room for 16 elements of 8 bytes in each buffer.

    Args:
        path: the file.
        outputs: sizes of the output buffers; 0 stands for (0, 0).
    """

    def __init__(self, path: Path, num_inputs: int = 2, outputs: Sequence[int] = (128,)) -> None:
        self.model: int = ok(acl.mdl.load_from_file(str(path)))
        self.stream: int = ok(acl.rt.create_stream())
        self.input_ptrs = [ok(acl.rt.malloc(128, 0)) for _ in range(num_inputs)]
        self.inputs = dataset([(ptr, 128) for ptr in self.input_ptrs])
        self.output_ptrs = [ok(acl.rt.malloc(size, 0)) if size else 0 for size in outputs]
        self.outputs = dataset(list(zip(self.output_ptrs, outputs, strict=True)))

    def shape(self, index: int, acl_dtype: int, dims: list[int]) -> int:
        """Says an input's shape; returns the code."""
        desc = acl.create_tensor_desc(acl_dtype, dims, FORMAT_ND)
        _, code = acl.mdl.set_dataset_tensor_desc(self.inputs, desc, index)
        acl.destroy_tensor_desc(desc)
        return int(code)

    def feed(self, x: Array, bias: Array) -> None:
        """Writes the inputs of `add_model` and says their shapes."""
        for index, (array, dtype) in enumerate(((x, ACL_INT32), (bias, ACL_FLOAT))):
            put(self.input_ptrs[index], array)
            assert self.shape(index, dtype, list(array.shape)) == 0

    def launch(self) -> int:
        code: int = acl.mdl.execute_async(self.model, self.inputs, self.outputs, self.stream)
        return code

    def execute(self) -> int:
        code: int = acl.mdl.execute(self.model, self.inputs, self.outputs)
        return code

    def finish(self) -> int:
        code: int = acl.rt.synchronize_stream(self.stream)
        return code

    def output_dims(self, index: int = 0) -> list[int]:
        """The shape that the last run gave an output."""
        desc = acl.mdl.get_dataset_tensor_desc(self.outputs, index)
        count = acl.get_tensor_desc_num_dims(desc)
        return [ok(acl.get_tensor_desc_dim_v2(desc, axis)) for axis in range(count)]


def dataset(buffers: Sequence[tuple[int, int]]) -> int:
    handle: int = acl.mdl.create_dataset()
    for ptr, size in buffers:
        ok(acl.mdl.add_dataset_buffer(handle, acl.create_data_buffer(ptr, size)))
    return handle


def buffer_of(data: int, index: int) -> tuple[int, int]:
    """(address, size) that a dataset's buffer holds."""
    buffer = acl.mdl.get_dataset_buffer(data, index)
    return acl.get_data_buffer_addr(buffer), acl.get_data_buffer_size_v2(buffer)


@pytest.fixture
def ranged(tmp_path: Path) -> Ranged:
    return Ranged(compile_om(tmp_path, RANGES))


X23, BIAS3 = np.arange(6, dtype=np.int32).reshape(2, 3), np.array([0.5, 0, 0], np.float32)
X14, BIAS4 = np.arange(4, dtype=np.int32).reshape(1, 4), np.zeros(4, np.float32)


# --- ranges ---


def test_the_file_of_a_model_with_ranges_names_system_and_processor(tmp_path: Path) -> None:
    path = compile_om(tmp_path, RANGES)
    assert path.name == f"model_linux_{platform.machine()}.om"


def test_host_code_for_another_processor_does_not_load(tmp_path: Path) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    path = compile_om(tmp_path, (*RANGES, f"--host_env_cpu={other}"))
    assert path.name == f"model_linux_{other}.om"
    assert acl.mdl.load_from_file(str(path)) == (0, 545001)


def test_description_of_a_model_with_ranges(tmp_path: Path) -> None:
    run = Ranged(compile_om(tmp_path, ("--input_shape=x:1~4,2~3;bias:-1",)))
    desc = acl.mdl.create_desc()
    ok(acl.mdl.get_desc(desc, run.model))
    assert acl.mdl.get_num_inputs(desc) == 2
    assert ok(acl.mdl.get_input_dims(desc, 0))["dims"] == [-1, -1]
    assert ok(acl.mdl.get_input_dims_v2(desc, 0))["dims"] == [-1, -1]
    assert acl.mdl.get_input_size_by_index(desc, 0) == 4 * 3 * 4
    assert acl.mdl.get_input_size_by_index(desc, 1) == 0
    assert acl.mdl.get_output_size_by_index(desc, 0) == 0
    ranges = ok(acl.mdl.get_input_dims_range(desc, 0))
    assert ranges == {"rangeCount": 2, "range": [[1, 4], [2, 3]]}
    assert ok(acl.mdl.get_input_dims_range(desc, 1))["range"] == [[0, -1]]
    assert acl.mdl.get_input_dims_range(desc, 2) == ({"rangeCount": 0, "range": []}, 100000)
    assert acl.mdl.get_cur_output_dims(desc, 0) == ({}, 100000)
    assert "model with ranges" in acl.get_recent_err_msg()
    assert acl.mdl.get_input_dynamic_gear_count(desc, -1) == (0, 0)
    assert ok(acl.mdl.get_dynamic_batch(desc)) == {"batchCount": 0, "batch": []}


def test_each_run_has_its_shapes_and_says_the_outputs(ranged: Ranged) -> None:
    for x, bias in ((X23, BIAS3), (X14, BIAS4)):
        ranged.feed(x, bias)
        assert (ranged.launch(), ranged.finish()) == (0, 0)
        assert ranged.output_dims() == list(x.shape)
        got = download(ranged.output_ptrs[0], np.float32, x.size).reshape(x.shape)
        assert (got == x + bias).all()


def test_the_description_of_an_output_is_replaced_by_the_next_run(ranged: Ranged) -> None:
    ranged.feed(X23, BIAS3)
    assert ranged.execute() == 0
    old = acl.mdl.get_dataset_tensor_desc(ranged.outputs, 0)
    assert acl.get_tensor_desc_element_count(old) == 6
    assert acl.get_tensor_desc_type(old) == ACL_FLOAT
    assert ranged.execute() == 0
    assert acl.mdl.get_dataset_tensor_desc(ranged.outputs, 0) != old
    assert acl.get_tensor_desc_element_count(old) == 0  # dead
    assert "no live tensor description" in acl.get_recent_err_msg()


def test_the_dataset_copies_descriptions_and_frees_them(ranged: Ranged) -> None:
    desc = acl.create_tensor_desc(ACL_INT32, [2, 3], FORMAT_ND)
    assert acl.mdl.set_dataset_tensor_desc(ranged.inputs, desc, 0) == (ranged.inputs, 0)
    owned = acl.mdl.get_dataset_tensor_desc(ranged.inputs, 0)
    assert owned not in (0, desc)
    acl.destroy_tensor_desc(desc)
    assert acl.get_tensor_desc_num_dims(owned) == 2
    assert acl.mdl.set_dataset_tensor_desc(ranged.inputs, 0, 0) == (ranged.inputs, 0)
    assert acl.mdl.get_dataset_tensor_desc(ranged.inputs, 0) == 0
    assert acl.mdl.set_dataset_tensor_desc(ranged.inputs, desc, 2) == (0, 100000)
    assert acl.mdl.set_dataset_tensor_desc(ranged.inputs, desc, 0) == (0, 100000)
    assert acl.mdl.get_dataset_tensor_desc(ranged.inputs, 2) == 0


@pytest.mark.parametrize(
    ("dims", "code"),
    [([0, 3], 145021), ([1, 3], 0), ([4, 3], 0), ([5, 3], 145021), ([3], 145021)],
)
def test_shapes_outside_of_the_ranges_are_refused(
    ranged: Ranged, dims: list[int], code: int
) -> None:
    ranged.feed(X23, BIAS3)
    put(ranged.input_ptrs[0], np.zeros(12, np.int32))
    assert ranged.shape(0, ACL_INT32, dims) == 0
    assert ranged.launch() == code
    assert ranged.finish() == 0


def test_an_open_input_needs_a_shape(ranged: Ranged) -> None:
    ranged.feed(X23, BIAS3)
    ok(acl.mdl.set_dataset_tensor_desc(ranged.inputs, 0, 1))
    assert ranged.launch() == 100000
    assert "input bias [-1] needs set_dataset_tensor_desc" in acl.get_recent_err_msg()


def test_shapes_are_not_changed_under_a_queued_run(ranged: Ranged) -> None:
    ranged.feed(X23, BIAS3)
    with inspect.hold(ranged.stream):
        assert ranged.launch() == 0
        assert ranged.shape(0, ACL_INT32, [1, 3]) == 100000
    assert ranged.finish() == 0


def test_buffers_of_ranged_models_are_checked(tmp_path: Path) -> None:
    run = Ranged(compile_om(tmp_path, RANGES), outputs=(23,))
    run.feed(X23, BIAS3)
    assert (run.launch(), run.finish()) == (0, 500002)
    assert "output y: buffer of 23 bytes, the run needs 24" in acl.get_recent_err_msg()
    assert acl.mdl.get_dataset_tensor_desc(run.outputs, 0) == 0
    short = acl.mdl.get_dataset_buffer(run.inputs, 0)
    ok(acl.update_data_buffer(short, run.input_ptrs[0], 23))
    assert run.launch() == 500002
    ok(acl.update_data_buffer(short, run.output_ptrs[0], 128))
    assert run.launch() == 100000  # the output would overwrite the input
    fewer = dataset([(run.input_ptrs[0], 128)])
    assert acl.mdl.execute_async(run.model, fewer, run.outputs, run.stream) == 100000


def test_query_size_is_not_for_models_with_ranges(tmp_path: Path) -> None:
    path = compile_om(tmp_path, RANGES)
    assert acl.mdl.query_size(str(path)) == (0, 0, 100000)
    # Work memory that is offered is ignored, as by the runtime.
    ok(acl.mdl.load_from_file_with_mem(str(path), 64, 1, 0, 0))


def test_execute_and_execute_async_mix_on_models_with_ranges(ranged: Ranged) -> None:
    ranged.feed(X23, BIAS3)
    assert (ranged.execute(), ranged.launch(), ranged.finish()) == (0, 0, 0)


def test_poison_and_freed_memory_fail_runs_with_ranges(ranged: Ranged) -> None:
    ranged.shape(0, ACL_INT32, [2, 3])
    ranged.shape(1, ACL_FLOAT, [3])
    assert (ranged.launch(), ranged.finish()) == (0, 507011)
    ranged.feed(X23, BIAS3)
    with inspect.hold(ranged.stream):
        assert ranged.launch() == 0
        ok(acl.rt.free(ranged.input_ptrs[1]))
    assert ranged.finish() == 507015


def nonzero_model() -> onnx.ModelProto:
    """where[1, k] = NonZero(a[4]), and double = a + a."""
    graph = helper.make_graph(
        [
            helper.make_node("NonZero", ["a"], ["where"]),
            helper.make_node("Add", ["a", "a"], ["double"]),
        ],
        "nonzero",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [4])],
        [
            helper.make_tensor_value_info("where", TensorProto.INT64, None),
            helper.make_tensor_value_info("double", TensorProto.FLOAT, [4]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_outputs_of_unknown_size_get_memory_of_the_system(tmp_path: Path) -> None:
    run = Ranged(compile_om(tmp_path, (), nonzero_model()), 1, outputs=(0, 0))
    before = inspect.report().device_allocations
    put(run.input_ptrs[0], np.array([0, 3, 0, 5], np.float32))
    assert run.execute() == 0
    assert run.output_dims(0) == [1, 2]
    address, size = buffer_of(run.outputs, 0)
    assert size == 16
    assert download(address, np.int64, 2).tolist() == [1, 3]
    address_double, _ = buffer_of(run.outputs, 1)
    assert download(address_double, np.float32, 4).tolist() == [0, 6, 0, 10]
    assert inspect.report().device_allocations == before + 2
    for ptr in (address, address_double):
        ok(acl.rt.free(ptr))
    # The buffers are the program's to reset.
    assert run.execute() == 507015
    for index in range(2):
        ok(acl.update_data_buffer(acl.mdl.get_dataset_buffer(run.outputs, index), 0, 0))
    put(run.input_ptrs[0], np.array([1, 1, 1, 1], np.float32))
    assert run.execute() == 0
    assert run.output_dims(0) == [1, 4]


def test_no_elements_are_a_result_too(tmp_path: Path) -> None:
    run = Ranged(compile_om(tmp_path, (), nonzero_model()), 1, outputs=(128, 128))
    put(run.input_ptrs[0], np.zeros(4, np.float32))
    assert (run.launch(), run.finish()) == (0, 0)
    assert run.output_dims(0) == [1, 0]


def test_an_input_without_elements(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["a"], ["b"], keepdims=1)],
        "sum",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    run = Ranged(compile_om(tmp_path, ("--input_shape=a:-1",), model), 1)
    put(run.output_ptrs[0], np.ones(1, np.float32))
    run.shape(0, ACL_FLOAT, [0])
    assert run.execute() == 0
    assert download(run.output_ptrs[0], np.float32, 1).tolist() == [0]


# --- output memory of the system, compiled shapes ---


@pytest.mark.parametrize(("flags", "columns"), [(STATIC, 3), (GEARS, 4)])
def test_empty_output_buffers_are_filled_by_execute_alone(
    tmp_path: Path, flags: Sequence[str], columns: int
) -> None:
    run = Run(compile_om(tmp_path, flags))
    run.feed(list(range(2 * columns)), [0] * columns)
    ok(acl.update_data_buffer(run.output_buffers[0], 0, 0))
    assert run.launch() == 100000
    assert acl.mdl.execute(run.model, run.inputs, run.outputs) == 0
    address, size = buffer_of(run.outputs, 0)
    assert size == 2 * columns * 4
    assert download(address, np.float32, 2 * columns).tolist() == list(range(2 * columns))
    ok(acl.rt.free(address))


def test_a_run_that_fails_takes_back_what_it_gave(tmp_path: Path) -> None:
    run = Run(compile_om(tmp_path))  # ids that nobody wrote: out of range
    ok(acl.update_data_buffer(run.output_buffers[0], 0, 0))
    before = inspect.report().device_bytes
    assert acl.mdl.execute(run.model, run.inputs, run.outputs) == 507011
    assert buffer_of(run.outputs, 0) == (0, 0)
    assert inspect.report().device_bytes == before


# --- waiting with limits ---


def exec_config(**values: int) -> int:
    handle: int = acl.mdl.create_exec_config_handle()
    for number, value in values.items():
        assert acl.mdl.set_exec_config_opt(handle, int(number.removeprefix("a")), value) == 0
    return handle


@pytest.fixture
def static(tmp_path: Path) -> Run:
    run = Run(compile_om(tmp_path))
    run.feed([0, 1, 2, 3, 4, 5], [0, 0, 0])
    return run


@pytest.mark.parametrize("limits", [{}, {"a0": 30_000}, {"a0": -1, "a1": 30_000}])
def test_execute_v2_runs_and_waits(static: Run, limits: dict[str, int]) -> None:
    config = exec_config(**limits)
    args = (static.model, static.inputs, static.outputs, static.stream, config)
    assert acl.mdl.execute_v2(*args) == 0
    assert static.result(6) == [0, 1, 2, 3, 4, 5]
    assert acl.mdl.destroy_exec_config_handle(config) == 0
    assert acl.mdl.execute_v2(*args) == 100000


def test_execute_v2_gives_up_and_the_run_goes_on(static: Run) -> None:
    config = exec_config(a0=1)
    with inspect.hold(static.stream):
        args = (static.model, static.inputs, static.outputs, static.stream, config)
        assert acl.mdl.execute_v2(*args) == 507046
        assert np.isnan(static.result(6)).all()
        assert acl.mdl.unload(static.model) == 500002
    assert static.finish() == 0
    assert static.result(6) == [0, 1, 2, 3, 4, 5]


def test_memory_given_to_a_run_that_goes_on_stays(static: Run) -> None:
    ok(acl.update_data_buffer(static.output_buffers[0], 0, 0))
    config = exec_config(a0=1)
    with inspect.hold(static.stream):
        args = (static.model, static.inputs, static.outputs, static.stream, config)
        assert acl.mdl.execute_v2(*args) == 507046
    assert static.finish() == 0
    address, _ = buffer_of(static.outputs, 0)
    assert download(address, np.float32, 6).tolist() == [0, 1, 2, 3, 4, 5]
    ok(acl.rt.free(address))


def test_execute_v2_needs_options_and_does_not_mix(static: Run) -> None:
    args = (static.model, static.inputs, static.outputs, static.stream)
    assert acl.mdl.execute_v2(*args, 0) == 100000
    assert acl.mdl.execute_v2(*args, exec_config()) == 0
    assert static.launch() == 500002
    ok(acl.update_data_buffer(static.output_buffers[0], 0, 0))
    assert acl.mdl.execute_v2(*args, exec_config()) == 0
    ok(acl.rt.free(buffer_of(static.outputs, 0)[0]))


def test_options_of_runs_that_do_not_exist() -> None:
    handle = exec_config()
    assert acl.mdl.set_exec_config_opt(handle, 2, 0) == 207000
    assert acl.mdl.set_exec_config_opt(handle, 7, 0) == 207000
    assert acl.mdl.set_exec_config_opt(handle, 8, 0) == 100000
    assert acl.mdl.set_exec_config_opt(1, 0, 0) == 100000


# --- gears of batch and image sizes ---


def relu_model(dims: Sequence[Any]) -> onnx.ModelProto:
    """b = Relu(a)."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["a"], ["b"])],
        "relu",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, dims)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def batched(tmp_path: Path) -> Run:
    flags = ("--input_shape=a:-1,3", "--dynamic_batch_size=1,4,2")
    return Run(compile_om(tmp_path, flags, relu_model(["n", 3])))


def test_gears_of_batch_sizes(batched: Run) -> None:
    desc = batched.desc
    assert ok(acl.mdl.get_dynamic_batch(desc)) == {"batchCount": 3, "batch": [1, 4, 2]}
    assert ok(acl.mdl.get_input_dims(desc, 0))["dims"] == [-1, 3]
    assert ok(acl.mdl.get_output_dims(desc, 0))["dims"] == [4, 3]
    assert acl.mdl.get_input_size_by_index(desc, 0) == 48
    assert acl.mdl.get_input_index_by_name(desc, "ascend_mbatch_shape_data") == (1, 0)
    assert acl.mdl.get_input_size_by_index(desc, 1) == 4
    put(batched.input_ptrs[0], np.array([-1, 2, 3, -4, 5, 6], np.float32))
    assert acl.mdl.set_dynamic_batch_size(batched.model, batched.inputs, 1, 2) == 0
    assert ok(acl.mdl.get_cur_output_dims(desc, 0))["dims"] == [2, 3]
    assert (batched.launch(), batched.finish()) == (0, 0)
    assert batched.result(6) == [0, 2, 3, 0, 5, 6]
    assert np.isnan(batched.result(12)[6:]).all()


@pytest.mark.parametrize(("batch", "code"), [(0, 100000), (1, 0), (3, 145013), (5, 145013)])
def test_batch_sizes_that_were_not_compiled(batched: Run, batch: int, code: int) -> None:
    assert acl.mdl.set_dynamic_batch_size(batched.model, batched.inputs, 1, batch) == code


def test_the_selector_of_batch_sizes_is_checked(batched: Run) -> None:
    ok(acl.update_data_buffer(batched.input_buffers[1], batched.input_ptrs[1], 3))
    assert acl.mdl.set_dynamic_batch_size(batched.model, batched.inputs, 1, 2) == 145012
    ok(acl.update_data_buffer(batched.input_buffers[1], 4096, 4))
    assert acl.mdl.set_dynamic_batch_size(batched.model, batched.inputs, 1, 2) == 145011
    assert acl.mdl.set_dynamic_batch_size(batched.model, batched.inputs, 0, 2) == 100000


def test_gears_of_image_sizes(tmp_path: Path) -> None:
    flags = (
        "--input_shape=a:1,1,-1,-1",
        "--dynamic_image_size=2,3;4,4",
        "--input_format=NCHW",
    )
    run = Run(compile_om(tmp_path, flags, relu_model([1, 1, "h", "w"])))
    assert ok(acl.mdl.get_dynamic_hw(run.desc, -1)) == {"hwCount": 2, "hw": [[2, 3], [4, 4]]}
    assert acl.mdl.get_input_format(run.desc, 0) == acl.mdl.get_output_format(run.desc, 0) == 0
    put(run.input_ptrs[0], np.arange(-3, 3, dtype=np.float32))
    assert acl.mdl.set_dynamic_hw_size(run.model, run.inputs, 1, 3, 2) == 145013
    assert acl.mdl.set_dynamic_hw_size(run.model, run.inputs, 1, 0, 3) == 100000
    assert acl.mdl.set_dynamic_hw_size(run.model, run.inputs, 1, 2, 3) == 0
    assert ok(acl.mdl.get_cur_output_dims(run.desc, 0))["dims"] == [1, 1, 2, 3]
    assert (run.launch(), run.finish()) == (0, 0)
    assert run.result(6) == [0, 0, 0, 0, 1, 2]


def test_each_kind_of_model_has_its_own_way_to_set_shapes(tmp_path: Path, batched: Run) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "r").mkdir()
    dims = Run(compile_om(tmp_path / "g", GEARS))
    ranged = Ranged(compile_om(tmp_path / "r", RANGES))
    wanted = {"dimCount": 2, "dims": [2, 3]}
    for run in (dims, ranged):
        assert acl.mdl.set_dynamic_batch_size(run.model, run.inputs, 1, 2) == 100000
        assert acl.mdl.set_dynamic_hw_size(run.model, run.inputs, 1, 2, 2) == 100000
    for other in (batched, ranged):
        assert acl.mdl.set_input_dynamic_dims(other.model, other.inputs, 1, wanted) == 100000
    assert "one way to set its shapes" in acl.get_recent_err_msg()
    assert acl.mdl.get_input_dynamic_gear_count(batched.desc, -1) == (0, 0)
    assert ok(acl.mdl.get_dynamic_batch(dims.desc)) == {"batchCount": 0, "batch": []}
    assert ok(acl.mdl.get_dynamic_hw(dims.desc, -1)) == {"hwCount": 0, "hw": []}
    desc = acl.create_tensor_desc(ACL_FLOAT, [2, 3], FORMAT_ND)
    ok(acl.mdl.set_dataset_tensor_desc(batched.inputs, desc, 0))
    assert batched.launch() == 100000
    assert "not set with set_dataset_tensor_desc" in acl.get_recent_err_msg()


# --- names, ranges and formats of other models ---


def test_names_over_127_characters_have_a_short_form_in_dims(tmp_path: Path) -> None:
    names = ["a" * 127, "b" * 128]
    graph = helper.make_graph(
        [helper.make_node("Add", names, ["c" * 128])],
        "add",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in names],
        [helper.make_tensor_value_info("c" * 128, TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    run = Run(compile_om(tmp_path, (), model))
    assert ok(acl.mdl.get_input_dims(run.desc, 0))["name"] == names[0]
    short = f"acl_modelId_{run.model}_input_1"
    assert ok(acl.mdl.get_input_dims(run.desc, 1))["name"] == short
    assert ok(acl.mdl.get_input_dims_v2(run.desc, 1))["name"] == short
    assert acl.mdl.get_input_name_by_index(run.desc, 1) == names[1]
    assert acl.mdl.get_tensor_real_name(run.desc, short) == names[1]
    assert acl.mdl.get_tensor_real_name(run.desc, names[0]) == names[0]
    output = ok(acl.mdl.get_cur_output_dims(run.desc, 0))["name"]
    assert output == f"acl_modelId_{run.model}_output_0"
    assert acl.mdl.get_tensor_real_name(run.desc, output) == "Add_0:0:" + "c" * 128
    assert acl.mdl.get_tensor_real_name(run.desc, "acl_modelId_1_input_9") is None


def test_ranges_of_models_with_compiled_shapes(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    static = Run(compile_om(tmp_path))
    assert ok(acl.mdl.get_input_dims_range(static.desc, 0))["range"] == [[2, 2], [3, 3]]
    gears = Run(compile_om(tmp_path / "g", GEARS))
    assert ok(acl.mdl.get_input_dims_range(gears.desc, 0)) == {"rangeCount": 0, "range": []}


def test_attributes_of_operators_are_not_modelled(static: Run) -> None:
    with pytest.raises(NotImplementedError, match="not modelled"):
        acl.mdl.get_op_attr(static.desc, "add", "x")


def test_descriptions_are_not_for_static_models(static: Run) -> None:
    desc = acl.create_tensor_desc(ACL_INT32, [2, 3], FORMAT_ND)
    ok(acl.mdl.set_dataset_tensor_desc(static.inputs, desc, 0))
    assert static.launch() == 100000
    ok(acl.mdl.set_dataset_tensor_desc(static.inputs, 0, 0))
    assert static.launch() == 0
    assert static.finish() == 0
