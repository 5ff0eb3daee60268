"""Rotary frequencies and their cos/sin tables. Pure.

Source: Hugging Face `modeling_rope_utils.py`, the functions for `default`, `linear` and `llama3`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from om_models.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> npt.NDArray[np.float64]:
    """Radians per position of each rotary pair, scaling applied [head_dim / 2]."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies: npt.NDArray[np.float64] = spec.rope_theta**-exponents
    if spec.rope_scaling is None:
        return frequencies
    return frequencies / scaling_divisors(spec.rope_scaling, frequencies)


def scaling_divisors(
    scaling: RopeScaling, frequencies: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """What each unscaled frequency is divided by, 1..factor [head_dim / 2]."""
    if scaling.kind == "linear":
        return np.full_like(frequencies, scaling.factor)
    # How often a pair turns within the original context decides: rarely → stretched, often → kept.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1 / (kept_share + (1 - kept_share) / scaling.factor)
    return divisors


def rope_tables(
    spec: ModelSpec, num_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin of position × frequency, float32 [num_positions, head_dim / 2] each."""
    # float32 like transformers: at large positions the rounding of the angle itself is visible.
    frequencies = inverse_frequencies(spec).astype(np.float32)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)
