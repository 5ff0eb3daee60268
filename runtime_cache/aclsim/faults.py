"""Scripted failures: call N of function F returns code C, at the call or when its work runs.

For tests of fault paths. A sticky code (device lost) makes every later call on the device fail.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from runtime_cache.aclsim.failure import AclFailure

When = Literal["call", "run"]
# Functions whose work is queued, and so can fail at its turn.
QUEUED = frozenset(
    (
        "acl.mdl.execute_async",
        "acl.rt.memcpy_async",
        "acl.rt.memset_async",
        "acl.rt.record_event",
        "acl.rt.stream_wait_event",
    )
)
_functions: set[str] = set()


def register(function: str) -> None:
    """Makes a function known, so that a mistyped name in a script is found."""
    _functions.add(function)


@dataclass(slots=True)
class Fault:
    """One scripted failure.

    Attributes:
        function: full pyACL name, such as `acl.mdl.execute_async`.
        calls_left: calls until it strikes; 1 is the next one.
        code: the code it gives.
        when: `call` returns it at once; `run` lets the call succeed, drops the queued work at
            its turn and surfaces the code at synchronise.
        has_fired: whether it struck.
    """

    function: str
    calls_left: int
    code: int
    when: When
    has_fired: bool = False


class FaultScript:
    """The faults still to come. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Appends a fault."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forgets all faults, struck or not."""
        with self._lock:
            self._faults = []

    def strike(self, function: str, when: When) -> AclFailure | None:
        """Counts one call of `function` and returns the failure scripted for it, if any."""
        if not self._faults:
            return None
        with self._lock:
            due = [f for f in self._faults if f.function == function and f.when == when]
            for fault in due:
                fault.calls_left -= 1
            struck = next((f for f in due if f.calls_left == 0), None)
            self._faults = [f for f in self._faults if f.calls_left > 0]
        if struck is None:
            return None
        struck.has_fired = True
        return AclFailure(struck.code, f"injected fault: {function} gives {struck.code}")


script = FaultScript()


def inject(function: str, *, code: int, call: int = 1, when: When = "call") -> Fault:
    """Scripts a failure of the `call`-th next call of `function`.

    Returns:
        The fault; its `has_fired` tells later whether it struck.

    Raises:
        ValueError: `call` below 1, `code` 0, or a function that does not exist or queues nothing.
    """
    if function not in (_functions if when == "call" else QUEUED):
        raise ValueError(f"{function} is no function that can fail at its {when}")
    if call < 1 or code == 0:
        raise ValueError("call counts from 1, and code 0 is success")
    fault = Fault(function, call, code, when)
    script.add(fault)
    return fault


def clear() -> None:
    """Forgets every scripted failure. Does not bring back a lost device."""
    script.clear()
