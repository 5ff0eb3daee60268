"""How much of large messages libzmq holds for each client.

libzmq counts messages, not bytes: a queue of a thousand small ones is nothing, one of a thousand
long lists of tokens is gigabytes. So large messages are handed over without copying them, which
tells when libzmq has given one to the system; what it still holds of them is bounded.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

#: From this size on a message is followed; it costs fifty microseconds more [bytes].
LARGE_BYTES = 16 * 1024
#: What libzmq may hold of large messages for one client [bytes]. One goes whatever its size.
MAX_BYTES = 8 * 1024 * 1024


class Tracker(Protocol):
    """Of one message: `zmq.MessageTracker`."""

    @property
    def done(self) -> bool:
        """Whether libzmq has let go of it."""


class InFlight:
    """Of all clients."""

    def __init__(self) -> None:
        self._messages: dict[bytes, deque[tuple[Tracker, int]]] = {}

    def num_bytes(self, identity: bytes) -> int:
        """What libzmq holds for a client of large messages."""
        messages = self._messages.get(identity)
        if messages is None:
            return 0
        while messages and messages[0][0].done:
            messages.popleft()
        if not messages:
            del self._messages[identity]
        return sum(num_bytes for _, num_bytes in messages)

    def has_room(self, identity: bytes, num_bytes: int) -> bool:
        """Whether one more of this size may be handed over."""
        held_bytes = self.num_bytes(identity)
        return held_bytes == 0 or held_bytes + num_bytes <= MAX_BYTES

    def add(self, identity: bytes, tracker: Tracker, num_bytes: int) -> None:
        """One that was handed over."""
        self._messages.setdefault(identity, deque()).append((tracker, num_bytes))

    def forget(self, identity: bytes) -> None:
        """The client has gone."""
        self._messages.pop(identity, None)
