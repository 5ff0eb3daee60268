"""Device memory: addresses, accounting, poison, bounds, and what is found out about misuse."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.failure import AclFailure
from tests.support.aclsim import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    MIB,
    POISON,
    device_bytes,
    download,
    fresh_process,
    ok,
    pinned,
    put,
    upload,
)

CAPACITY = 1024 * MIB
INITIAL = 300 * MIB
DDR, HBM = 0, 1


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_process(memory_bytes=CAPACITY, initial_use_bytes=INITIAL):
        yield


def free_bytes() -> int:
    free, _ = ok(acl.rt.get_mem_info(DDR))
    return int(free)


def test_another_process_can_take_memory() -> None:
    before = free_bytes()
    with inspect.occupy(before - 2 * MIB):
        assert free_bytes() == 2 * MIB
        assert acl.rt.malloc(4 * MIB, 0) == (0, 207001)
        with pytest.raises(AclFailure, match="out of device memory"), inspect.occupy(2 * MIB + 1):
            pass
        assert free_bytes() == 2 * MIB
    assert free_bytes() == before
    assert inspect.report().device_bytes == 0


def test_memory_of_another_device_is_another_matter() -> None:
    with fresh_process(device_count=2):
        before = free_bytes()
        with inspect.occupy(MIB, device_id=1):
            assert free_bytes() == before


# --- addresses ---


def test_device_addresses_cannot_be_mapped_in_a_process() -> None:
    ptr = ok(acl.rt.malloc(4096, 0))
    assert 1 << 57 <= ptr < 1 << 63
    assert ptr % 64 == 0
    highest = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "[vsyscall]" not in line:
            highest = max(highest, int(line.split("-")[1].split()[0], 16))
    assert highest < ptr


def test_a_device_address_is_not_readable_from_the_host() -> None:
    ptr = ok(acl.rt.malloc(64, 0))
    assert acl.util.ptr_to_bytes(ptr, 64) == b""
    assert f"{ptr:#x} is not readable from the host" in acl.get_recent_err_msg()


def test_addresses_are_never_reused() -> None:
    seen = set()
    for _ in range(20):
        ptr = ok(acl.rt.malloc(100, 0))
        ok(acl.rt.free(ptr))
        seen.add(ptr)
    assert len(seen) == 20


# --- accounting ---


@pytest.mark.parametrize(
    ("size", "policy", "cost"),
    [
        (1, 0, 4096),
        (4096 - 32, 0, 4096),
        (4096 - 31, 0, 8192),
        (MIB, 0, MIB + 4096),
        (MIB + 1, 0, 2 * MIB),
        (2 * MIB - 32, 0, 2 * MIB),
        (2 * MIB - 31, 0, 4 * MIB),
        (1, 1, 2 * MIB),
        (4 * MIB, 2, 4 * MIB + 4096),
        (MIB + 1, 3, 2 * MIB),
        (2 * MIB - 1, 77, 2 * MIB + 4096),
        (2 * MIB, 77, 4 * MIB),
    ],
)
def test_malloc_costs_whole_pages_and_free_gives_them_back(
    size: int, policy: int, cost: int
) -> None:
    before = free_bytes()
    ptr = ok(acl.rt.malloc(size, policy))
    assert before - free_bytes() == cost
    ok(acl.rt.free(ptr))
    assert free_bytes() == before


def test_malloc_align32_has_no_tail() -> None:
    before = free_bytes()
    ok(acl.rt.malloc_align32(2 * MIB, 0))
    assert before - free_bytes() == 2 * MIB


def test_giant_pages_have_no_tail() -> None:
    with fresh_process(memory_bytes=2048 * MIB, initial_use_bytes=0):
        ok(acl.rt.malloc(1024 * MIB, 6))
        assert free_bytes() == 1024 * MIB


def test_first_use_of_a_device_takes_the_system_packages() -> None:
    assert ok(acl.rt.get_mem_info(DDR)) == (CAPACITY - INITIAL, CAPACITY)


def test_another_kind_of_memory_reads_as_zero_without_an_error() -> None:
    assert acl.rt.get_mem_info(HBM) == (0, 0, 0)
    with fresh_process(soc_name="Ascend910B4", memory_bytes=CAPACITY, initial_use_bytes=INITIAL):
        assert acl.rt.get_mem_info(HBM) == (CAPACITY - INITIAL, CAPACITY, 0)
        assert acl.rt.get_mem_info(DDR) == (0, 0, 0)


def test_exhaustion_is_207001_and_takes_nothing() -> None:
    largest = CAPACITY - INITIAL - 32
    ptr = ok(acl.rt.malloc(largest, 0))
    assert free_bytes() == 0
    assert acl.rt.malloc(1, 0) == (0, 207001)
    assert "out of device memory: 4096 bytes wanted, 0 of" in acl.get_recent_err_msg()
    ok(acl.rt.free(ptr))
    assert acl.rt.malloc(largest + 1, 0) == (0, 207001)
    assert free_bytes() == CAPACITY - INITIAL


def test_huge_first_falls_back_to_normal_pages_and_huge_only_does_not() -> None:
    ok(acl.rt.malloc(CAPACITY - INITIAL - 2 * MIB, 2))
    left = free_bytes()
    assert left < 2 * MIB
    assert acl.rt.malloc(MIB + 1, 1) == (0, 207001)
    ok(acl.rt.malloc(MIB + 1, 0))
    assert left - free_bytes() == MIB + 4096


# --- poison and commitment ---


@pytest.mark.parametrize("size", [8, 4096, MIB, 20 * MIB])
def test_fresh_memory_is_nan_in_every_type_and_no_index(size: int) -> None:
    ptr = ok(acl.rt.malloc(size, 0))
    assert device_bytes(ptr, size) == POISON * (size // 4)
    assert np.isnan(download(ptr, np.float32, 2)).all()
    assert np.isnan(download(ptr, np.float16, 4)).all()
    assert download(ptr, np.int32, 1)[0] == 0x7FFE7FFE


def test_writing_a_page_leaves_its_neighbours_poisoned() -> None:
    ptr = ok(acl.rt.malloc(40 * MIB, 0))
    put(ptr + 16 * MIB, np.zeros(64, np.uint8))
    assert device_bytes(ptr + 16 * MIB - 64, 64) == POISON * 16
    assert device_bytes(ptr + 16 * MIB, 64) == bytes(64)
    assert device_bytes(ptr + 16 * MIB + 64, 64) == POISON * 16


def test_four_gibibytes_cost_nothing_until_written() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    with fresh_process(memory_bytes=5 << 30):
        ok(acl.rt.malloc(64, 0))
        before = resident_bytes()
        ptr = ok(acl.rt.malloc(4 << 30, 0))
        ok(acl.rt.memset((ptr + (2 << 30)), MIB, 0, MIB))
        assert resident_bytes() - before < 16 * MIB
        assert device_bytes(ptr + (4 << 30) - 4, 4) == POISON


# --- misuse ---


def test_copy_past_the_end_is_refused_at_the_first_byte() -> None:
    ptr = upload(np.zeros(100, np.uint8))
    target = np.zeros(101, np.uint8)
    args = (target.ctypes.data, 101, ptr)
    assert acl.rt.memcpy(*args, 100, DEVICE_TO_HOST) == 0
    assert acl.rt.memcpy(*args, 101, DEVICE_TO_HOST) == 107000
    text = acl.get_recent_err_msg()
    assert text == f"acl.rt.memcpy: 101 bytes at {ptr:#x} run 1 bytes past their allocation"


def test_neighbouring_allocations_do_not_hide_an_overrun() -> None:
    first = ok(acl.rt.malloc(4096, 0))
    ok(acl.rt.malloc(4096, 0))
    assert acl.rt.memset(first, 8192, 0, 4097) == 107000


@pytest.mark.parametrize("size", [64, MIB])
def test_use_after_free_and_double_free_are_found(size: int) -> None:
    ptr = ok(acl.rt.malloc(size, 0))
    ok(acl.rt.free(ptr))
    assert acl.rt.memset(ptr, size, 0, size) == 107000
    assert acl.get_recent_err_msg() == f"acl.rt.memset: use after free of device address {ptr:#x}"
    assert acl.rt.free(ptr) == 107000
    assert acl.get_recent_err_msg() == f"acl.rt.free: double free of device address {ptr:#x}"


def test_free_of_anything_else_is_refused() -> None:
    ptr = ok(acl.rt.malloc(64, 0))
    assert acl.rt.free(0) == 100000
    assert acl.rt.free(ptr + 8) == 107000
    assert acl.rt.free(1 << 61) == 107000
    assert acl.rt.free(12345) == 107000
    assert acl.rt.free(ptr) == 0


def test_the_kind_must_agree_with_the_addresses() -> None:
    device = upload(np.zeros(64, np.uint8))
    host = np.zeros(64, np.uint8).ctypes.data
    assert acl.rt.memcpy(device, 64, host, 64, DEVICE_TO_HOST) == 107000
    assert "kind 2 says D2H" in acl.get_recent_err_msg()
    assert acl.rt.memcpy(host, 64, device, 64, HOST_TO_DEVICE) == 107000
    assert acl.rt.memcpy(device, 64, host, 64, DEVICE_TO_DEVICE) == 107000


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dst": 0}, 100000),
        ({"src": 0}, 100000),
        ({"kind": 6}, 100000),
        ({"kind": -1}, 100000),
        ({"count": 0}, 107000),
        ({"count": 65}, 107000),
        ({"kind": 4}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_memcpy_arguments(change: dict[str, int], code: int) -> None:
    host = np.zeros(128, np.uint8)
    args = {"dst": upload(host), "dst_max": 64, "src": host.ctypes.data, "count": 64, "kind": 1}
    args |= change
    assert acl.rt.memcpy(*args.values()) == code


def test_memset_checks_its_arguments_and_host_memory_must_be_pinned() -> None:
    ptr, _ = pinned(64)
    pageable = np.zeros(64, np.uint8)
    assert acl.rt.memset(0, 64, 0, 64) == 100000
    assert acl.rt.memset(ptr, 64, 0, 0) == 107000
    assert acl.rt.memset(ptr, 63, 0, 64) == 107000
    assert acl.rt.memset(pageable.ctypes.data, 64, 0, 64) == 107000
    assert acl.rt.memset(ptr, 64, 7, 64) == 0
    assert acl.util.ptr_to_bytes(ptr, 64) == b"\x07" * 64


def test_memcpy2d_copies_rows() -> None:
    ptr = upload(np.zeros(32, np.uint8))
    rows = np.arange(24, dtype=np.uint8)
    assert acl.rt.memcpy2d(ptr, 16, rows.ctypes.data, 12, 4, 2, HOST_TO_DEVICE) == 0
    expected = bytes([0, 1, 2, 3, *[0] * 12, 12, 13, 14, 15, *[0] * 12])
    assert device_bytes(ptr, 32) == expected
    assert acl.rt.memcpy2d(ptr, 16, rows.ctypes.data, 12, 13, 1, HOST_TO_DEVICE) == 100000
    assert acl.rt.memcpy2d(ptr, 16, ptr, 16, 4, 1, DEVICE_TO_DEVICE) == 100000


# --- pinned host memory ---


def test_pinned_memory_is_aligned_poisoned_and_tracked() -> None:
    ptr, view = pinned(100)
    assert ptr % 64 == 0
    assert view.tobytes() == POISON * 25
    assert inspect.report().host_allocations == 1
    assert acl.rt.malloc_host(0) == (0, 100000)
    assert acl.rt.free_host(ptr + 64) == 107000
    assert acl.rt.free_host(ptr) == 0
    assert acl.rt.free_host(ptr) == 107000
    assert "double free of pinned host address" in acl.get_recent_err_msg()


def test_freed_pinned_memory_is_garbage_and_its_use_is_found() -> None:
    ptr, view = pinned(64)
    view[:] = 1
    device = upload(np.zeros(64, np.uint8))
    ok(acl.rt.free_host(ptr))
    assert ctypes.string_at(ptr, 8) == POISON * 2
    assert acl.rt.memcpy(device, 64, ptr, 64, HOST_TO_DEVICE) == 107000
    assert "use after free of pinned host address" in acl.get_recent_err_msg()


def test_the_programs_own_memory_is_none_of_acls_business() -> None:
    own = np.arange(64, dtype=np.uint8)
    device = upload(own)
    ok(acl.rt.memcpy(device, 32, own.ctypes.data + 32, 32, HOST_TO_DEVICE))
    assert device_bytes(device, 64) == bytes([*range(32, 64)] * 2)


def test_the_page_behind_pinned_memory_is_nobodys() -> None:
    ptr, _ = pinned(4096)
    device = ok(acl.rt.malloc(64, 0))
    assert acl.rt.memcpy(device, 64, ptr + 4096, 64, HOST_TO_DEVICE) == 107000
    assert "never allocated" in acl.get_recent_err_msg()


def test_overrun_of_pinned_memory_is_found() -> None:
    ptr, _ = pinned(64)
    device = ok(acl.rt.malloc(128, 0))
    assert acl.rt.memcpy(device, 128, ptr, 65, HOST_TO_DEVICE) == 107000


def test_copies_are_counted_by_direction() -> None:
    inspect.clear()
    a, b = upload(np.zeros(64, np.uint8)), upload(np.zeros(64, np.uint8))
    ok(acl.rt.memcpy(a, 64, b, 48, DEVICE_TO_DEVICE))
    download(a, np.uint8, 16)
    assert inspect.report().copies == {"H2D": 2, "D2D": 1, "D2H": 1}
    assert inspect.report().copied_bytes == {"H2D": 128, "D2D": 48, "D2H": 16}


def test_on_the_device_itself_host_and_device_addresses_are_alike() -> None:
    with fresh_process(run_mode=0):
        assert acl.rt.get_run_mode() == (0, 0)
        ptr, view = pinned(64)
        view[:] = 9
        device = ok(acl.rt.malloc(64, 0))
        assert acl.rt.memcpy(device, 64, ptr, 64, DEVICE_TO_DEVICE) == 0
        view[:] = 0
        assert acl.rt.memcpy(ptr, 64, device, 64, DEVICE_TO_DEVICE) == 0
        assert view.tolist() == [9] * 64


def test_a_copy_whose_ends_overlap_is_refused() -> None:
    ptr = ok(acl.rt.malloc(256, 0))
    ok(acl.rt.memset(ptr, 256, 1, 256))
    for offset in (1, 63, -63):
        source = ptr + 128
        assert acl.rt.memcpy(source + offset, 64, source, 64, DEVICE_TO_DEVICE) == 107000
        assert "overlaps itself" in acl.get_recent_err_msg()
    for offset in (64, -64):
        assert acl.rt.memcpy(source + offset, 64, source, 64, DEVICE_TO_DEVICE) == 0
