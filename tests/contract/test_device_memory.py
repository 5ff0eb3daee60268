"""What the driver relies on in `acl.rt`'s memory calls; the same on software device and card."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from runtime_cache.device.acl_api import CopyKind
from runtime_cache.device.acl_device import AclDevice
from tests.support.devices import DEVICES, opened

H2D, D2H, D2D = (int(kind) for kind in CopyKind)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[AclDevice]:
    with opened(request.param) as device:
        yield device


@pytest.fixture
def block(device: AclDevice) -> Iterator[int]:
    """1 KiB of device memory."""
    ptr = device.malloc(1024)
    yield ptr
    device.free(ptr)


def download(device: AclDevice, ptr: int, num_bytes: int) -> bytes:
    host = device.malloc_host(num_bytes)
    device.copy_to_host(host.ptr, ptr, num_bytes)
    device.synchronize(10_000)
    content = host.view.tobytes()
    device.free_host(host)
    return content


def test_allocations_start_on_64_bytes_and_do_not_overlap(device: AclDevice) -> None:
    first, second = device.malloc(100), device.malloc(100)
    assert (first % 64, second % 64) == (0, 0)
    assert abs(first - second) >= 160  # ALIGN_UP(100, 32) + 32
    device.free(first)
    device.free(second)


def test_pinned_memory_is_aligned_and_writable(device: AclDevice) -> None:
    host = device.malloc_host(100)
    assert host.ptr % 64 == 0
    host.view[:] = 7
    assert host.array(4, (2, 3), np.uint8).tolist() == [[7, 7, 7], [7, 7, 7]]
    device.free_host(host)


@pytest.mark.parametrize("size", [0])
def test_an_empty_allocation_is_refused(device: AclDevice, size: int) -> None:
    assert device.acl.rt.malloc(size, 0) == (0, 100000)
    assert device.acl.rt.malloc_host(size) == (0, 100000)


def test_an_exhausted_device_says_207001(device: AclDevice) -> None:
    memory = device.memory_info()
    assert memory is not None
    assert device.acl.rt.malloc(2 * memory.total_bytes, 0) == (0, 207001)


def test_freeing_null_is_refused(device: AclDevice) -> None:
    assert device.acl.rt.free(0) == 100000


def test_free_memory_follows_allocations(device: AclDevice) -> None:
    before = device.memory_info()
    assert before is not None
    ptr = device.malloc(8 << 20)
    during = device.memory_info()
    assert during is not None
    assert during.total_bytes == before.total_bytes
    assert before.free_bytes - during.free_bytes >= 8 << 20
    device.free(ptr)
    assert device.memory_info() == before


def test_asking_for_free_memory_changes_nothing(device: AclDevice, block: int) -> None:
    """So that a daemon may ask again and again, whatever is queued."""
    host = device.malloc_host(512)  # on a board, out of the same memory
    before = device.memory_info()
    host.view[:] = 5
    device.copy_to_device(block, host.ptr, 512)
    during = {device.memory_info() for _ in range(200)}
    device.copy_on_device(block + 512, block, 512)
    device.synchronize(10_000)
    assert during == {before}
    assert device.memory_info() == before
    assert download(device, block + 512, 512) == bytes([5] * 512)
    device.free_host(host)


def test_memset_takes_effect_at_once(device: AclDevice, block: int) -> None:
    device.fill_zero(block, 1024)
    assert download(device, block, 1024) == bytes(1024)


def test_copies_take_effect_in_stream_order(device: AclDevice, block: int) -> None:
    """Up, sideways, over it again, down: one synchronise at the end."""
    host, result = device.malloc_host(256), device.malloc_host(128)
    host.view[:128], host.view[128:] = 1, 2
    device.copy_to_device(block, host.ptr, 256)
    device.copy_on_device(block + 512, block, 128)
    device.copy_on_device(block + 512, block + 128, 64)
    device.copy_to_host(result.ptr, block + 512, 128)
    device.synchronize(10_000)
    assert result.view.tobytes() == bytes([2] * 64 + [1] * 64)
    device.free_host(host)
    device.free_host(result)


def test_a_copy_touches_only_its_own_bytes(device: AclDevice, block: int) -> None:
    device.fill_zero(block, 1024)
    host = device.malloc_host(64)
    host.view[:] = 9
    device.copy_to_device(block + 64, host.ptr, 60)
    device.synchronize(10_000)
    assert download(device, block, 256) == bytes(64) + bytes([9] * 60) + bytes(132)
    device.free_host(host)


@pytest.mark.parametrize(("room", "count"), [(64, 0), (64, 65)])
def test_a_copy_of_nothing_or_beyond_its_room_is_refused(
    device: AclDevice, block: int, room: int, count: int
) -> None:
    rt = device.acl.rt
    assert rt.memcpy(block, room, block + 512, count, D2D) == 107000
    assert rt.memcpy_async(block, room, block + 512, count, D2D, device.stream) == 107000


def test_null_pointers_are_refused(device: AclDevice, block: int) -> None:
    rt = device.acl.rt
    assert rt.memcpy_async(0, 64, block, 64, D2D, device.stream) == 100000
    assert rt.memcpy_async(block, 64, 0, 64, D2D, device.stream) == 100000


def test_numpy_integers_are_no_pointers(device: AclDevice, block: int) -> None:
    with pytest.raises(TypeError, match="args parse failed"):
        device.acl.rt.free(np.int64(block))


def test_arguments_are_positional(device: AclDevice) -> None:
    with pytest.raises(TypeError):
        device.acl.rt.malloc(size=64, policy=0)  # type: ignore[call-arg]
