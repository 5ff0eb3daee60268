"""The calling convention: parse codes, return shapes, init and finalize, per-thread error text."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect, settings
from runtime_cache.aclsim.calling import surface
from tests.support.aclsim import ok

pytestmark = pytest.mark.usefixtures("fresh_device")


def test_arguments_are_positional_only() -> None:
    with pytest.raises(TypeError):
        acl.rt.malloc(size=64, policy=0)


@pytest.mark.parametrize(
    "args",
    [(), (64,), (64, 0, 0), (np.int64(64), 0), (64.0, 0), ("64", 0), (None, 0), (64, 1 << 31)],
    ids=str,
)
def test_wrong_arguments_raise_type_error_and_do_nothing(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"^acl\.rt\.malloc args parse failed$"):
        acl.rt.malloc(*args)
    assert inspect.report().device_allocations == 0


def test_int_codes_take_numpy_integers() -> None:
    assert ok(acl.rt.malloc(64, np.int64(0))) > 0
    assert acl.rt.set_device(np.int32(0)) == 0


def test_stream_none_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="synchronize_stream args parse failed"):
        acl.rt.synchronize_stream(None)


@pytest.mark.parametrize(("given", "seen"), [(-1, (1 << 64) - 1), ((1 << 64) + 3, 3), (7, 7)])
def test_k_wraps_modulo_2_to_the_64(given: int, seen: int) -> None:
    @surface("acl.test")("k", plain=None)
    def echo(value: int) -> int:
        return value

    assert echo(given) == seen


@pytest.mark.parametrize(
    ("arg_format", "good", "bad"),
    [
        ("I", -1, 1.5),
        ("H", 65535, "1"),
        ("h", -32768, 32768),
        ("s", "text", "a\0b"),
        ("s", "", b"bytes"),
        ("f", 1, "1.0"),
        ("d", 1.5, None),
        ("l", -(1 << 63), 1 << 63),
    ],
)
def test_parse_codes_accept_and_refuse(arg_format: str, good: Any, bad: Any) -> None:
    @surface("acl.test")(arg_format)
    def take(value: Any) -> None:
        del value

    assert take(good) == 0
    with pytest.raises(TypeError, match="take args parse failed"):
        take(bad)


def test_unsigned_int_wraps_modulo_2_to_the_32() -> None:
    @surface("acl.test")("I", failed=(0,))
    def echo(value: int) -> int:
        return value

    assert echo(-1) == ((1 << 32) - 1, 0)


def test_return_shapes() -> None:
    assert acl.rt.set_device(0) == 0
    assert acl.rt.get_device() == (0, 0)
    assert acl.rt.get_mem_info(99) == (0, 0, 0)
    assert acl.mdl.get_dataset_num_buffers(acl.mdl.create_dataset()) == 0
    assert acl.rt.malloc(0, 0) == (0, 100000)
    assert acl.mdl.query_size("/nonexistent.om") == (0, 0, 145002)
    assert acl.mdl.get_input_dims(5, 0) == ({}, 100000)


def test_failed_dicts_are_not_shared_between_calls() -> None:
    first, _ = acl.mdl.get_input_dims(5, 0)
    first["spoiled"] = True
    assert acl.mdl.get_input_dims(5, 0) == ({}, 100000)


def test_init_and_finalize_count_as_documented() -> None:
    assert acl.init() == 100002
    assert acl.finalize() == 0
    assert acl.finalize() == 100037
    assert acl.rt.set_device(0) == 100001
    assert acl.init() == 0


def test_soc_name_needs_init_and_follows_the_settings() -> None:
    assert acl.get_soc_name() == "Ascend310P3"
    acl.finalize()
    assert acl.get_soc_name() is None
    settings.configure(soc_name="Ascend910B4")
    acl.init()
    assert acl.get_soc_name() == "Ascend910B4"


def test_error_text_is_newest_first_and_cleared_on_read() -> None:
    acl.rt.malloc(0, 0)
    acl.rt.free(0)
    assert acl.get_recent_err_msg() == (
        "acl.rt.free: free of a null pointer\nacl.rt.malloc: size is 0"
    )
    assert acl.get_recent_err_msg() is None


def test_error_text_is_per_thread() -> None:
    acl.rt.malloc(0, 0)
    texts: list[str | None] = []
    thread = threading.Thread(target=lambda: texts.append(acl.get_recent_err_msg()))
    thread.start()
    thread.join()
    assert texts == [None]
    assert acl.get_recent_err_msg() == "acl.rt.malloc: size is 0"


def test_calls_and_misuses_are_counted_and_benign_codes_are_no_misuse() -> None:
    inspect.clear()
    acl.init()
    acl.rt.malloc(0, 0)
    assert inspect.report().calls == {"acl.init": 1, "acl.rt.malloc": 1}
    assert inspect.report().misuses == ("acl.rt.malloc -> 100000: size is 0",)


def test_data_buffers_hold_pointers_only() -> None:
    buffer = acl.create_data_buffer(4096, (1 << 32) + 5)
    assert acl.get_data_buffer_addr(buffer) == 4096
    assert acl.get_data_buffer_size(buffer) == 5
    assert acl.get_data_buffer_size_v2(buffer) == (1 << 32) + 5
    assert acl.update_data_buffer(buffer, 8192, 16) == 0
    assert acl.get_data_buffer_addr(buffer) == 8192
    assert acl.destroy_data_buffer(buffer) == 0
    assert acl.destroy_data_buffer(buffer) == 100000


def test_util_gives_addresses_of_bytes_only() -> None:
    data = b"prefix"
    assert acl.util.ptr_to_bytes(acl.util.bytes_to_ptr(data), 6) == b"prefix"
    for wrong in (bytearray(b"x"), memoryview(b"x"), np.zeros(1)):
        with pytest.raises(ValueError, match="takes bytes"):
            acl.util.bytes_to_ptr(wrong)
