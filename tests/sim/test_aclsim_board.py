"""A board: one memory that host and device share, of one capacity, as strict as a card's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.atc import compiler
from runtime_cache.aclsim.atc.options import parse_options
from tests.support.aclsim import MIB, POISON, STATIC, Run, add_model, fresh_process, ok, pinned

SOC = "Ascend310B4"
CAPACITY, INITIAL = 64 * MIB, 8 * MIB


@pytest.fixture(autouse=True)
def _board() -> Iterator[None]:
    with fresh_process(soc_name=SOC, memory_bytes=CAPACITY, initial_use_bytes=INITIAL):
        yield


@pytest.fixture
def stream() -> int:
    return int(ok(acl.rt.create_stream()))


def free_bytes() -> int:
    return int(ok(acl.rt.get_mem_info(0))[0])


def view(ptr: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ptr))


def test_it_says_what_it_is() -> None:
    assert acl.get_soc_name() == SOC
    assert acl.rt.get_run_mode() == (0, 0)
    assert acl.rt.get_mem_info(0) == (CAPACITY - INITIAL, CAPACITY, 0)
    assert acl.rt.get_mem_info(1) == (0, 0, 0)  # no HBM


def test_the_program_reads_and_writes_device_memory() -> None:
    ptr = ok(acl.rt.malloc(100, 0))
    assert ptr % 64 == 0
    assert acl.util.ptr_to_bytes(ptr, 100) == POISON * 25
    view(ptr, 100)[:] = 7
    assert ctypes.string_at(ptr, 100) == acl.util.ptr_to_bytes(ptr, 100) == bytes([7] * 100)


def test_a_thread_without_a_context_reads_it_too() -> None:
    ptr = ok(acl.rt.malloc(64, 0))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(acl.util.ptr_to_bytes, ptr, 64).result() == POISON * 16
        assert pool.submit(acl.util.ptr_to_bytes, ptr, 65).result() == b""


def test_both_kinds_of_memory_come_out_of_one_capacity() -> None:
    before = free_bytes()
    device = ok(acl.rt.malloc(5000, 2))
    assert before - free_bytes() == 8192
    host = ok(acl.rt.malloc_host(5000))
    assert before - free_bytes() == 16384
    ok(acl.rt.free_host(host))
    ok(acl.rt.free(device))
    assert free_bytes() == before


@pytest.mark.parametrize(("more", "code"), [(-4096, 0), (0, 0), (1, 207001)])
def test_pinned_memory_ends_where_the_capacity_ends(more: int, code: int) -> None:
    size = CAPACITY - INITIAL + more
    assert acl.rt.malloc_host(size)[1] == code
    assert free_bytes() == (CAPACITY - INITIAL if code else max(-more, 0))


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5])
def test_every_kind_of_copy_is_accepted(kind: int) -> None:
    source, target = ok(acl.rt.malloc(64, 0)), ok(acl.rt.malloc(64, 0))
    view(source, 64)[:] = kind + 1
    assert acl.rt.memcpy(target, 64, source, 64, kind) == 0
    assert ctypes.string_at(target, 64) == bytes([kind + 1] * 64)


def test_rows_are_not_copied(stream: int) -> None:
    device = ok(acl.rt.malloc(64, 0))
    host, _ = pinned(64)
    for kind, dst, src in ((1, device, host), (2, host, device)):
        assert acl.rt.memcpy2d(dst, 16, src, 16, 8, 4, kind) == 207000
        assert acl.rt.memcpy2d_async(dst, 16, src, 16, 8, 4, kind, stream) == 207000
    assert acl.util.ptr_to_bytes(device, 64) == POISON * 16
    assert "boards have no copies of rows" in acl.get_recent_err_msg()


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_copies_to_and_from_the_programs_own_memory(kind: int, stream: int) -> None:
    ptr = ok(acl.rt.malloc(64, 0))
    own, back = np.full(64, 9, np.uint8), np.zeros(64, np.uint8)
    ok(acl.rt.memcpy_async(ptr, 64, own.ctypes.data, 64, kind, stream))
    own[:] = 0  # taken at the call
    ok(acl.rt.memcpy_async(back.ctypes.data, 64, ptr, 64, kind, stream))
    assert back.tolist() == [9] * 64  # arrived when the call returned
    ok(acl.rt.memcpy(back.ctypes.data, 32, own.ctypes.data, 32, 3))
    assert back.tolist() == [0] * 32 + [9] * 32


def test_queued_work_happens_at_its_turn(stream: int) -> None:
    ptr = ok(acl.rt.malloc(64, 0))
    host, host_view = pinned(64)
    with inspect.hold(stream):
        host_view[:] = 1
        ok(acl.rt.memcpy_async(ptr, 64, host, 64, 3, stream))
        host_view[:] = 2
        assert acl.util.ptr_to_bytes(ptr, 4) == POISON
    ok(acl.rt.synchronize_stream(stream))
    assert acl.util.ptr_to_bytes(ptr, 64) == bytes([2] * 64)


@pytest.mark.parametrize("allocate", ["malloc", "malloc_host"])
@pytest.mark.parametrize(("count", "code"), [(63, 0), (64, 0), (65, 107000)])
def test_bounds_hold_for_both_kinds_of_memory(allocate: str, count: int, code: int) -> None:
    ptr = ok(acl.rt.malloc(64, 0)) if allocate == "malloc" else ok(acl.rt.malloc_host(64))
    large = np.zeros(128, np.uint8)
    assert acl.rt.memcpy(ptr, 128, large.ctypes.data, count, 3) == code
    assert acl.rt.memcpy(large.ctypes.data, 128, ptr, count, 3) == code
    assert acl.rt.memset(ptr, 128, 0, count) == code
    assert len(acl.util.ptr_to_bytes(ptr, count)) == (0 if code else count)


def test_freed_memory_is_poison_and_refused() -> None:
    ptr, other = ok(acl.rt.malloc(64, 0)), ok(acl.rt.malloc(64, 0))
    ok(acl.rt.memset(ptr, 64, 1, 64))
    ok(acl.rt.free(ptr))
    assert ctypes.string_at(ptr, 64) == POISON * 16
    assert acl.rt.memcpy(other, 64, ptr, 64, 3) == 107000
    assert "use after free of device address" in acl.get_recent_err_msg()
    assert acl.util.ptr_to_bytes(ptr, 64) == b""
    assert acl.rt.free(ptr) == 107000
    assert "double free" in acl.get_recent_err_msg()


@pytest.mark.parametrize(
    ("allocate", "free", "what"),
    [("malloc", "free", "device"), ("malloc_host", "free_host", "pinned host")],
)
def test_the_sentence_tells_which_kind_of_memory_was_freed(
    allocate: str, free: str, what: str
) -> None:
    args = (64, 0) if allocate == "malloc" else (64,)
    ptr, live = ok(getattr(acl.rt, allocate)(*args)), ok(acl.rt.malloc(64, 0))
    ok(getattr(acl.rt, free)(ptr))
    for late in (
        lambda: acl.util.ptr_to_bytes(ptr, 4),
        lambda: acl.rt.memcpy(live, 64, ptr, 64, 3),
        lambda: acl.rt.memset(ptr, 64, 0, 64),
    ):
        assert late() in (b"", 107000)
        assert f"use after free of {what} address" in acl.get_recent_err_msg()


def test_addresses_are_not_reused() -> None:
    seen: set[int] = set()
    for _ in range(300):
        ptr = ok(acl.rt.malloc(64, 0))
        host = ok(acl.rt.malloc_host(64))
        assert not {ptr, host} & seen
        seen |= {ptr, host}
        ok(acl.rt.free(ptr))
        ok(acl.rt.free_host(host))


def test_each_kind_of_memory_has_its_own_free() -> None:
    device, host = ok(acl.rt.malloc(64, 0)), ok(acl.rt.malloc_host(64))
    assert acl.rt.free(host) == 107000
    assert acl.rt.free_host(device) == 107000
    ok(acl.rt.free(device))
    ok(acl.rt.free_host(host))
    assert inspect.report().num_alive == 0


def test_a_device_end_that_is_not_aligned_is_refused(stream: int) -> None:
    ptr = ok(acl.rt.malloc(128, 0))
    host, _ = pinned(128)
    assert acl.rt.memcpy_async(ptr + 32, 64, host, 64, 3, stream) == 107000
    assert acl.rt.memcpy_async(ptr, 64, host + 32, 64, 3, stream) == 107000
    assert acl.rt.memcpy_async(ptr + 64, 64, host + 64, 64, 3, stream) == 0


def compiled(directory: Path) -> Path:
    onnx.save_model(add_model(), directory / "model.onnx")
    flags = [f"--model={directory}/model.onnx", f"--output={directory}/model", *STATIC]
    options = ["--framework=5", f"--soc_version={SOC}", "--input_format=ND", *flags]
    return Path(compiler.compile_model(parse_options(options, compiler.tables().soc_versions)))


def test_a_model_runs_on_either_kind_of_memory(tmp_path: Path) -> None:
    run = Run(compiled(tmp_path))
    host, host_view = pinned(24)
    host_view[:] = np.array([1, 2, 3, 4, 5, 6], np.int32).view(np.uint8)
    view(run.input_ptrs[1], 12)[:] = np.array([0.5, 0, 0], np.float32).view(np.uint8)
    ok(acl.update_data_buffer(run.input_buffers[0], host, 24))
    assert (run.launch(), run.finish()) == (0, 0)
    found = np.frombuffer(acl.util.ptr_to_bytes(run.output_ptrs[0], 24), np.float32)
    assert found.tolist() == [1.5, 2, 3, 4.5, 5, 6]


def test_the_programs_own_memory_is_none_of_the_devices(tmp_path: Path) -> None:
    run = Run(compiled(tmp_path))
    own = np.zeros(6, np.int32)
    ok(acl.update_data_buffer(run.input_buffers[0], own.ctypes.data, own.nbytes))
    assert run.launch() == 100000


@pytest.mark.parametrize("allocate", ["malloc", "malloc_host"])
def test_a_model_is_loaded_from_either_kind_of_memory(tmp_path: Path, allocate: str) -> None:
    data = compiled(tmp_path).read_bytes()
    size = len(data)
    ptr = ok(acl.rt.malloc(size, 0)) if allocate == "malloc" else ok(acl.rt.malloc_host(size))
    ctypes.memmove(ptr, data, size)
    model = ok(acl.mdl.load_from_mem(ptr, size))
    ok(acl.mdl.unload(model))


def test_memory_freed_under_a_run_is_reported(tmp_path: Path) -> None:
    run = Run(compiled(tmp_path))
    run.feed([1] * 6, [0, 0, 0])
    with inspect.hold(run.stream):
        assert run.launch() == 0
        ok(acl.rt.free(run.input_ptrs[0]))
    assert run.finish() == 507015
