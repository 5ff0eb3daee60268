"""Limits that a program sets for operators and for waits between streams, process-wide."""

from __future__ import annotations

#: The step of the operator limit. Not published; it follows from the published default of 1091 s
#: being 254 steps (aclrtSetOpExecuteTimeOut page of CANN 9.0).
INTERVAL_US = 4_294_967
MAX_INTERVALS = 254


class Timeouts:
    """What was set.

    Attributes:
        event_wait_s: limit of `acl.rt.stream_wait_event` [s]; 0: none.
        op_execute_us: limit of one operator [us]. Kept and given back; nothing here runs so long
            because of a fault that it would have to be found by it.
    """

    def __init__(self) -> None:
        self.event_wait_s = 0
        self.op_execute_us = MAX_INTERVALS * INTERVAL_US

    def set_op_execute(self, wanted_us: int) -> int:
        """Rounds a limit up to whole steps, at most 254; 0 is the most. Returns what it became."""
        steps = -(-wanted_us // INTERVAL_US) if wanted_us else MAX_INTERVALS
        self.op_execute_us = min(steps, MAX_INTERVALS) * INTERVAL_US
        return self.op_execute_us
