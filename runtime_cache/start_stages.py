"""What a start is doing, in words, and how long each part of it may be silent. Pure.

The driver keeps the interpreter while it loads a model, so that nothing can be said meanwhile: what
is going on is told before, with a time that is generous rather than right.
"""

from __future__ import annotations

from collections.abc import Callable

from om_models.manifest import Manifest, OmFile

#: Told what begins, and how long it may be silent [seconds].
Tell = Callable[[str, float], None]

#: Of every part: a driver that has just been loaded, a disk that wakes up [seconds].
_SLACK_S = 60.0
#: No disk that a model is served from reads slower, with the driver's own work [bytes per second].
_SLOWEST_BYTES_PER_S = 10e6
#: How often a check of the bundle says how far it is [part of the whole].
_PART = 0.1


def tell_nobody(what: str, may_take_s: float) -> None:
    """For starts that nobody waits for."""


class StartStages:
    """The parts of one start, in the order in which they are told."""

    def __init__(self, tell: Tell = tell_nobody) -> None:
        self._tell = tell
        self._next_part = 0.0

    def reading(self, bundle: str) -> None:
        """The bundle's manifest and sizes are read."""
        self._tell(f"Reading the bundle {bundle}", _SLACK_S)

    def checking(self, num_checked_bytes: int, num_bytes: int) -> None:
        """So much of the bundle's checksums is done; most calls tell nothing."""
        part = num_checked_bytes / max(1, num_bytes)
        if part < self._next_part:
            return
        self._next_part = part + _PART
        left_s = (num_bytes - num_checked_bytes) / _SLOWEST_BYTES_PER_S
        self._tell(f"Checking the bundle: {100 * part:.0f} %", _SLACK_S + left_s)

    def opening(self, device: str) -> None:
        """The driver takes the device."""
        self._tell(f"Opening {device}", 2 * _SLACK_S)

    def loading(self, manifest: Manifest, om: OmFile, number: int) -> None:
        """The driver loads a model, `number` of all, counted from 1; weights may lie beside it."""
        num_bytes = sum(entry.num_bytes for entry in manifest.files.values())
        of_all = f" ({number} of {len(manifest.oms)})" if len(manifest.oms) > 1 else ""
        may_take_s = 2 * _SLACK_S + num_bytes / _SLOWEST_BYTES_PER_S
        self._tell(f"Loading {om.path}{of_all} of {manifest.name}", may_take_s)

    def warming_up(self, num_steps: int, step_timeout_ms: int) -> None:
        """Steps that serve nobody are run."""
        self._tell("Warming up", _SLACK_S + num_steps * step_timeout_ms / 1000)
