"""float16 as the C library of ACL converts it: it saturates, and knows no infinity and no NaN.

Source: fp16_impl.cpp of the CANN runtime. Kernels of a card convert by their own rules.
"""

from __future__ import annotations

import math
import struct

MAX_HALF = 0x7BFF  # 65504
_SIGN = 0x8000
_EXPONENT_31 = 0x7C00
_INFINITY_AS_FLOAT = 65536.0


def half_to_float(bits: int) -> float:
    """The value of 16 bits. With the highest exponent they count on: infinity is 65536."""
    magnitude = bits & ~_SIGN
    if magnitude < _EXPONENT_31:
        value: float = struct.unpack("<e", struct.pack("<H", magnitude))[0]
    else:
        value = _INFINITY_AS_FLOAT * (1 + (magnitude - _EXPONENT_31) / 1024)
    return -value if bits & _SIGN else value


def float_to_half(value: float) -> int:
    """The 16 bits nearest to a float32, ties to even; beyond 65504, infinite or NaN: 65504."""
    single = _as_single(value)
    sign = _SIGN if math.copysign(1.0, single) < 0 else 0
    magnitude = abs(single)
    if not magnitude < _INFINITY_AS_FLOAT:
        return sign | MAX_HALF
    try:
        bits: int = struct.unpack("<H", struct.pack("<e", magnitude))[0]
    except OverflowError:
        return sign | MAX_HALF
    return sign | bits


def _as_single(value: float) -> float:
    """Rounds to float32; infinite beyond its range."""
    try:
        single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return single
