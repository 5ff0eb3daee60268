"""Reads the compiler's output while it runs: how far it is, and what went wrong. Pure.

What a real ATC prints of its progress is not documented, and nothing here was checked against one.
Used are: the lines of the software device's compiler, which count gears; and the form of CANN's
log lines, `[LEVEL] MODULE(pid,name):time [file:line]text` (page `--log` of the ATC guide), which
tells what part of the compiler is at work if its log is printed. Else there is only the clock.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence

#: How much of the output an error message carries [lines].
SHOWN_LINES = 15
#: How much is read for error codes: they come last, with a trace behind them [lines].
_KEPT_LINES = 400

_GEAR = re.compile(r"gear (\d+)/(\d+)")
_LOG = re.compile(r"^\[(?:DEBUG|INFO|WARNING|ERROR|EVENT)\]\s+(\w+)\(\d+,")
#: Parts of the compiler in the order in which a model passes through them. Source: page `--log`.
_PARTS = {
    "GE": "graph",
    "FE": "fusion of operators",
    "TEFUSION": "compilation of operators",
}

#: Colours and the like, and what else would disturb a terminal that a message is printed to.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]")

Progress = Callable[[int, int], None]
Part = Callable[[str], None]


class AtcLog:
    """The output of one run."""

    def __init__(self, on_progress: Progress, on_part: Part) -> None:
        """Calls back while lines are fed.

        Args:
            on_progress: gears done and in all.
            on_part: a part of the compiler begins; each part once, in their order.
        """
        self._on_progress = on_progress
        self._on_part = on_part
        self._parts = list(_PARTS)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, line: str) -> None:
        """The next line of output, without its end."""
        self._lines.append(line)
        if gear := _GEAR.search(line):
            self._on_progress(int(gear[1]), int(gear[2]))
        elif (found := _LOG.match(line)) and found[1] in self._parts:
            del self._parts[: self._parts.index(found[1]) + 1]
            self._on_part(_PARTS[found[1]])

    @property
    def lines(self) -> Sequence[str]:
        """What is kept of the output, without colours and what is no text."""
        cleaned = (_CONTROL.sub("", line) for line in self._lines)
        return tuple(line for line in cleaned if line)

    @property
    def last_lines(self) -> list[str]:
        """The end of the output, for a message."""
        return list(self.lines[-SHOWN_LINES:])
