"""Sub-ranges of the staging buffers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.device.staging import pack


def test_offsets_and_total() -> None:
    packing = pack([4, 100, 64])
    assert packing.offsets == (0, 64, 256)
    assert packing.num_bytes == 256 + 64


def test_one_range_takes_its_own_size() -> None:
    assert pack([100]).num_bytes == 100


@given(pairs=st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999)), min_size=1))
def test_a_gear_with_the_models_largest_sizes_stays_inside(pairs: list[tuple[int, int]]) -> None:
    largest = [size + extra for size, extra in pairs]
    whole, gear = pack(largest), pack([size for size, _ in pairs])
    assert all(offset % 64 == 0 for offset in gear.offsets)
    for offset, size in zip(gear.offsets, largest, strict=True):
        assert offset + size <= whole.num_bytes
