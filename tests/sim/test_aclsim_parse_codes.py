"""Parse codes against CPython itself: the same `PyArg_ParseTuple` that pyACL calls.

CANN ships for CPython 3.7 to 3.11; what later ones make of a code need not be what a card does.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime_cache.aclsim.calling import surface

# numpy for Python 3.10 warns of what later ones refuse.
pytestmark = pytest.mark.filterwarnings("ignore:In future, it will be an error for 'np.bool")

C_TYPES: dict[str, Any] = {
    "k": ctypes.c_ulong,
    "K": ctypes.c_ulonglong,
    "i": ctypes.c_int,
    "l": ctypes.c_long,
    "h": ctypes.c_short,
    "H": ctypes.c_ushort,
    "I": ctypes.c_uint,
    "s": ctypes.c_char_p,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
REFUSED = object()


def parsed_by_cpython(code: str, value: object) -> Any:
    """What C code finds in its variable, or REFUSED."""
    found = C_TYPES[code]()
    parse = ctypes.pythonapi.PyArg_ParseTuple
    try:
        is_parsed = parse(ctypes.py_object((value,)), code.encode(), ctypes.byref(found))
    except (TypeError, ValueError, OverflowError):
        return REFUSED
    assert is_parsed
    return found.value.decode() if code == "s" else found.value


def echo(code: str) -> Callable[[Any], Any]:
    """A function of the surface that gives back what its argument became."""

    def body(value: Any) -> Any:
        return value

    body.__name__ = f"echo_{code}"
    function: Callable[[Any], Any] = surface("acl.test")(code, plain=None)(body)
    return function


ECHO = {code: echo(code) for code in C_TYPES}


def parsed_here(code: str, value: object) -> Any:
    """What a function of the software device gets, or REFUSED."""
    try:
        found = ECHO[code](value)
    except TypeError:
        return REFUSED
    return ctypes.c_float(found).value if code == "f" else found


class Index:
    """An object that counts as an integer, as numpy's integers do."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


class Real:
    """An object that counts as a real number."""

    def __float__(self) -> float:
        return 1.5


EDGES = [
    sign * (1 << bits) + step
    for bits in (15, 16, 31, 32, 63, 64)
    for sign in (1, -1)
    for step in (-1, 0, 1)
]
INTS = st.one_of(st.integers(), st.sampled_from(EDGES))
VALUES = st.one_of(
    INTS,
    INTS.map(Index),
    st.booleans(),
    st.floats(),
    st.text(),
    st.binary(),
    st.none(),
    st.sampled_from([np.int64(-1), np.uint8(7), np.float32(1.5), np.float64(2), np.bool_(True)]),
    st.sampled_from([Real(), [], (), {}, object(), 1j, "1", "a\0b", "\udc80", bytearray(b"1")]),
)


def same(one: Any, other: Any) -> bool:
    """Equal, NaN included, and 0.0 unlike -0.0."""
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no CANN for this CPython")
@pytest.mark.parametrize("code", C_TYPES)
@given(value=VALUES)
@example(value=1e300)
@example(value=-0.0)
@example(value=10**400)
def test_a_value_becomes_what_cpython_makes_of_it(code: str, value: object) -> None:
    assert same(parsed_here(code, value), parsed_by_cpython(code, value))
