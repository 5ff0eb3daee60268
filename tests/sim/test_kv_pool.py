"""The pool on the software device, whose fresh memory is poisoned."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.kv_pool import KvPool
from runtime_cache.errors import AclError, InternalError
from tests.support.devices import num_leaked

LAYOUT = KvLayout(
    num_slots=12, num_groups=2, layers_per_group=1, row_elements=32, dtype="float16", block_size=4
)
NULL_BYTES = 4 * 128


def read(device: AclDevice, ptr: int, num_bytes: int) -> bytes:
    host = device.malloc_host(num_bytes)
    device.copy_to_host(host.ptr, ptr, num_bytes)
    device.synchronize(10_000)
    content = host.view.tobytes()
    device.free_host(host)
    return content


def test_the_null_block_of_each_group_is_zero_and_nothing_else(sum_device: AclDevice) -> None:
    pool = KvPool(sum_device, LAYOUT)
    for group in (0, 1):
        assert read(sum_device, pool.group_ptr(group), NULL_BYTES) == bytes(NULL_BYTES)
        rest = read(sum_device, pool.group_ptr(group) + NULL_BYTES, 2 * NULL_BYTES)
        assert np.isnan(np.frombuffer(rest, np.float16)).all()
    pool.close()


def test_the_pool_is_one_allocation(sum_device: AclDevice) -> None:
    pool = KvPool(sum_device, LAYOUT)
    report = inspect.report()
    assert (report.device_allocations, report.device_bytes) == (1, LAYOUT.pool_bytes)
    assert pool.group_ptr(1) - pool.group_ptr(0) == 12 * 128 + 64
    pool.close()
    pool.close()
    assert num_leaked() == 0


def test_runs_are_written_inside_the_blocks_only(sum_device: AclDevice) -> None:
    pool = KvPool(sum_device, LAYOUT)
    assert pool.run_ptr(1, 4, 2) == pool.group_ptr(1) + 4 * 128
    with pytest.raises(InternalError):
        pool.run_ptr(0, 3, 1)
    pool.close()


def test_a_null_block_that_cannot_be_zeroed_leaves_nothing(sum_device: AclDevice) -> None:
    faults.inject("acl.rt.memset", code=107000, call=2)
    with pytest.raises(AclError, match=r"acl\.rt\.memset failed: 107000"):
        KvPool(sum_device, LAYOUT)
    assert num_leaked() == 0
