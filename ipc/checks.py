"""Checks of a message that no field's own limits can express. Pure."""

from __future__ import annotations

import math

from msgspec import Struct


def check_finite(name: str, value: float | None) -> None:
    """Refuse NaN, which msgpack can carry and for which no range check is defined."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value}")


def check_one_of(message: Struct, *names: str) -> None:
    """Refuse a message that gives none of these fields, or several; `False` is not given."""
    values = [(name, getattr(message, name)) for name in names]
    given = [name for name, value in values if value is not None and value is not False]
    if len(given) != 1:
        listed = ", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`"
        found = " and ".join(f"`{name}`" for name in given) if given else "none"
        raise ValueError(f"exactly one of {listed} must be given, got {found}")
