"""Models on the software device: loading, description, gears, execution, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect, settings
from runtime_cache.aclsim.loading import model_of
from runtime_cache.aclsim.mdl import loading
from runtime_cache.aclsim.models import LoadedModel
from runtime_cache.aclsim.om import read_om
from runtime_cache.aclsim.process import this_process
from tests.support.aclsim import (
    GEARS,
    MIB,
    STATIC,
    Run,
    add_model,
    compile_om,
    download,
    fresh_process,
    ok,
    put,
)

pytestmark = pytest.mark.usefixtures("fresh_device")


@pytest.fixture
def static(tmp_path: Path) -> Run:
    return Run(compile_om(tmp_path))


@pytest.fixture
def geared(tmp_path: Path) -> Run:
    return Run(compile_om(tmp_path, GEARS))


# --- description ---


def test_description_of_a_static_model(static: Run) -> None:
    desc = static.desc
    assert acl.mdl.get_num_inputs(desc) == 2
    assert acl.mdl.get_num_outputs(desc) == 1
    assert acl.mdl.get_input_dims(desc, 0) == ({"name": "x", "dimCount": 2, "dims": [2, 3]}, 0)
    assert acl.mdl.get_output_dims(desc, 0) == (
        {"name": "add:0:y", "dimCount": 2, "dims": [2, 3]},
        0,
    )
    assert acl.mdl.get_input_data_type(desc, 0) == 3
    assert acl.mdl.get_output_data_type(desc, 0) == 0
    assert acl.mdl.get_input_size_by_index(desc, 0) == 24
    assert acl.mdl.get_input_format(desc, 0) == acl.mdl.get_output_format(desc, 0) == 2
    assert acl.mdl.get_input_index_by_name(desc, "bias") == (1, 0)
    assert acl.mdl.get_output_index_by_name(desc, "add:0:y") == (0, 0)
    assert acl.mdl.get_output_name_by_index(desc, 0) == "add:0:y"
    assert acl.mdl.get_input_dynamic_gear_count(desc, -1) == (0, 0)


def test_an_output_is_named_after_its_operator(tmp_path: Path, static: Run) -> None:
    assert acl.mdl.get_output_index_by_name(static.desc, "y") == (0, 100000)
    assert ok(acl.mdl.get_cur_output_dims(static.desc, 0))["name"] == "add:0:y"
    chosen = Run(compile_om(tmp_path, [*STATIC, "--out_nodes=pick:0"]))
    assert acl.mdl.get_output_name_by_index(chosen.desc, 0) == "pick:0"
    model = add_model()
    model.graph.node[1].ClearField("name")
    nameless = Run(compile_om(tmp_path, STATIC, model))
    assert acl.mdl.get_output_name_by_index(nameless.desc, 0) == "Add_1:0:y"


def test_a_bad_index_or_name_gives_the_documented_values(static: Run) -> None:
    desc = static.desc
    assert acl.mdl.get_input_size_by_index(desc, 2) == 0
    assert acl.mdl.get_input_name_by_index(desc, 2) == ""
    assert acl.mdl.get_input_dims(desc, 2) == ({}, 100000)
    assert acl.mdl.get_output_dims(desc, -1) == ({}, 100000)
    assert acl.mdl.get_input_data_type(desc, 2) == -1
    assert acl.mdl.get_output_format(desc, 1) == -1
    assert acl.mdl.get_input_index_by_name(desc, "z") == (0, 100000)
    assert acl.mdl.destroy_desc(desc) == 0
    assert acl.mdl.get_num_inputs(desc) == 0


def test_description_of_a_gear_model(geared: Run) -> None:
    desc = geared.desc
    assert acl.mdl.get_num_inputs(desc) == 3
    assert acl.mdl.get_input_name_by_index(desc, 2) == "ascend_mbatch_shape_data"
    assert acl.mdl.get_input_index_by_name(desc, "ascend_mbatch_shape_data") == (2, 0)
    assert acl.mdl.get_input_data_type(desc, 2) == 3
    assert acl.mdl.get_input_size_by_index(desc, 2) == 12
    assert acl.mdl.get_input_dims(desc, 0)[0]["dims"] == [-1, -1]
    assert acl.mdl.get_input_size_by_index(desc, 0) == 2 * 4 * 4
    assert acl.mdl.get_output_dims(desc, 0)[0]["dims"] == [2, 4]
    assert acl.mdl.get_output_size_by_index(desc, 0) == 2 * 4 * 4


def test_gears_are_the_concatenated_dims_of_all_inputs(geared: Run) -> None:
    assert acl.mdl.get_input_dynamic_gear_count(geared.desc, -1) == (3, 0)
    assert acl.mdl.get_input_dynamic_gear_count(geared.desc, 0) == (0, 100000)
    gears, code = acl.mdl.get_input_dynamic_dims(geared.desc, -1, 3)
    assert code == 0
    assert [gear["dims"] for gear in gears] == [[1, 2, 2], [2, 2, 2], [2, 4, 4]]
    assert acl.mdl.get_input_dynamic_dims(geared.desc, -1, 4097) == (None, 100000)


# --- execution ---


def test_execution_happens_at_its_turn_and_reads_what_is_there_then(static: Run) -> None:
    static.feed([0, 1, 2, 3, 4, 5], [0, 0, 0])
    with inspect.hold(static.stream):
        assert static.launch() == 0
        assert np.isnan(static.result(6)).all()
        static.feed([10, 11, 12, 13, 14, 15], [0.5, 0, 0])
    assert static.finish() == 0
    assert static.result(6) == [10.5, 11, 12, 13.5, 14, 15]


def test_a_dataset_can_be_pointed_elsewhere_between_runs(static: Run) -> None:
    static.feed([0, 1, 2, 3, 4, 5], [0, 0, 0])
    other = ok(acl.rt.malloc(24, 0))
    with inspect.hold(static.stream):
        assert static.launch() == 0
        ok(acl.update_data_buffer(static.output_buffers[0], other, 24))
        assert static.launch() == 0
    assert static.finish() == 0
    assert static.result(6) == [0, 1, 2, 3, 4, 5]
    assert download(other, np.float32, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_queueing_does_not_wait_for_a_run_in_progress(static: Run) -> None:
    static.feed([0] * 6, [0, 0, 0])
    model = this_process().models[static.model]
    with model._run_lock:  # as a long run holds it
        assert static.launch() == 0
        assert static.launch() == 0
        assert acl.rt.stream_query(static.stream) == (1, 0)
    assert static.finish() == 0


def test_poison_in_an_index_input_fails_the_run(static: Run) -> None:
    assert static.launch() == 0
    assert static.finish() == 507011
    assert "model run failed" in acl.get_recent_err_msg()


def test_memory_freed_before_the_turn_fails_the_run(static: Run) -> None:
    static.feed([0] * 6, [0, 0, 0])
    with inspect.hold(static.stream):
        assert static.launch() == 0
        ok(acl.rt.free(static.input_ptrs[1]))
    assert static.finish() == 507015
    assert "use after free of device address" in acl.get_recent_err_msg()


def test_weights_are_mapped_from_the_file_and_not_copied(tmp_path: Path) -> None:
    table = np.arange(4 * MIB, dtype=np.float32)
    path = compile_om(tmp_path, model=add_model(weight=table))
    run = Run(path)
    maps = Path("/proc/self/maps").read_text()
    assert str(path) in maps
    run.feed([0, 1, 2, 4 * MIB - 1, 4, 5], [0, 0, 0])
    assert (run.launch(), run.finish()) == (0, 0)
    assert run.result(6) == [0, 1, 2, 4 * MIB - 1, 4, 5]


def test_loading_charges_weights_and_work_memory_and_unloading_gives_them_back(
    tmp_path: Path,
) -> None:
    path = compile_om(tmp_path, model=add_model(weight=np.zeros(2 * MIB, np.float32)))
    before, _ = ok(acl.rt.get_mem_info(0))
    work, weights = ok(acl.mdl.query_size(str(path)))
    model = ok(acl.mdl.load_from_file(str(path)))
    after, _ = ok(acl.rt.get_mem_info(0))
    assert weights == 10 * MIB  # 8 MiB and the 32-byte tail, in 2 MiB pages
    assert before - after == work + weights
    ok(acl.mdl.unload(model))
    assert ok(acl.rt.get_mem_info(0))[0] == before
    assert acl.mdl.unload(model) == 145003


def test_no_room_for_the_weights_is_207001(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=np.zeros(2 * MIB, np.float32)))
    with fresh_process(memory_bytes=20 * MIB, initial_use_bytes=10 * MIB):
        before = acl.rt.get_mem_info(0)
        assert acl.mdl.load_from_file(str(path)) == (0, 207001)
        assert acl.rt.get_mem_info(0) == before


def test_bindings_of_many_pointers_stay_right(static: Run) -> None:
    static.feed([1, 2, 3, 4, 5, 6], [0, 0, 0])
    targets = [ok(acl.rt.malloc(24, 0)) for _ in range(70)]
    for target in [*targets, *targets[::-1]]:
        ok(acl.update_data_buffer(static.output_buffers[0], target, 24))
        assert static.launch() == 0
    assert static.finish() == 0
    for target in targets:
        assert download(target, np.float32, 6).tolist() == [1, 2, 3, 4, 5, 6]


def test_weights_can_be_used_in_place(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    with fresh_process(weights_in_place=True):
        run = Run(path)
        run.feed([1, 2, 3, 4, 5, 6], [0, 0, 0])
        assert (run.launch(), run.finish()) == (0, 0)
        assert run.result(6) == [1, 2, 3, 4, 5, 6]


def test_reset_waits_for_runs_on_the_default_stream_and_unloads(static: Run) -> None:
    static.feed([1] * 6, [0, 0, 0])
    for _ in range(50):
        code = acl.mdl.execute_async(static.model, static.inputs, static.outputs, 0)
        assert code == 0
    ok(acl.rt.destroy_stream(static.stream))
    assert acl.rt.reset_device(0) == 0
    assert inspect.report().models == 0
    assert inspect.report().misuses == (
        "reset_device(0) unloaded model 1, still loaded",
        "reset_device(0) freed 3 of malloc, 60 bytes, still allocated",
    )


# --- gears ---


def test_a_run_uses_the_selected_gear(geared: Run) -> None:
    geared.feed([7, 8], [0.25, 0])
    assert geared.select(1, 2, 2) == 0
    assert acl.mdl.get_cur_output_dims(geared.desc, 0)[0]["dims"] == [1, 2]
    assert (geared.launch(), geared.finish()) == (0, 0)
    assert geared.result(2) == [7.25, 8]
    assert np.isnan(geared.result(8)[2:]).all()


def test_a_run_without_selection_uses_the_largest_gear(geared: Run) -> None:
    geared.feed(list(range(8)), [0, 0, 0, 0])
    assert acl.mdl.get_cur_output_dims(geared.desc, 0)[0]["dims"] == [2, 4]
    assert (geared.launch(), geared.finish()) == (0, 0)
    assert geared.result(8) == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dims", [(1, 2, 3), (3, 2, 2), (1, 2), (2, 4, 4, 4)])
def test_dims_that_are_no_gear_are_145013(geared: Run, dims: tuple[int, ...]) -> None:
    assert geared.select(*dims) == 145013


def test_the_selector_is_written_at_once_and_its_buffer_is_checked(geared: Run) -> None:
    assert geared.select(2, 2, 2) == 0
    assert download(geared.input_ptrs[2], np.int32, 3).tolist() == [2, 2, 2]
    ok(acl.update_data_buffer(geared.input_buffers[2], geared.input_ptrs[2], 11))
    assert geared.select(2, 2, 2) == 145012
    ok(acl.update_data_buffer(geared.input_buffers[2], 4096, 12))
    assert geared.select(2, 2, 2) == 145011
    assert geared.launch() == 145011


def test_selecting_while_a_run_of_the_dataset_is_queued_is_refused(geared: Run) -> None:
    geared.feed([1, 2], [0, 0])
    assert geared.select(1, 2, 2) == 0
    with inspect.hold(geared.stream):
        assert geared.launch() == 0
        assert geared.select(2, 2, 2) == 100000
    assert geared.finish() == 0
    assert geared.select(2, 2, 2) == 0


def test_a_selector_rewritten_behind_the_call_fails_the_run(geared: Run) -> None:
    geared.feed([1, 2], [0, 0])
    assert geared.select(1, 2, 2) == 0
    with inspect.hold(geared.stream):
        assert geared.launch() == 0
        put(geared.input_ptrs[2], np.array([2, 2, 2], np.int32))
    assert geared.finish() == 507011
    assert "selector was rewritten" in acl.get_recent_err_msg()


def test_a_selector_that_holds_no_gear_is_refused(geared: Run) -> None:
    put(geared.input_ptrs[2], np.array([9, 9, 9], np.int32))
    assert geared.launch() == 145013


def test_malformed_dims_raise_what_pyacl_raises(geared: Run) -> None:
    def choose(dims: object) -> int:
        code: int = acl.mdl.set_input_dynamic_dims(geared.model, geared.inputs, 2, dims)
        return code

    for wrong in (
        None,
        {},
        {"dimCount": 3, "dims": (1, 2, 2)},
        {"dimCount": 1, "dims": [np.int64(1)]},
        {"dimCount": 4, "dims": [1, 2, 2]},
        {"dimCount": np.int64(3), "dims": [1, 2, 2]},
        {"dims": [1, 2, 2]},
    ):
        with pytest.raises(TypeError):
            choose(wrong)
    with pytest.raises(RuntimeError):
        choose({"dimCount": 3, "dims": [1, 2, 2], "name": 5})
    with pytest.raises(ValueError, match="64 bits"):
        choose({"dimCount": 1, "dims": [1 << 63]})
    assert choose({"dimCount": 0, "dims": []}) == 100000
    assert choose({"dimCount": 2, "dims": [1, 2, 2]}) == 145013
    assert choose({"dimCount": 3, "dims": [1, 2, 2, 9], "name": "any"}) == 0
    wanted = {"dimCount": 3, "dims": [1, 2, 2]}
    assert acl.mdl.set_input_dynamic_dims(geared.model, geared.inputs, 1, wanted) == 100000


# --- what execution refuses ---


def test_short_buffers_are_refused_to_the_byte(static: Run) -> None:
    static.feed([0] * 6, [0, 0, 0])
    pointer = static.input_ptrs[0]
    ok(acl.update_data_buffer(static.input_buffers[0], pointer, 23))
    assert static.launch() == 500002
    assert "input x: buffer of 23 bytes, the gear needs 24" in acl.get_recent_err_msg()
    ok(acl.update_data_buffer(static.input_buffers[0], pointer, 24))
    assert (static.launch(), static.finish()) == (0, 0)


def test_a_buffer_size_beyond_its_allocation_fails_the_run(static: Run) -> None:
    small = ok(acl.rt.malloc(23, 0))
    ok(acl.update_data_buffer(static.input_buffers[0], small, 24))
    assert static.launch() == 0
    assert static.finish() == 507015
    assert "run 1 bytes past their allocation" in acl.get_recent_err_msg()


def test_null_and_host_pointers_are_refused(static: Run) -> None:
    host = np.zeros(6, np.int32)
    for pointer in (0, host.ctypes.data):
        ok(acl.update_data_buffer(static.input_buffers[0], pointer, 24))
        assert static.launch() == 100000


def test_a_wrong_number_of_buffers_is_refused(static: Run, geared: Run) -> None:
    extra = acl.create_data_buffer(static.input_ptrs[0], 24)
    ok(acl.mdl.add_dataset_buffer(static.inputs, extra))
    ok(acl.mdl.add_dataset_buffer(geared.outputs, extra))
    assert static.launch() == 145000
    assert geared.launch() == 100000


@pytest.mark.parametrize("offset", [0, 64])
def test_an_output_that_overlaps_an_input_is_refused(static: Run, offset: int) -> None:
    pool = ok(acl.rt.malloc(256, 0))
    ok(acl.update_data_buffer(static.input_buffers[0], pool, 24))
    ok(acl.update_data_buffer(static.output_buffers[0], pool + offset, 24))
    put(pool, np.zeros(6, np.int32))
    put(static.input_ptrs[1], np.zeros(3, np.float32))
    assert static.launch() == (100000 if offset == 0 else 0)
    assert static.finish() == 0


def test_one_model_on_two_streams_is_refused(static: Run) -> None:
    static.feed([0] * 6, [0, 0, 0])
    other = ok(acl.rt.create_stream())
    with inspect.hold(static.stream):
        assert static.launch() == 0
        code = acl.mdl.execute_async(static.model, static.inputs, static.outputs, other)
        assert code == 500002
        assert acl.mdl.unload(static.model) == 500002
    assert static.finish() == 0
    assert acl.mdl.execute_async(static.model, static.inputs, static.outputs, other) == 0


def test_execute_and_execute_async_may_not_be_mixed(static: Run) -> None:
    static.feed([1] * 6, [0, 0, 0])
    assert acl.mdl.execute(static.model, static.inputs, static.outputs) == 0
    assert static.result(6) == [1] * 6
    assert static.launch() == 500002
    assert "not support mix execute" in acl.get_recent_err_msg()


def test_models_belong_to_the_context_they_were_loaded_in(static: Run) -> None:
    ok(acl.rt.create_context(0))
    assert acl.mdl.unload(static.model) == 107004
    assert acl.mdl.execute_async(static.model, static.inputs, static.outputs, 0) == 107004


def test_unknown_handles_are_refused(static: Run) -> None:
    assert acl.mdl.execute_async(99, static.inputs, static.outputs, static.stream) == 145003
    assert acl.mdl.execute_async(static.model, 1, static.outputs, static.stream) == 100000
    assert acl.mdl.execute_async(static.model, static.inputs, static.outputs, 1) == 107003
    assert acl.mdl.add_dataset_buffer(static.inputs, 1) == (0, 100000)
    assert acl.mdl.get_dataset_buffer(static.inputs, 0) == static.input_buffers[0]
    assert acl.mdl.get_dataset_buffer(static.inputs, 2) == 0
    assert acl.mdl.get_dataset_num_buffers(static.inputs) == 2


def test_a_model_that_another_thread_unloads_meanwhile(
    static: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(model_id: int) -> LoadedModel:
        model = model_of(model_id)
        monkeypatch.undo()
        ok(acl.mdl.unload(model_id))
        return model

    monkeypatch.setattr(loading, "model_of", late)
    assert acl.mdl.unload(static.model) == 145003


# --- files that do not load ---


def test_a_missing_file_is_145002() -> None:
    assert acl.mdl.load_from_file("/nonexistent/model.om") == (0, 145002)


@pytest.mark.parametrize("content", [b"", b"RTCSIMOM", b"something else" * 100])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.om"
    path.write_bytes(content)
    assert acl.mdl.load_from_file(str(path)) == (0, 545001)
    assert "is not an .om file of the software device" in acl.get_recent_err_msg()


@pytest.mark.parametrize("change", [-1, 1])
def test_truncated_and_grown_files_are_refused(tmp_path: Path, change: int) -> None:
    path = compile_om(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    assert acl.mdl.load_from_file(str(path)) == (0, 145006)
    assert "is truncated or has a tail" in acl.get_recent_err_msg()


def test_every_flipped_byte_before_the_weights_is_found(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    om = read_om(str(path))
    content = bytearray(path.read_bytes())
    end = content.index(om.graph) + len(om.graph)
    for position in [*range(0, end, 97), end - 1]:
        content[position] ^= 1
        path.write_bytes(content)
        assert acl.mdl.load_from_file(str(path))[1] in (545001, 145006)
        content[position] ^= 1


def test_a_model_for_another_soc_is_refused(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    with fresh_process(soc_name="Ascend310B4"):
        assert acl.mdl.load_from_file(str(path)) == (0, 545001)
        text = acl.get_recent_err_msg()
        assert "compiled for Ascend310P3, the device is Ascend310B4" in text


def test_loading_needs_a_context(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    inspect.power_cycle()
    settings.configure()
    acl.init()
    assert acl.mdl.load_from_file(str(path)) == (0, 107002)


def test_the_file_may_be_moved(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    target = tmp_path / "a place" / "renamed.om"
    target.parent.mkdir()
    path.rename(target)
    run = Run(target)
    run.feed([5] * 6, [0, 0, 0])
    assert (run.launch(), run.finish()) == (0, 0)
    assert run.result(6) == [5] * 6


def test_half_precision_keeps_its_bits(tmp_path: Path) -> None:
    _check_bits(_identity(tmp_path, TensorProto.FLOAT16), 1)


def test_bfloat16_keeps_its_bits_where_the_soc_has_it(tmp_path: Path) -> None:
    with fresh_process(soc_name="Ascend910B4", memory_bytes=1 << 30):
        _check_bits(_identity(tmp_path, TensorProto.BFLOAT16, "--soc_version=Ascend910B4"), 27)


def _check_bits(run: Run, acl_type: int) -> None:
    assert acl.mdl.get_input_data_type(run.desc, 0) == acl_type
    put(run.input_ptrs[0], np.array([0x3F80, 0x0001], np.uint16))
    assert (run.launch(), run.finish()) == (0, 0)
    assert download(run.output_ptrs[0], np.uint16, 2).tolist() == [0x3F80, 0x0001]


def _identity(directory: Path, onnx_type: int, *flags: str) -> Run:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["b"])],
        "identity",
        [helper.make_tensor_value_info("a", onnx_type, [2])],
        [helper.make_tensor_value_info("b", onnx_type, [2])],
    )
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    return Run(compile_om(directory, ("--input_shape=a:2", *flags), model))
