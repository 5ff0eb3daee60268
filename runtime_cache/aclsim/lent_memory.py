"""Device memory that a program lends to models: for weights, and for intermediate results.

Source: aclmdlLoadFromFileWithMem, CANN 9.0: weight memory may serve several loads of one `.om`,
work memory several models that never run at the same time. What a card does not check is checked
here: weights of another model over the first one's, and two runs in one work memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.memory import DeviceMemory

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LentMemory:
    """What a program gave a model at load: (device address, bytes), or None: the system's own."""

    work: Range | None = None
    weights: Range | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What has to be alive whenever the model runs."""
        return tuple(lent for lent in (self.work, self.weights) if lent is not None)


NOTHING_LENT = LentMemory()


class Lending:
    """Who uses lent memory of one device. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: dict[Range, tuple[str, int]] = {}
        self._running: dict[int, Range] = {}

    def claim_weights(self, lent: Range, digest: str) -> None:
        """Puts a model's weights into a range.

        Args:
            digest: of the weights; equal ones may share the range.

        Raises:
            AclFailure: 100000 if other weights are there, which the load would overwrite.
        """
        with self._lock:
            for other, (owner, _) in self._weights.items():
                if _overlap(lent, other) and (lent[0], digest) != (other[0], owner):
                    sentence = (
                        f"the weight memory at {lent[0]:#x} holds the weights of another loaded "
                        "model; only loads of the same om may share it"
                    )
                    raise AclFailure(codes.INVALID_PARAM, sentence)
            _, count = self._weights.get(lent, (digest, 0))
            self._weights[lent] = (digest, count + 1)

    def release_weights(self, lent: Range) -> None:
        """Ends one `claim_weights`."""
        with self._lock:
            digest, count = self._weights.pop(lent)
            if count > 1:
                self._weights[lent] = (digest, count - 1)

    @contextmanager
    def working_in(self, owner: object, lent: Range) -> Iterator[None]:
        """Marks a range as used by one run.

        Raises:
            AclFailure: 507011 if another model runs there at this moment.
        """
        with self._lock:
            if any(_overlap(lent, other) for other in self._running.values()):
                sentence = (
                    f"two models run at the same time in the work memory at {lent[0]:#x}; they may "
                    "share it only if they never overlap"
                )
                raise AclFailure(codes.RT_MODEL_EXECUTE, sentence)
            self._running[id(owner)] = lent
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(owner)]


_lendings: WeakKeyDictionary[DeviceMemory, Lending] = WeakKeyDictionary()
_lendings_lock = threading.Lock()


def lending_of(memory: DeviceMemory) -> Lending:
    """The record of one device."""
    with _lendings_lock:
        return _lendings.setdefault(memory, Lending())


def check_lent(memory: DeviceMemory, what: str, lent: Range, needed_bytes: int) -> None:
    """Checks memory that a program offers.

    Raises:
        AclFailure: 107000 if it is not live device memory, 245000 if it is too small (GE's code for
            both kinds, by its source).
    """
    address, size = lent
    if size < needed_bytes:
        sentence = f"{what} memory of {size} bytes given, query_size asks for {needed_bytes}"
        raise AclFailure(codes.GE_MEMORY_ALLOCATION, sentence)
    memory.check(address, size, codes.RT_PARAM_INVALID)


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
