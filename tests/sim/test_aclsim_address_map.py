"""Address bookkeeping against a plain model, for any order of allocations and frees."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_cache.aclsim.address_map import AddressMap, Allocation
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.memory import DeviceMemory, HostMemory

CODE = 107000
# A step is (size to allocate) or, as a negative number, which live allocation to free.
STEPS = st.lists(st.integers(-8, 5000).filter(bool), max_size=40)


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    device = DeviceMemory(0, 16 << 20, HostMemory())
    yield device
    device.free_all()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_any_order_of_mallocs_and_frees_keeps_the_books(
    memory: DeviceMemory, steps: list[int]
) -> None:
    live: dict[int, int] = {}
    for step in steps:
        if step > 0:
            live[memory.malloc(step, 0)] = step
        elif live:
            base = sorted(live)[-step % len(live)]
            del live[base]
            memory.free(base)
        _check_books(memory, live)
    for base in live:
        memory.free(base)
    assert (memory.used_bytes, len(memory.live)) == (0, 0)


def _check_books(memory: DeviceMemory, live: dict[int, int]) -> None:
    assert {a.base: a.size_bytes for a in memory.live} == live
    pages = [-(-(-(-size // 32) * 32 + 32) // 4096) * 4096 for size in live.values()]
    assert memory.used_bytes == sum(pages)
    for base, size in live.items():
        memory.check(base, size, CODE)
        memory.check(base + size - 1, 1, CODE)
        for address, count in ((base, size + 1), (base - 1, 1), (base + size, 1)):
            with pytest.raises(AclFailure):
                memory.check(address, count, CODE)


@pytest.mark.parametrize(
    ("address", "count", "sentence"),
    [
        (99, 1, "use of test address 0x63, which was never allocated"),
        (100, 11, "11 bytes at 0x64 run 1 bytes past their allocation"),
        (110, 1, "use of test address 0x6e, which was never allocated"),
        (205, 1, "use after free of test address 0xcd"),
    ],
)
def test_unusable_ranges_are_explained(address: int, count: int, sentence: str) -> None:
    addresses = AddressMap("test")
    addresses.add(Allocation(200, 10, 10, 0))
    addresses.add(Allocation(100, 10, 10, 0))
    addresses.remove(200)
    assert addresses.find(100, 10, CODE).base == 100
    with pytest.raises(AclFailure) as caught:
        addresses.find(address, count, CODE)
    assert (caught.value.code, caught.value.sentence) == (CODE, sentence)


def test_memory_freed_during_a_task_becomes_poison_and_is_reported(memory: DeviceMemory) -> None:
    base = memory.malloc(64, 0)
    memory.fill(base, 1, 64, CODE)
    with pytest.raises(AclFailure, match="was freed while a task used it"):
        _free_while_pinned(memory, base)
    assert len(memory.live) == 0


def _free_while_pinned(memory: DeviceMemory, base: int) -> None:
    with memory.pinned([(base, 64)], CODE) as hosts:
        assert ctypes.string_at(hosts[0], 4) == b"\1\1\1\1"
        memory.free(base)
        assert ctypes.string_at(hosts[0], 4) == bytes.fromhex("fe7ffe7f")


def test_pins_hold_nothing_if_one_range_is_bad(memory: DeviceMemory) -> None:
    base = memory.malloc(64, 0)
    with pytest.raises(AclFailure), memory.pinned([(base, 64), (base, 65)], CODE):
        pytest.fail("the task must not run")
    assert [allocation.pins for allocation in memory.live] == [0]
