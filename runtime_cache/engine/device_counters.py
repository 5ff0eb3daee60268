"""What the device has done so far, as numbers that only grow. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RoleCounters:
    """What steps of one role have done on the device; failed steps are not counted.

    Attributes:
        num_steps: steps that synchronised.
        rows_copied: token rows copied from one place of the pool to another.
        rows_appended: computed token rows put into the pool.
        rows_padded: token rows computed for nothing, because gears are larger than batches.
    """

    num_steps: int = 0
    rows_appended: int = 0
    rows_padded: int = 0
    rows_copied: int = 0


@dataclass(slots=True)
class ProbeCounters:
    """How often the device was asked whether it still works, after steps that had failed.

    Attributes:
        num_probes: so often.
        num_failed: those that the device did not pass.
    """

    num_probes: int = 0
    num_failed: int = 0
