"""The compiled shapes of a bundle, and the choice of the smallest one that fits. Pure.

A gear is one (batch, chunk, past) triple the `.om` was compiled for: `batch` sequences, each fed
`chunk` tokens, each attending to `past` slots of the KV pool. Prefill gears have batch 1, decode
gears have chunk 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, order=True)
class Gear:
    """One compiled shape.

    Attributes:
        batch: sequences in the batch (B).
        chunk: tokens fed per sequence (S).
        past: past slots per sequence (P), at least 1: no dimension of a model may be 0.
    """

    batch: int
    chunk: int
    past: int
