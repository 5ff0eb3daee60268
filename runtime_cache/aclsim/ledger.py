"""What the program did to the device: calls by name, bytes copied, misuse. Thread-safe."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from runtime_cache.aclsim import codes

log = logging.getLogger("runtime_cache.aclsim")
MAX_MISUSES = 1000
# Codes that a correct program meets too.
NO_MISUSE = codes.STICKY | {
    codes.REPEAT_INITIALIZE,
    codes.REPEAT_FINALIZE,
    codes.RT_MEMORY_ALLOCATION,
    codes.RT_STREAM_SYNC_TIMEOUT,
    codes.RT_EVENT_SYNC_TIMEOUT,
    codes.RT_REPORT_TIMEOUT,
    codes.RT_THREAD_SUBSCRIBE,  # a thread that processes reports before it is subscribed
}
INJECTED = "injected fault"
STOPPED = "the context stopped on a failure"
#: Programs ask so whether a model has several shapes.
ABSENT = "no input or output is called"
Kind = Literal[
    "bad_call",
    "unsynchronised_read",
    "unsynchronised_write",
    "teardown_order",
    "dangling",
    "leak",
    "gil",
]

_BLAMELESS = (INJECTED, STOPPED, ABSENT)
_TEARDOWN = ("acl.rt.free", "acl.rt.destroy", "acl.mdl.unload", "acl.mdl.destroy", "acl.destroy")
_HOLDS_THE_REST = ("acl.rt.reset_device", "acl.rt.destroy_context")
_GONE = (codes.UNINITIALIZE, codes.RT_CONTEXT_NULL, codes.RT_STREAM_CONTEXT, codes.RT_MODEL_CONTEXT)


@dataclass(frozen=True, slots=True)
class Misuse:
    """Something that a card would not forgive, in one sentence."""

    kind: Kind
    sentence: str


@dataclass(slots=True)
class SlowCalls:
    """Calls of one function that kept the interpreter to themselves for longer than the limit."""

    count: int = 0
    longest_s: float = 0.0


class Ledger:
    """Counters since the last `clear`.

    Attributes:
        noted: each call or task that failed by the program's own fault, and what was seen beside;
            the oldest go beyond 1000.
        slow_calls: calls above `gil_limit_s`, by function.
        gil_limit_s: as the settings had it at `acl.init`.
        is_warning: whether a misuse is logged when it happens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.gil_limit_s = 0.1
        self.is_warning = False
        self.clear()

    def clear(self) -> None:
        """Starts from nothing."""
        self.calls: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        self.noted: deque[Misuse] = deque(maxlen=MAX_MISUSES)
        self.slow_calls: dict[str, SlowCalls] = {}

    @property
    def misuses(self) -> list[str]:
        """The sentences of `noted`."""
        return [misuse.sentence for misuse in list(self.noted)]

    def count_call(self, function: str) -> None:
        """Counts one call of a pyACL function."""
        with self._lock:
            self.calls[function] += 1

    def count_copy(self, direction: str, count_bytes: int) -> None:
        """Counts one copy that took effect; `direction` is such as `D2D`."""
        with self._lock:
            self.copies[direction] += 1
            self.copied_bytes[direction] += count_bytes

    def time_call(self, function: str, seconds: float) -> None:
        """Takes the time of a call that holds the interpreter on a card."""
        if seconds <= self.gil_limit_s:
            return
        with self._lock:
            slow = self.slow_calls.setdefault(function, SlowCalls())
            slow.count += 1
            slow.longest_s = max(slow.longest_s, seconds)

    def note_misuse(self, sentence: str, kind: Kind = "bad_call") -> None:
        """Keeps what a card would not forgive; logged at once if the settings ask for it."""
        self.noted.append(Misuse(kind, sentence))
        if self.is_warning:
            log.warning("%s: %s", kind, sentence)

    def note_failure(self, where: str, code: int, sentence: str) -> None:
        """Keeps a failure that the program caused: not an injected one, not a benign code."""
        if code not in NO_MISUSE and not any(words in sentence for words in _BLAMELESS):
            self.note_misuse(f"{where} -> {code}: {sentence}", _kind_of_failure(where, code))


def _kind_of_failure(where: str, code: int) -> Kind:
    """Giving back too late, or what holds the rest too early, is a matter of order."""
    is_late = code in _GONE and where.startswith(_TEARDOWN)
    is_early = code == codes.RT_PARAM_INVALID and where in _HOLDS_THE_REST
    return "teardown_order" if is_late or is_early else "bad_call"


ledger = Ledger()
