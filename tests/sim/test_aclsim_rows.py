"""Copies of rows, and the rarer calls for memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from tests.support.aclsim import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    MIB,
    device_bytes,
    ok,
    pinned,
    upload,
)

pytestmark = pytest.mark.usefixtures("fresh_device")

ROWS, WIDTH, HOST_PITCH, DEVICE_PITCH = 3, 4, 8, 16


def block() -> int:
    """Device memory of three rows, all 0xEE."""
    return upload(np.full(ROWS * DEVICE_PITCH, 0xEE, np.uint8))


def send(device: int, host: int, stream: int) -> int:
    """Queues three rows to the device; returns the code."""
    code: int = acl.rt.memcpy2d_async(
        device, DEVICE_PITCH, host, HOST_PITCH, WIDTH, ROWS, HOST_TO_DEVICE, stream
    )
    return code


def fetch(host: int, device: int, stream: int) -> int:
    """Queues three rows to the host; returns the code."""
    code: int = acl.rt.memcpy2d_async(
        host, HOST_PITCH, device, DEVICE_PITCH, WIDTH, ROWS, DEVICE_TO_HOST, stream
    )
    return code


WANTED = b"".join(bytes(range(row * 8, row * 8 + 4)) + b"\xee" * 12 for row in range(ROWS))


def test_rows_are_copied_at_their_turn_from_pinned_memory(stream: int) -> None:
    host, view = pinned(ROWS * HOST_PITCH)
    view[:] = 0xAA
    device = block()
    with inspect.hold(stream):
        ok(send(device, host, stream))
        view[:] = np.arange(ROWS * HOST_PITCH)
        assert device_bytes(device, 1) == b"\xee"
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(device, ROWS * DEVICE_PITCH) == WANTED


def test_rows_of_pageable_memory_are_taken_at_the_call(stream: int) -> None:
    host = np.arange(ROWS * HOST_PITCH, dtype=np.uint8)
    device = block()
    with inspect.hold(stream):
        ok(send(device, host.ctypes.data, stream))
        host[:] = 0xAA
    ok(acl.rt.synchronize_stream(stream))
    assert device_bytes(device, ROWS * DEVICE_PITCH) == WANTED


@pytest.mark.parametrize("is_pinned", [True, False])
def test_rows_come_back(stream: int, is_pinned: bool) -> None:
    ptr, view = pinned(ROWS * HOST_PITCH)
    pageable = np.zeros(ROWS * HOST_PITCH, np.uint8)
    host, seen = (ptr, view) if is_pinned else (pageable.ctypes.data, pageable)
    seen[:] = 0xEE
    ok(fetch(host, upload(np.arange(ROWS * DEVICE_PITCH, dtype=np.uint8)), stream))
    if is_pinned:
        ok(acl.rt.synchronize_stream(stream))
    assert seen.reshape(ROWS, HOST_PITCH)[:, :WIDTH].tolist() == [
        list(range(row * 16, row * 16 + 4)) for row in range(ROWS)
    ]
    assert (seen.reshape(ROWS, HOST_PITCH)[:, WIDTH:] == 0xEE).all()


def test_rows_that_leave_their_block_surface_at_synchronise(stream: int) -> None:
    host, _ = pinned(ROWS * HOST_PITCH)
    device = ok(acl.rt.malloc(2 * DEVICE_PITCH + WIDTH - 1, 0))
    ok(send(device, host, stream))
    assert acl.rt.synchronize_stream(stream) == 507013
    exact = ok(acl.rt.malloc(2 * DEVICE_PITCH + WIDTH, 0))
    ok(send(exact, host, stream))
    assert acl.rt.synchronize_stream(stream) == 0


def test_rows_at_the_limits(stream: int) -> None:
    host, _ = pinned(64)
    device = block()

    def queue(width: int, height: int, kind: int) -> int:
        code: int = acl.rt.memcpy2d_async(device, 16, host, 16, width, height, kind, stream)
        return code

    assert queue(16, 1, HOST_TO_DEVICE) == 0
    assert queue(17, 1, HOST_TO_DEVICE) == 100000
    assert queue(16, 0, HOST_TO_DEVICE) == 100000
    assert queue(16, 1, DEVICE_TO_DEVICE) == 100000
    assert queue(16, 1, DEVICE_TO_HOST) == 107000  # the addresses say otherwise
    assert queue(16, 5_242_881, HOST_TO_DEVICE) == 107000
    ok(acl.rt.synchronize_stream(stream))


def test_the_height_of_an_asynchronous_copy_is_limited(stream: int) -> None:
    device = ok(acl.rt.malloc(1, 0))
    host, _ = pinned(1)
    args = (device, 1, host, 1, 1, 5_242_880, HOST_TO_DEVICE, stream)
    with inspect.hold(stream):
        assert acl.rt.memcpy2d_async(*args) == 0
        ok(acl.rt.stream_abort(stream))


def test_a_block_that_leaves_its_allocation_is_not_copied_at_all() -> None:
    host = np.arange(ROWS * HOST_PITCH, dtype=np.uint8)
    device = upload(np.full(DEVICE_PITCH + WIDTH, 0xEE, np.uint8))
    args = (device, DEVICE_PITCH, host.ctypes.data, HOST_PITCH, WIDTH, ROWS, HOST_TO_DEVICE)
    assert acl.rt.memcpy2d(*args) == 107000
    assert device_bytes(device, 4) == b"\xee" * 4


def test_a_pitch_that_leads_out_of_pinned_memory_is_found(stream: int) -> None:
    host, _ = pinned(64)
    device = block()
    for pitch in (64, 1 << 40, 1 << 63):
        args = (device, 16, host, pitch, 16, 2, HOST_TO_DEVICE)
        assert acl.rt.memcpy2d(*args) == 107000
        ok(acl.rt.memcpy2d_async(*args, stream))
        assert acl.rt.synchronize_stream(stream) == 507013


@pytest.mark.parametrize("count", [1 << 60, 1 << 63, (1 << 64) - 1])
def test_more_than_the_host_can_hold_on_its_way_has_a_code(stream: int, count: int) -> None:
    host, device = np.zeros(64, np.uint8), block()
    args = (device, count, host.ctypes.data, count, HOST_TO_DEVICE, stream)
    assert acl.rt.memcpy_async(*args) == 207001
    assert "the host has no room" in acl.get_recent_err_msg()


def test_rows_are_counted_one_by_one(stream: int) -> None:
    host, _ = pinned(ROWS * HOST_PITCH)
    device = block()
    inspect.clear()
    ok(send(device, host, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert inspect.report().copies == {"H2D": ROWS}
    assert inspect.report().copied_bytes == {"H2D": ROWS * WIDTH}


# --- allocation with a configuration ---

CONFIG = {"numAttrs": 1, "attrs": [{"attr": 1, "value": {"moduleId": 3}}]}


@pytest.mark.parametrize("cfg", [{}, CONFIG, {"numAttrs": 0, "attrs": []}], ids=str)
def test_memory_with_a_configuration_is_plain_memory(cfg: dict[str, Any]) -> None:
    assert ok(acl.rt.malloc_with_cfg(64, 0, cfg)) > 0
    assert ok(acl.rt.malloc_host_with_cfg(64, cfg)) > 0
    report = inspect.report()
    assert (report.device_allocations, report.host_allocations) == (1, 1)


@pytest.mark.parametrize(
    ("cfg", "error"),
    [
        (None, TypeError),
        ([], TypeError),
        ({"numAttrs": 1}, TypeError),
        ({"numAttrs": 1, "attrs": ()}, TypeError),
        ({"numAttrs": 1, "attrs": [3]}, TypeError),
        ({"numAttrs": 1, "attrs": [{"attr": 1}]}, TypeError),
        ({"numAttrs": 2, "attrs": CONFIG["attrs"]}, KeyError),
        ({"numAttrs": 1, "attrs": [{"attr": 1, "value": {}}]}, KeyError),
    ],
    ids=str,
)
def test_a_wrong_configuration_raises(cfg: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        acl.rt.malloc_with_cfg(64, 0, cfg)
    with pytest.raises(error):
        acl.rt.malloc_host_with_cfg(64, cfg)
    assert inspect.report().num_alive == 0


def test_cached_memory_costs_what_memory_costs() -> None:
    before = ok(acl.rt.get_mem_info(0))[0]
    cached = ok(acl.rt.malloc_cached(64, 0))
    assert before - ok(acl.rt.get_mem_info(0))[0] == 4096
    ok(acl.rt.free(cached))
    assert ok(acl.rt.get_mem_info(0))[0] == before


def test_caches_are_flushed_and_emptied_inside_an_allocation_only() -> None:
    device = ok(acl.rt.malloc_cached(128, 0))
    for function in (acl.rt.mem_flush, acl.rt.mem_invalidate):
        assert function(device, 128) == 0
        assert function(device + 64, 64) == 0
        assert function(device, 129) == 107000
    ok(acl.rt.free(device))
    assert acl.rt.mem_flush(device, 128) == 107000


# --- where memory lies ---


def place(ptr: int) -> tuple[int, int]:
    """(type, page size) of a pointer."""
    found = ok(acl.rt.pointer_get_attributes(ptr))
    assert set(found) == {"location", "page_size", "rsv"}
    assert (found["location"]["id"], found["rsv"]) == (0, [0, 0, 0, 0])
    return found["location"]["type"], found["page_size"]


def test_pointers_lie_on_the_host_on_the_device_or_nowhere_known() -> None:
    device, (host, _) = ok(acl.rt.malloc(64, 0)), pinned(64)
    own = np.zeros(64, np.uint8)
    assert place(device) == place(device + 63) == (1, 4096)
    assert place(host) == (0, 0)
    assert place(own.ctypes.data) == (2, 0)
    ok(acl.rt.free(device))
    assert place(device) == (2, 0)


@pytest.mark.parametrize(
    ("size", "policy", "page_bytes"),
    [
        (MIB, 0, 4096),
        (MIB + 1, 0, 2 * MIB),
        (MIB + 1, 2, 4096),
        (64, 1, 2 * MIB),
        (64, 6, 1 << 30),
    ],
)
def test_the_page_size_follows_the_policy(size: int, policy: int, page_bytes: int) -> None:
    assert place(ok(acl.rt.malloc(size, policy))) == (1, page_bytes)


def test_huge_pages_fall_back_to_normal_ones() -> None:
    free_bytes = ok(acl.rt.get_mem_info(0))[0]
    with inspect.occupy(free_bytes - 2 * MIB):
        assert place(ok(acl.rt.malloc(MIB + 1, 0))) == (1, 2 * MIB)
        acl.rt.reset_device_force(0)
    ok(acl.rt.set_device(0))
    free_bytes = ok(acl.rt.get_mem_info(0))[0]
    with inspect.occupy(free_bytes - 2 * MIB + 4096):
        assert place(ok(acl.rt.malloc(MIB + 1, 0))) == (1, 4096)
        assert acl.rt.malloc(MIB + 1, 0) == (0, 207001)


def test_the_attributes_of_a_failure_belong_to_the_caller() -> None:
    first, _ = acl.rt.pointer_get_attributes(0)
    first["location"]["id"] = 5
    assert acl.rt.pointer_get_attributes(0)[0]["location"] == {"id": 0, "type": 0}
