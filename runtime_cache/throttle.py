"""How often something may be told that strangers can make happen. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Period:
    begun_s: float
    num_told: int = 0
    num_left_out: int = 0


class Throttle:
    """Lets a number of each kind through in a period, and counts the rest."""

    def __init__(self, max_told: int, period_s: float) -> None:
        self._max_told = max_told
        self._period_s = period_s
        self._periods: dict[str, _Period] = {}

    def take(self, kind: str, now_s: float) -> int | None:
        """None if this one is to be left out; else how many were, of its kind, before it."""
        period = self._periods.get(kind)
        if period is not None and now_s - period.begun_s < self._period_s:
            if period.num_told >= self._max_told:
                period.num_left_out += 1
                return None
            period.num_told += 1
            return 0
        self._periods[kind] = _Period(now_s, num_told=1)
        return 0 if period is None else period.num_left_out
