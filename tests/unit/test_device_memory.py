"""The watch on free device memory: when it warns, and what it makes of not knowing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from runtime_cache.device.acl_device import MemoryInfo
from runtime_cache.device_memory import MemoryWatch, taken_bytes
from runtime_cache.errors import AclError

MIB = 1024**2
LOW = 100
REFUSED = AclError("acl.rt.get_mem_info", 507899, "internal")


async def seen(free_mib: Sequence[int | AclError | None], low_mib: int = LOW) -> list[bool]:
    """Whether memory is low after each reading."""
    readings = iter(free_mib)

    async def read() -> MemoryInfo | None:
        free = next(readings)
        if isinstance(free, AclError):
            raise free
        return None if free is None else MemoryInfo(free * MIB, 1000 * MIB)

    watch = MemoryWatch(read, low_mib * MIB)
    found = []
    for _ in free_mib:
        await watch.look()
        found.append(watch.is_low)
    return found


@pytest.mark.asyncio
async def test_it_is_low_below_the_mark_and_said_once() -> None:
    with capture_logs() as logs:
        assert await seen([101, 100, 99, 50, 99, 100]) == [False] * 2 + [True] * 3 + [False]
    assert [(entry["event"], entry["free_mib"], entry["log_level"]) for entry in logs] == [
        ("device_memory_low", 99, "warning"),
        ("device_memory_recovered", 100, "info"),
    ]


@pytest.mark.asyncio
async def test_what_is_not_known_is_no_alarm_and_no_end_of_one() -> None:
    with capture_logs() as logs:
        assert await seen([None, 99, None, 99, 100]) == [False, True, True, True, False]
    assert [entry["event"] for entry in logs] == ["device_memory_low", "device_memory_recovered"]


@pytest.mark.asyncio
async def test_a_mark_of_zero_never_warns() -> None:
    with capture_logs() as logs:
        assert await seen([0, 1], low_mib=0) == [False, False]
    assert logs == []


@pytest.mark.asyncio
async def test_a_refusal_is_said_once_and_means_not_knowing() -> None:
    with capture_logs() as logs:
        assert await seen([99, REFUSED, REFUSED, 99]) == [True] * 4
    assert [entry["event"] for entry in logs] == ["device_memory_low", "device_memory_unknown"]


@pytest.mark.asyncio
async def test_it_looks_again_and_again_until_it_is_cancelled() -> None:
    times = asyncio.Semaphore(0)

    async def read() -> MemoryInfo | None:
        times.release()
        return None

    task = asyncio.ensure_future(MemoryWatch(read, 0).run(1e-6))
    for _ in range(3):
        await times.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_was_taken_needs_both_readings() -> None:
    before, after = MemoryInfo(100, 1000), MemoryInfo(30, 1000)
    assert taken_bytes(before, after) == 70
    assert taken_bytes(None, after) is None
    assert taken_bytes(before, None) is None
