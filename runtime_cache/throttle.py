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
        #: Kind → the period that its first one has begun.
        self._periods: dict[str, _Period] = {}

    def take(self, kind: str, now_s: float) -> bool:
        """Whether this one may be told."""
        period = self._periods.get(kind)
        if period is None or self._is_over(period, now_s):
            left_out = 0 if period is None else period.num_left_out
            period = self._periods[kind] = _Period(now_s, num_left_out=left_out)
        if period.num_told < self._max_told:
            period.num_told += 1
            return True
        period.num_left_out += 1
        return False

    def left_out(self, now_s: float | None = None) -> dict[str, int]:
        """Kind → how many were left out in its period, once that is over.

        Each is told once.

        Args:
            now_s: None to end all periods.
        """
        over = [k for k, p in self._periods.items() if now_s is None or self._is_over(p, now_s)]
        ended = {kind: self._periods.pop(kind).num_left_out for kind in over}
        return {kind: number for kind, number in ended.items() if number}

    def _is_over(self, period: _Period, now_s: float) -> bool:
        return now_s - period.begun_s >= self._period_s
