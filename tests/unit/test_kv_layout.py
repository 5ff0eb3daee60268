"""Addresses and counts of the KV pool, and the limits they keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from om_models.manifest import KvSpec
from runtime_cache.device.kv_layout import KvLayout, sub_range_stride
from runtime_cache.errors import BundleError, ConfigError, InternalError

LAYOUT = KvLayout(
    num_slots=16, num_groups=2, layers_per_group=3, row_elements=32, dtype="float16", block_size=4
)


@pytest.mark.parametrize(
    ("num_bytes", "stride"),
    [(1, 64), (32, 64), (33, 128), (64, 128), (96, 128), (97, 192), (128, 192)],
)
def test_sub_ranges_follow_the_secondary_allocation_rule(num_bytes: int, stride: int) -> None:
    assert sub_range_stride(num_bytes) == stride


def test_sizes_of_a_pool() -> None:
    assert LAYOUT.rows_per_slot == 6
    assert LAYOUT.row_bytes == 64
    assert LAYOUT.group_token_bytes == 384
    assert LAYOUT.token_bytes == 768
    assert LAYOUT.block_bytes == 3072
    assert LAYOUT.group_bytes == 6144
    assert LAYOUT.num_blocks == 4
    assert [LAYOUT.group_offset(group) for group in (0, 1)] == [0, 6208]
    assert LAYOUT.pool_bytes == 6208 + 6144


def test_llama_2_7b_takes_512_kib_a_token() -> None:
    layout = KvLayout(4096, 1, 32, 32 * 128, "float16", 64)
    assert layout.token_bytes == 512 * 1024
    assert layout.pool_bytes == 2 * 1024**3
    assert layout.num_blocks == 64


def test_layout_of_a_manifest() -> None:
    spec = KvSpec(dtype="float16", num_slots=16, num_groups=2, layers_per_group=3, row_elements=32)
    assert KvLayout.from_spec(spec, block_size=4) == LAYOUT


def test_slots_behind_the_last_whole_block_are_not_counted() -> None:
    assert replace(LAYOUT, num_slots=15).num_blocks == 3


@pytest.mark.parametrize(
    ("group", "first_slot", "num_tokens", "offset"),
    [(0, 4, 1, 4 * 384), (0, 12, 4, 12 * 384), (1, 4, 4, 6208 + 4 * 384)],
)
def test_offset_of_a_run(group: int, first_slot: int, num_tokens: int, offset: int) -> None:
    assert LAYOUT.run_offset(group, first_slot, num_tokens) == offset


@pytest.mark.parametrize(
    ("first_slot", "num_tokens"), [(0, 1), (3, 1), (3, 2), (4, 0), (16, 1), (15, 2), (-1, 1)]
)
def test_runs_outside_the_writable_blocks_are_our_bug(first_slot: int, num_tokens: int) -> None:
    with pytest.raises(InternalError, match=r"4\.\.15 are"):
        LAYOUT.run_offset(0, first_slot, num_tokens)


def test_the_last_partial_block_is_not_for_writing() -> None:
    layout = replace(LAYOUT, num_slots=15)
    assert layout.run_offset(0, 11, 1) == 11 * 384
    with pytest.raises(InternalError, match=r"4\.\.11 are"):
        layout.run_offset(0, 12, 1)


@given(
    num_slots=st.integers(8, 200),
    num_groups=st.integers(1, 5),
    layers=st.integers(1, 4),
    row_elements=st.sampled_from([16, 32, 48]),
)
def test_groups_are_aligned_and_never_overlap(
    num_slots: int, num_groups: int, layers: int, row_elements: int
) -> None:
    layout = KvLayout(num_slots, num_groups, layers, row_elements, "float32", 4)
    ends = [0]
    for group in range(num_groups):
        start = layout.group_offset(group)
        assert start % 64 == 0
        assert start >= ends[-1] + (32 if group else 0)
        ends.append(start + layout.group_bytes)
    assert layout.pool_bytes == ends[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_elements": 31}, "62 bytes, which is not a multiple of 64"),
        ({"row_elements": 0}, "at least 1"),
        ({"num_groups": 0}, "at least 1"),
        ({"layers_per_group": 0}, "at least 1"),
        ({"dtype": "bfloat16"}, "'bfloat16'"),
    ],
)
def test_a_manifest_that_makes_no_pool(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        replace(LAYOUT, **change)


@pytest.mark.parametrize(
    ("block_size", "message"), [(0, "at least 1"), (9, "hold 1 blocks"), (17, "hold 0 blocks")]
)
def test_a_block_size_that_does_not_suit_the_pool(block_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LAYOUT, block_size=block_size)


def test_the_largest_block_size_that_suits_the_pool() -> None:
    assert replace(LAYOUT, block_size=8).num_blocks == 2
