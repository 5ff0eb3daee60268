"""Scripted failures: call N of function F returns code C, comes late, or hangs.

For tests of fault paths, from Python (`inject`) or from a file (`read_script`). A fault strikes the
call, or the turn of the work that the call queued. A sticky code (device lost) makes every later
call on the device fail.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from runtime_cache.aclsim.failure import AclFailure

When = Literal["call", "run"]
# Functions whose work is queued, and so can fail at its turn.
QUEUED = frozenset(
    (
        "acl.mdl.execute_async",
        "acl.rt.launch_callback",
        "acl.rt.memcpy2d_async",
        "acl.rt.memcpy_async",
        "acl.rt.memset_async",
        "acl.rt.record_event",
        "acl.rt.reset_event",
        "acl.rt.stream_wait_event",
    )
)
_functions: set[str] = set()
_MAX_NUMBER = (1 << 31) - 1


def register(function: str) -> None:
    """Makes a function known, so that a mistyped name in a script is found."""
    _functions.add(function)


@dataclass(slots=True, eq=False)
class Fault:
    """One scripted fault. Exactly one of `call`, `every`, `probability` says when it strikes.

    Attributes:
        function: full pyACL name, such as `acl.mdl.execute_async`.
        code: the code it gives; 0: the call or the work only comes late.
        when: `call` returns it at once; `run` lets the call succeed, drops the queued work at
            its turn and surfaces the code at synchronise.
        call: the one call that it strikes, counted from 1; 0: decided otherwise.
        every: it strikes each call whose number this divides; 0: decided otherwise.
        probability: of striking a call, each by itself.
        wait_ms: what the call or the stream stands still before; ends early at a reset.
        random: where chance comes from.
        num_calls: calls counted so far.
        has_fired: whether it struck.
    """

    function: str
    code: int
    when: When = "call"
    call: int = 0
    every: int = 0
    probability: float = 0.0
    wait_ms: int = 0
    random: Random = field(default_factory=lambda: Random(0))
    num_calls: int = 0
    has_fired: bool = False

    def __post_init__(self) -> None:
        if self.function not in (_functions if self.when == "call" else QUEUED):
            raise ValueError(f"{self.function} is no function that can fail at its {self.when}")
        if self.call < 0 or self.every < 0 or not 0 <= self.probability <= 1:
            raise ValueError("call and every count from 1, and a probability is within 0 and 1")
        if sum(map(bool, (self.call, self.every, self.probability))) != 1:
            raise ValueError("one of call (counts from 1), every and probability says when")
        if self.code < 0 or self.wait_ms < 0 or not (self.code or self.wait_ms):
            raise ValueError("a fault has a code (0 is success), a delay or a hang")
        if max(self.code, self.wait_ms) > _MAX_NUMBER:
            raise ValueError("a code and a time in ms have 31 bits")

    def is_due(self) -> bool:
        """Counts one call and tells whether this is one to strike."""
        self.num_calls += 1
        if self.call:
            return self.num_calls == self.call
        if self.every:
            return self.num_calls % self.every == 0
        return self.random.random() < self.probability

    @property
    def is_over(self) -> bool:
        """Whether it can strike no more."""
        return bool(self.call) and self.num_calls >= self.call

    @property
    def failure(self) -> AclFailure | None:
        """What the struck call or work gives, if it fails at all."""
        if not self.code:
            return None
        return AclFailure(self.code, f"injected fault: {self.function} gives {self.code}")


class FaultScript:
    """The faults still to come. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._from_file: list[Fault] = []
        self._cleared = threading.Event()

    def add(self, fault: Fault) -> None:
        """Appends a fault."""
        with self._lock:
            self._faults = [*self._faults, fault]

    def load(self, faults: list[Fault]) -> None:
        """Puts the faults of a file in the place of those of an earlier one."""
        with self._lock:
            kept = [fault for fault in self._faults if fault not in self._from_file]
            self._faults, self._from_file = [*kept, *faults], faults

    def clear(self) -> None:
        """Forgets all faults, struck or not, and ends the waiting of calls that they hold up."""
        with self._lock:
            self._faults, self._from_file = [], []
            self._cleared.set()
            self._cleared = threading.Event()

    def find(self, function: str, when: When) -> Fault | None:
        """Counts one call of `function` and returns the fault that strikes it, if any."""
        if not self._faults:
            return None
        with self._lock:
            asked = [f for f in self._faults if f.function == function and f.when == when]
            due = [fault for fault in asked if fault.is_due()]
            self._faults = [fault for fault in self._faults if not fault.is_over]
        if not due:
            return None
        due[0].has_fired = True
        return due[0]

    def strike(self, function: str, when: When) -> AclFailure | None:
        """As `find`, for a call: waits as long as the fault says, and returns its failure."""
        if not self._faults:
            return None
        # Of before the fault was found: who forgets it a moment later ends this wait as well.
        cleared = self._cleared
        fault = self.find(function, when)
        if fault is None:
            return None
        cleared.wait(fault.wait_ms / 1000)
        return fault.failure


script = FaultScript()


def inject(
    function: str,
    *,
    code: int = 0,
    call: int = 1,
    when: When = "call",
    delay_ms: int = 0,
    hang_ms: int = 0,
) -> Fault:
    """Scripts a fault of the `call`-th next call of `function`.

    Args:
        code: what it gives; 0 if it is only late.
        delay_ms, hang_ms: the call, or the stream at the work's turn, stands still for their sum.
            Two names for what a test means: late, or not to be waited for. A reset ends it.

    Returns:
        The fault; its `has_fired` tells later whether it struck.

    Raises:
        ValueError: `call` below 1, no effect at all, or a function that does not exist or queues
            nothing.
    """
    fault = Fault(function, code, when, call=call, wait_ms=delay_ms + hang_ms)
    script.add(fault)
    return fault


def clear() -> None:
    """Forgets every scripted failure. Does not bring back a lost device."""
    script.clear()
