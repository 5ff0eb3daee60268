"""Rotary frequencies: every branch of the scaling, at its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from om_models.rope import inverse_frequencies, rope_tables, scaling_divisors
from om_models.spec import RopeScaling
from tests.support.tiny import tiny_spec

LLAMA3 = RopeScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def test_unscaled_frequencies_fall_from_one_by_equal_ratios():
    frequencies = inverse_frequencies(tiny_spec(head_dim=8, rope_theta=10000.0))
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-12)


def test_linear_scaling_divides_all_alike():
    spec = tiny_spec(head_dim=4, rope_scaling=RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(inverse_frequencies(spec), [0.25, 0.0025], rtol=1e-12)


@pytest.mark.parametrize(
    ("turns", "divisor"),
    [
        (0.5, 8.0),  # turns less than once in the trained context: stretched
        (1.0, 8.0),
        (2.5, 1 / (0.5 + 0.5 / 8)),  # half way between low and high
        (4.0, 1.0),
        (100.0, 1.0),  # turns often: kept
    ],
)
def test_llama3_scaling_depends_on_the_turns_within_the_trained_context(
    turns: float, divisor: float
):
    frequency = np.array([turns * 2 * math.pi / 8192])
    np.testing.assert_allclose(scaling_divisors(LLAMA3, frequency), [divisor], rtol=1e-12)


def test_tables_hold_cos_and_sin_of_position_times_frequency():
    cos, sin = rope_tables(tiny_spec(head_dim=4, rope_theta=10000.0), 3)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos[2], [math.cos(2), math.cos(0.02)], rtol=1e-6)
    np.testing.assert_allclose(sin[2], [math.sin(2), math.sin(0.02)], rtol=1e-6)
    assert (cos[0].tolist(), sin[0].tolist()) == ([1, 1], [0, 0])
