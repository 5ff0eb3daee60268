"""Tensor descriptions, sizes of types, float16 numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim.process import this_process

pytestmark = pytest.mark.usefixtures("fresh_device")

FLOAT, FLOAT16, ND, NCHW = 0, 1, 2, 0


def test_a_description_gives_back_what_it_was_made_of() -> None:
    desc = acl.create_tensor_desc(FLOAT16, [2, 3, 4], ND)
    assert acl.get_tensor_desc_type(desc) == FLOAT16
    assert acl.get_tensor_desc_format(desc) == ND
    assert acl.get_tensor_desc_num_dims(desc) == 3
    assert [acl.get_tensor_desc_dim(desc, index) for index in range(4)] == [2, 3, 4, -1]
    assert acl.get_tensor_desc_dim_v2(desc, 2) == (4, 0)
    assert acl.get_tensor_desc_dim_v2(desc, 3) == (0, 100000)
    assert acl.get_tensor_desc_element_count(desc) == 24
    assert acl.get_tensor_desc_size(desc) == 48
    assert acl.get_tensor_desc_address(desc) == 0
    assert acl.destroy_tensor_desc(desc) is None
    assert acl.get_tensor_desc_type(desc) == -1


@pytest.mark.parametrize(
    ("dims", "num_dims", "elements", "size"),
    [
        ([], 0, 1, 4),
        ([5], 1, 5, 20),
        ([2, 0], 2, 0, 0),
        ([2, -1], 2, 0, 0),
        ([-2], 0xFFFFFFFFFFFFFFFE, 0, 0),
        ([1] * 128, 128, 1, 4),
    ],
    ids=["scalar", "vector", "empty", "unknown axis", "unknown rank", "128 dims"],
)
def test_counts(dims: list[int], num_dims: int, elements: int, size: int) -> None:
    desc = acl.create_tensor_desc(FLOAT, dims, ND)
    assert acl.get_tensor_desc_num_dims(desc) == num_dims
    assert acl.get_tensor_desc_element_count(desc) == elements
    assert acl.get_tensor_desc_size(desc) == size


def test_names() -> None:
    desc = acl.create_tensor_desc(FLOAT, [1], ND)
    assert acl.get_tensor_desc_name(desc) == ""
    assert acl.set_tensor_desc_name(desc, "ids") is None
    assert acl.get_tensor_desc_name(desc) == "ids"


def test_shape_and_format_in_memory_leave_those_created_alone() -> None:
    desc = acl.create_tensor_desc(FLOAT, [2, 3], ND)
    assert acl.set_tensor_shape(desc, [6]) == 0
    assert acl.set_tensor_shape(desc, [1] * 129) == 100000
    assert acl.set_tensor_format(desc, NCHW) == 0
    assert acl.get_tensor_desc_num_dims(desc) == 2
    assert acl.get_tensor_desc_format(desc) == ND
    kept = this_process().tensor_descs.get(desc)
    assert (kept.storage_dims, kept.storage_format) == ((6,), NCHW)


def test_ranges_places_and_constants() -> None:
    desc = acl.create_tensor_desc(FLOAT, [-1, 3], ND)
    assert acl.set_tensor_shape_range(desc, [[1, 8], [3, 3]]) == 0
    assert [acl.set_tensor_place_ment(desc, kind) for kind in (-1, 0, 2, 3)] == [
        100000,
        0,
        0,
        100000,
    ]
    assert acl.set_tensor_const(desc, 64, 0) == 100000
    assert acl.set_tensor_const(desc, 64, 8) == 0
    kept = this_process().tensor_descs.get(desc)
    assert (kept.ranges, kept.mem_type, kept.constant) == (((1, 8), (3, 3)), 2, (64, 8))


def test_a_copy_is_a_description_of_its_own() -> None:
    desc = acl.create_tensor_desc(FLOAT, [2], ND)
    copied = this_process().tensor_descs.get(desc).copied()
    acl.set_tensor_desc_name(desc, "x")
    assert (copied.dims, copied.name) == ((2,), "")


LISTS = [
    ((1, 2), TypeError),
    (np.array([1, 2]), TypeError),
    ([1.0], TypeError),
    ([None], TypeError),
]
LISTS += [([np.int64(1)], TypeError), ([1 << 63], ValueError), ("12", TypeError), (None, TypeError)]


@pytest.mark.parametrize(("dims", "error"), LISTS, ids=str)
def test_dims_are_real_lists_of_real_ints(dims: Any, error: type[Exception]) -> None:
    desc = acl.create_tensor_desc(FLOAT, [1], ND)
    with pytest.raises(error):
        acl.create_tensor_desc(FLOAT, dims, ND)
    with pytest.raises(error):
        acl.set_tensor_shape(desc, dims)
    with pytest.raises(error):
        acl.set_tensor_shape_range(desc, [dims])
    assert acl.get_tensor_desc_num_dims(desc) == 1


@pytest.mark.parametrize("ranges", [[[1]], [[1, 2, 3]], [[]]], ids=str)
def test_ranges_are_pairs(ranges: Any) -> None:
    desc = acl.create_tensor_desc(FLOAT, [1], ND)
    with pytest.raises(ValueError, match="no pair"):
        acl.set_tensor_shape_range(desc, ranges)


@pytest.mark.parametrize("ranges", [((1, 2),), [(1, 2)], None], ids=str)
def test_ranges_are_lists_of_lists(ranges: Any) -> None:
    desc = acl.create_tensor_desc(FLOAT, [1], ND)
    with pytest.raises(TypeError, match="not list"):
        acl.set_tensor_shape_range(desc, ranges)


def test_sizes_of_types() -> None:
    sizes = {0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1}
    sizes |= {13: 0, 16: 8, 17: 16, 27: 2, 29: 1, 30: 1, 33: 4, 34: 1, 99: 0, -1: 0}
    assert {dtype: acl.data_type_size(dtype) for dtype in sizes} == sizes


# --- float16 ---


def test_every_finite_float16_goes_there_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))]
    values = [acl.float16_to_float(int(each)) for each in finite]
    assert values == finite.view(np.float16).astype(np.float64).tolist()
    assert [acl.float_to_float16(value) for value in values] == finite.tolist()


def test_rounding_is_to_the_nearest_and_ties_to_even() -> None:
    random = np.random.default_rng(1)
    values = np.concatenate(
        [
            random.normal(0, 1, 500),
            random.normal(0, 1e-6, 500),
            2.0**-25 * np.array([0.5, 1, 1.5, 2, 3]),  # around the least number
            1 + 2.0**-11 * np.arange(1, 8),  # halfway between two
        ]
    ).astype(np.float32)
    wanted = values.astype(np.float16).view(np.uint16).tolist()
    assert [acl.float_to_float16(float(value)) for value in values] == wanted


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (65504.0, 0x7BFF),
        (65519.99, 0x7BFF),
        (65520.0, 0x7BFF),
        (65536.0, 0x7BFF),
        (1e39, 0x7BFF),
        (float("inf"), 0x7BFF),
        (float("nan"), 0x7BFF),
        (-65520.0, 0xFBFF),
        (float("-inf"), 0xFBFF),
        (-0.0, 0x8000),
    ],
    ids=str,
)
def test_conversion_saturates(value: float, bits: int) -> None:
    assert acl.float_to_float16(value) == bits


@pytest.mark.parametrize(
    ("bits", "value"),
    [(0x7C00, 65536.0), (0xFC00, -65536.0), (0x7E00, 98304.0), (0x7FFF, 131008.0), (0x8000, 0.0)],
)
def test_the_highest_exponent_counts_on(bits: int, value: float) -> None:
    assert acl.float16_to_float(bits) == value
