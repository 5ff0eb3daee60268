"""What the program did to the device: calls by name, bytes copied, misuse. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter, deque

from runtime_cache.aclsim import codes

MAX_MISUSES = 1000
# Codes that a correct program meets too.
NO_MISUSE = codes.STICKY | {
    codes.REPEAT_INITIALIZE,
    codes.REPEAT_FINALIZE,
    codes.RT_MEMORY_ALLOCATION,
    codes.RT_STREAM_SYNC_TIMEOUT,
    codes.RT_EVENT_SYNC_TIMEOUT,
}


class Ledger:
    """Counters since the last `clear`.

    Attributes:
        misuses: one sentence for each call or task that failed by the program's own fault.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Starts from nothing."""
        self.calls: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        self.misuses: deque[str] = deque(maxlen=MAX_MISUSES)

    def count_call(self, function: str) -> None:
        """Counts one call of a pyACL function."""
        with self._lock:
            self.calls[function] += 1

    def count_copy(self, direction: str, count_bytes: int) -> None:
        """Counts one copy that took effect; `direction` is such as `D2D`."""
        with self._lock:
            self.copies[direction] += 1
            self.copied_bytes[direction] += count_bytes

    def note_failure(self, where: str, code: int, sentence: str) -> None:
        """Keeps a failure that the program caused: not an injected one, not a benign code."""
        if code not in NO_MISUSE and not sentence.startswith("injected fault"):
            self.misuses.append(f"{where} -> {code}: {sentence}")


ledger = Ledger()
