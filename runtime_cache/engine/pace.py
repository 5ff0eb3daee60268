"""How fast requests have ended lately, to tell a refused client when to come back. Pure."""

from __future__ import annotations

from collections import deque

_WINDOW = 32
_UNKNOWN_MS = 1000
_MIN_MS = 10
_MAX_MS = 60_000


class Pace:
    """The times of the last ends of requests."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_WINDOW)

    def note_end(self, now_s: float) -> None:
        """A request has ended, which makes room for another."""
        self._ends_s.append(now_s)

    def retry_after_ms(self, now_s: float) -> int:
        """The mean time between ends, up to now: by then a place is likely to be free.

        One second while nothing is known; between 10 ms and a minute in any case.
        """
        if not self._ends_s:
            return _UNKNOWN_MS
        interval_s = (now_s - self._ends_s[0]) / len(self._ends_s)
        return round(min(max(interval_s * 1000, _MIN_MS), _MAX_MS))
