"""Codes for bad values: null pointers, handles unknown or of another kind, out of range."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from tests.support.aclsim import ok
from tests.support.pyacl import REAL, RealFunction, plain_args, simulated

pytestmark = pytest.mark.usefixtures("fresh_device")

INVALID, PARAM, CONTEXT, STREAM = 100000, 107000, 107002, 107003
NO_FILE, NO_MODEL = 145002, 145003
SIMULATED = simulated()
UNKNOWN = 12345
NO_ID = 0xFFFFFFFF


CODES: list[tuple[str, tuple[Any, ...], Any]] = [
    # devices and contexts
    ("rt.set_device", (1,), 107001),
    ("rt.set_device", (-1,), 107001),
    ("rt.reset_device", (1,), 107001),
    ("rt.reset_device_force", (1,), 107001),
    ("rt.query_device_status", (1,), (0xFFFF, 107001)),
    ("rt.get_primary_ctx_state", (1,), (0, 0, 107001)),
    ("rt.device_can_access_peer", (0, 0), (0, INVALID)),
    ("rt.device_can_access_peer", (0, 1), (0, 107001)),
    ("rt.create_context", (1,), (0, 107001)),
    ("rt.set_context", (0,), INVALID),
    ("rt.set_context", (UNKNOWN,), CONTEXT),
    ("rt.destroy_context", (0,), INVALID),
    ("rt.destroy_context", (UNKNOWN,), CONTEXT),
    # streams
    ("rt.create_stream_with_config", (0, 64), (0, PARAM)),
    ("rt.create_stream_with_config", (-1, 0), (0, PARAM)),
    ("rt.destroy_stream", (0,), INVALID),
    ("rt.destroy_stream", (UNKNOWN,), STREAM),
    ("rt.destroy_stream_force", (0,), INVALID),
    ("rt.destroy_stream_force", (UNKNOWN,), STREAM),
    ("rt.stream_query", (UNKNOWN,), (0xFFFF, STREAM)),
    ("rt.stream_abort", (UNKNOWN,), STREAM),
    ("rt.stream_get_id", (UNKNOWN,), (0, STREAM)),
    ("rt.set_stream_failure_mode", (UNKNOWN, 0), STREAM),
    ("rt.set_stream_failure_mode", (0, 2), PARAM),
    ("rt.synchronize_stream", (UNKNOWN,), STREAM),
    ("rt.synchronize_stream_with_timeout", (0, -2), PARAM),
    ("rt.synchronize_device_with_timeout", (-2,), PARAM),
    # events
    ("rt.create_event_with_flag", (0,), (0, PARAM)),
    ("rt.create_event_with_flag", (4,), (0, PARAM)),
    ("rt.create_event_ex_with_flag", (128,), (0, PARAM)),
    ("rt.destroy_event", (0,), INVALID),
    ("rt.destroy_event", (UNKNOWN,), PARAM),
    ("rt.record_event", (0, 0), INVALID),
    ("rt.record_event", (UNKNOWN, 0), PARAM),
    ("rt.reset_event", (0, 0), INVALID),
    ("rt.stream_wait_event", (0, 0), INVALID),
    ("rt.stream_wait_event", (UNKNOWN, 0), STREAM),
    ("rt.query_event", (0,), (0, INVALID)),
    ("rt.query_event", (UNKNOWN,), (0, PARAM)),
    ("rt.query_event_status", (0,), (0, INVALID)),
    ("rt.query_event_wait_status", (0,), (0, INVALID)),
    ("rt.synchronize_event", (0,), INVALID),
    ("rt.synchronize_event_with_timeout", (UNKNOWN, -2), PARAM),
    ("rt.event_elapsed_time", (0, 0), (0.0, INVALID)),
    ("rt.event_get_timestamp", (0,), (0, INVALID)),
    ("rt.get_event_id", (UNKNOWN,), (0, PARAM)),
    # memory
    ("rt.malloc", (0, 0), (0, INVALID)),
    ("rt.malloc_align32", (0, 0), (0, INVALID)),
    ("rt.malloc_cached", (0, 0), (0, INVALID)),
    ("rt.malloc_with_cfg", (0, 0, {}), (0, INVALID)),
    ("rt.malloc", (1 << 50, 0), (0, 207001)),
    ("rt.malloc_host", (0,), (0, INVALID)),
    ("rt.malloc_host_with_cfg", (0, {}), (0, INVALID)),
    ("rt.free", (0,), INVALID),
    ("rt.free", (UNKNOWN,), PARAM),
    ("rt.free_host", (0,), INVALID),
    ("rt.free_host", (UNKNOWN,), PARAM),
    ("rt.memset", (0, 1, 0, 1), INVALID),
    ("rt.memset", (UNKNOWN, 1, 0, 0), PARAM),
    ("rt.memset", (UNKNOWN, 1, 0, 2), PARAM),
    ("rt.memset_async", (0, 1, 0, 1, 0), INVALID),
    ("rt.memcpy", (0, 1, UNKNOWN, 1, 0), INVALID),
    ("rt.memcpy", (UNKNOWN, 1, 0, 1, 0), INVALID),
    ("rt.memcpy", (UNKNOWN, 1, UNKNOWN, 1, -1), INVALID),
    ("rt.memcpy", (UNKNOWN, 1, UNKNOWN, 1, 6), INVALID),
    ("rt.memcpy", (UNKNOWN, 1, UNKNOWN, 0, 0), PARAM),
    ("rt.memcpy", (UNKNOWN, 1, UNKNOWN, 2, 0), PARAM),
    ("rt.memcpy", (UNKNOWN, 1, UNKNOWN, 1, 0), 0),  # one and the same place
    ("rt.memcpy_async", (0, 1, UNKNOWN, 1, 0, 0), INVALID),
    ("rt.memcpy_async", (UNKNOWN, 1, UNKNOWN, 1, 0, UNKNOWN), STREAM),
    ("rt.memcpy_async", (UNKNOWN, 1, UNKNOWN + 8, 1, 0, 0), 207000),
    ("rt.memcpy2d", (UNKNOWN, 8, UNKNOWN, 8, 0, 1, 1), INVALID),
    ("rt.memcpy2d", (UNKNOWN, 8, UNKNOWN, 8, 8, 0, 1), INVALID),
    ("rt.memcpy2d", (UNKNOWN, 8, UNKNOWN, 7, 8, 1, 1), INVALID),
    ("rt.memcpy2d", (UNKNOWN, 8, UNKNOWN, 8, 8, 1, 3), INVALID),
    ("rt.memcpy2d_async", (UNKNOWN, 7, UNKNOWN, 8, 8, 1, 1, 0), INVALID),
    ("rt.mem_flush", (0, 1), INVALID),
    ("rt.mem_flush", (UNKNOWN, 1), PARAM),
    ("rt.mem_invalidate", (UNKNOWN, 0), INVALID),
    ("rt.pointer_get_attributes", (0,), ({}, INVALID)),
    # callbacks
    ("rt.subscribe_report", (1, UNKNOWN), STREAM),
    ("rt.unsubscribe_report", (1, 0), 107012),
    ("rt.launch_callback", (print, None, 2, 0), INVALID),
    ("rt.launch_callback", (print, None, -1, 0), INVALID),
    ("rt.launch_callback", (print, None, 0, 0), 107015),
    ("rt.launch_callback", (print, None, 0, UNKNOWN), STREAM),
    ("rt.process_report", (0,), INVALID),
    ("rt.process_report", (-2,), INVALID),
    ("rt.process_report", (1,), 107012),
    ("rt.get_error_code_from_exception_info", (UNKNOWN,), NO_ID),
    ("rt.get_task_id_from_exception_info", (0,), NO_ID),
    ("rt.get_stream_id_from_exception_info", (UNKNOWN,), NO_ID),
    ("rt.get_thread_id_from_exception_info", (UNKNOWN,), NO_ID),
    ("rt.get_device_id_from_exception_info", (UNKNOWN,), NO_ID),
    # options
    ("rt.set_sys_param_opt", (3, 0), INVALID),
    ("rt.set_sys_param_opt", (0, 2), INVALID),
    ("rt.ctx_set_sys_param_opt", (-1, 0), INVALID),
    ("rt.peek_at_last_error", (1,), INVALID),
    ("rt.get_last_error", (-1,), INVALID),
    # acl
    ("get_cann_attribute", (3,), (0, INVALID)),
    ("get_cann_attribute", (-1,), (0, INVALID)),
    ("update_data_buffer", (0, 1, 1), INVALID),
    ("get_data_buffer_addr", (UNKNOWN,), 0),
    ("get_data_buffer_size", (UNKNOWN,), 0),
    ("get_data_buffer_size_v2", (UNKNOWN,), 0),
    ("destroy_data_buffer", (0,), INVALID),
    ("create_tensor_desc", (0, [1] * 129, 2), 0),
    ("get_tensor_desc_type", (0,), -1),
    ("get_tensor_desc_format", (0,), -1),
    ("get_tensor_desc_size", (0,), 0),
    ("get_tensor_desc_element_count", (0,), 0),
    ("get_tensor_desc_num_dims", (0,), 0),
    ("get_tensor_desc_dim", (0, 0), -1),
    ("get_tensor_desc_dim_v2", (0, 0), (0, INVALID)),
    ("get_tensor_desc_name", (0,), ""),
    ("get_tensor_desc_address", (0,), 0),
    ("destroy_tensor_desc", (0,), None),
    ("set_tensor_desc_name", (0, "x"), None),
    ("set_tensor_shape", (0, [1]), INVALID),
    ("set_tensor_format", (0, 2), INVALID),
    ("set_tensor_shape_range", (0, [[1, 2]]), INVALID),
    ("set_tensor_place_ment", (0, 0), INVALID),
    ("set_tensor_const", (0, 1, 1), INVALID),
    ("data_type_size", (-1,), 0),
    ("data_type_size", (13,), 0),
    # models: loading
    ("mdl.load_from_mem", (0, 0), (0, INVALID)),
    ("mdl.load_from_mem_with_mem", (0, 0, 0, 0, 0, 0), (0, INVALID)),
    ("mdl.load_from_file", ("none.om",), (0, NO_FILE)),
    ("mdl.load_from_file_with_mem", ("none.om", 0, 0, 0, 0), (0, NO_FILE)),
    ("mdl.query_size", ("none.om",), (0, 0, NO_FILE)),
    ("mdl.query_size_from_mem", (0, 0), (0, 0, INVALID)),
    ("mdl.load_with_config", (UNKNOWN,), (0, INVALID)),
    ("mdl.set_config_opt", (UNKNOWN, 0, 1), INVALID),
    ("mdl.destroy_config_handle", (UNKNOWN,), INVALID),
    ("mdl.unload", (UNKNOWN,), NO_MODEL),
    # models: description
    ("mdl.get_desc", (0, 1), INVALID),
    ("mdl.get_desc_from_file", (0, "none.om"), INVALID),
    ("mdl.get_desc_from_mem", (0, 0, 0), INVALID),
    ("mdl.destroy_desc", (UNKNOWN,), INVALID),
    ("mdl.get_num_inputs", (UNKNOWN,), 0),
    ("mdl.get_num_outputs", (UNKNOWN,), 0),
    ("mdl.get_input_size_by_index", (UNKNOWN, 0), 0),
    ("mdl.get_output_size_by_index", (UNKNOWN, 0), 0),
    ("mdl.get_input_name_by_index", (UNKNOWN, 0), ""),
    ("mdl.get_output_name_by_index", (UNKNOWN, 0), ""),
    ("mdl.get_input_index_by_name", (UNKNOWN, "x"), (0, INVALID)),
    ("mdl.get_output_index_by_name", (UNKNOWN, "x"), (0, INVALID)),
    ("mdl.get_input_data_type", (UNKNOWN, 0), -1),
    ("mdl.get_output_data_type", (UNKNOWN, 0), -1),
    ("mdl.get_input_format", (UNKNOWN, 0), -1),
    ("mdl.get_output_format", (UNKNOWN, 0), -1),
    ("mdl.get_input_dims", (UNKNOWN, 0), ({}, INVALID)),
    ("mdl.get_input_dims_v2", (UNKNOWN, 0), ({}, INVALID)),
    ("mdl.get_input_dims_range", (UNKNOWN, 0), ({"rangeCount": 0, "range": []}, INVALID)),
    ("mdl.get_output_dims", (UNKNOWN, 0), ({}, INVALID)),
    ("mdl.get_cur_output_dims", (UNKNOWN, 0), ({}, INVALID)),
    ("mdl.get_dynamic_batch", (UNKNOWN,), ({}, INVALID)),
    ("mdl.get_dynamic_hw", (UNKNOWN, 0), ({}, INVALID)),
    ("mdl.get_input_dynamic_gear_count", (UNKNOWN, -1), (0, INVALID)),
    ("mdl.get_input_dynamic_dims", (UNKNOWN, -1, 1), (None, INVALID)),
    ("mdl.get_tensor_real_name", (UNKNOWN, "x"), None),
    # models: data and execution
    ("mdl.add_dataset_buffer", (UNKNOWN, 0), (0, INVALID)),
    ("mdl.get_dataset_buffer", (UNKNOWN, 0), 0),
    ("mdl.get_dataset_num_buffers", (UNKNOWN,), 0),
    ("mdl.set_dataset_tensor_desc", (UNKNOWN, 0, 0), (0, INVALID)),
    ("mdl.get_dataset_tensor_desc", (UNKNOWN, 0), 0),
    ("mdl.destroy_dataset", (UNKNOWN,), INVALID),
    ("mdl.set_dynamic_batch_size", (UNKNOWN, 0, 0, 1), NO_MODEL),
    ("mdl.set_dynamic_hw_size", (UNKNOWN, 0, 0, 1, 1), NO_MODEL),
    ("mdl.set_input_dynamic_dims", (UNKNOWN, 0, 0, {"dimCount": 1, "dims": [1]}), NO_MODEL),
    ("mdl.execute", (UNKNOWN, 0, 0), NO_MODEL),
    ("mdl.execute_async", (UNKNOWN, 0, 0, 0), NO_MODEL),
    ("mdl.execute_v2", (UNKNOWN, 0, 0, 0, 0), INVALID),
    ("mdl.set_exec_config_opt", (UNKNOWN, 0, 1), INVALID),
    ("mdl.destroy_exec_config_handle", (UNKNOWN,), INVALID),
    # util
    ("util.ptr_to_bytes", (0, 1), b""),
    ("util.stop_thread", (UNKNOWN,), 3),
]


def named(name: str) -> Any:
    """A function of `acl` by its name below it."""
    part, _, function = name.rpartition(".")
    return getattr(getattr(acl, part) if part else acl, function)


@pytest.mark.parametrize(("name", "args", "wanted"), CODES, ids=str)
def test_a_bad_value_gives_its_code(name: str, args: tuple[Any, ...], wanted: Any) -> None:
    result = named(name)(*args)
    if isinstance(wanted, tuple) and wanted[0] == {}:
        assert result[-1] == wanted[-1]
        assert isinstance(result[0], dict)
    else:
        assert result == wanted


@pytest.mark.parametrize(("name", "args", "wanted"), CODES, ids=str)
def test_every_failure_leaves_a_sentence_that_names_the_function(
    name: str, args: tuple[Any, ...], wanted: Any
) -> None:
    assert acl.get_recent_err_msg() is None
    named(name)(*args)
    sentence = acl.get_recent_err_msg()
    if (wanted == 0 and name == "rt.memcpy") or name == "data_type_size":
        assert sentence is None  # no failure
    else:
        assert sentence is not None
        assert sentence.startswith(f"acl.{name}: ")


HANDLES = {
    *("context", "stream", "event", "desc", "dataset", "buffer", "handle", "model_id", "info"),
    *("model_ptr", "model_path"),
}


def is_modelled(function: RealFunction) -> bool:
    """Whether the software device has more of it than the convention."""
    with suppress(NotImplementedError):
        SIMULATED[function.name](*plain_args(function))
        return "not modelled" not in (acl.get_recent_err_msg() or "")
    return False


@pytest.mark.parametrize("name", [name for name in REAL if HANDLES & set(REAL[name].args)])
def test_no_function_that_takes_a_handle_is_left_out(name: str) -> None:
    is_there = any(name == f"acl.{case}" for case, *_ in CODES)
    assert is_there or not is_modelled(REAL[name])


def test_a_handle_of_another_kind_is_refused_everywhere() -> None:
    event, stream = ok(acl.rt.create_event()), ok(acl.rt.create_stream())
    desc = acl.create_tensor_desc(0, [1], 2)
    assert acl.rt.synchronize_stream(event) == STREAM
    assert acl.rt.query_event_status(stream) == (0, PARAM)
    assert acl.get_data_buffer_addr(desc) == 0
    assert acl.get_tensor_desc_type(event) == -1


def test_a_destroyed_handle_is_refused() -> None:
    desc, event = acl.create_tensor_desc(0, [1], 2), ok(acl.rt.create_event())
    acl.destroy_tensor_desc(desc)
    ok(acl.rt.destroy_event(event))
    assert acl.get_tensor_desc_type(desc) == -1
    assert acl.rt.query_event(event) == (0, PARAM)
    acl.destroy_tensor_desc(desc)
    assert "is no live tensor description" in inspect.report().misuses[-1]


OF_A_CONTEXT: list[tuple[str, tuple[Any, ...]]] = [
    ("rt.get_device", ()),
    ("rt.get_context", ()),
    ("rt.create_stream", ()),
    ("rt.create_event", ()),
    ("rt.stream_query", (0,)),
    ("rt.synchronize_stream", (0,)),
    ("rt.synchronize_device", ()),
    ("rt.malloc", (64, 0)),
    ("rt.malloc_host", (64,)),
    ("rt.memcpy", (64, 64, 128, 64, 0)),
    ("rt.memset", (64, 64, 0, 64)),
    ("rt.get_mem_info", (0,)),
    ("rt.subscribe_report", (1, 0)),
    ("rt.launch_callback", (print, None, 0, 0)),
    ("rt.ctx_set_sys_param_opt", (0, 0)),
]


@pytest.mark.parametrize(("name", "args"), OF_A_CONTEXT, ids=str)
def test_a_thread_without_a_context_gets_107002(name: str, args: tuple[Any, ...]) -> None:
    ok(acl.rt.reset_device(0))
    result = named(name)(*args)
    assert (result[-1] if isinstance(result, tuple) else result) == CONTEXT
