"""Lists that pyACL takes as `O` arguments: real lists of real ints, nothing that looks alike."""

from __future__ import annotations

from typing import Any

_INT_64 = range(-(1 << 63), 1 << 63)


def int_list(value: Any, position: int) -> list[int]:
    """A list of ints that fit 64 bits.

    Args:
        position: of the argument, from 1, for the sentence.

    Raises:
        TypeError: no list (a tuple, a numpy array), or an element that is no Python int.
        ValueError: an element beyond 64 bits.
    """
    if not isinstance(value, list):
        raise TypeError(f"argument {position} is not list")
    for item in value:
        if not isinstance(item, int):
            raise TypeError(f"argument {position} has an element that is no int: {item!r}")
        if item not in _INT_64:
            raise ValueError(f"argument {position} has an element beyond 64 bits: {item}")
    return value


def pair_list(value: Any, position: int) -> list[tuple[int, int]]:
    """A list of [least, most] lists; errors as `int_list`, ValueError for another length."""
    if not isinstance(value, list):
        raise TypeError(f"argument {position} is not list")
    pairs = []
    for item in value:
        pair = int_list(item, position)
        if len(pair) != 2:
            raise ValueError(f"argument {position} has an element that is no pair: {item}")
        pairs.append((pair[0], pair[1]))
    return pairs
