"""Replies on their way to clients that may not read: none is lost, and memory is bounded.

libzmq queues so many messages for each client and refuses the next. From then on what is sent to
that client is parked here, in order, and handed over as soon as there is room: so an answer has no
holes. A client is a slow reader when a bound is reached, or when it has read nothing for a while;
then its requests are to be cancelled, and as much again is kept for their last replies. Only what
is beyond that is dropped, and counted. Other clients feel nothing of it.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from ipc.handler import ClientRef, Counters
from ipc.in_flight import LARGE_BYTES, InFlight
from ipc.pump import Pump

#: How soon it is tried again whether a client has read something; twice as long after every try
#: in vain, up to the second one [seconds].
_MIN_RETRY_S = 0.001
_MAX_RETRY_S = 0.05
#: A client for which something is parked, and that has read nothing for so long, is a slow reader
#: [seconds].
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class ParkingLimits:
    """What may be parked before a client is a slow reader; once again as much for what follows.

    Attributes:
        max_messages: for one client.
        max_bytes: for one client [bytes].
        max_total_bytes: for all together [bytes].
    """

    max_messages: int = 1024
    max_bytes: int = 4 * 1024 * 1024
    max_total_bytes: int = 64 * 1024 * 1024


@dataclass(slots=True)
class _Parked:
    """What waits for one client, the oldest first."""

    client: ClientRef
    waits_since_s: float
    messages: deque[Sequence[bytes]] = field(default_factory=deque)
    num_bytes: int = 0
    is_slow: bool = False


class Outbox:
    """Hands replies to libzmq at once, or parks them. Everything happens in the loop's thread."""

    def __init__(
        self,
        pump: Pump,
        counters: Counters,
        *,
        on_gone: Callable[[ClientRef], None],
        on_slow: Callable[[ClientRef, bool], None],
        is_there: Callable[[bytes], bool] = lambda identity: True,
        limits: ParkingLimits | None = None,
    ) -> None:
        """Args:
        is_there: whether the connection of this identity is the one it was, as far as known.
        on_gone: told of a client that a message could not be sent to; within `send`.
        on_slow: told of a client that is a slow reader, and again when more is to be parked for
            it, and whether it is one since now; within `send`, or from the loop.
        """
        self._pump = pump
        self._counters = counters
        self._on_gone = on_gone
        self._on_slow = on_slow
        self._is_there = is_there
        self._loop = asyncio.get_running_loop()
        self._limits = limits or ParkingLimits()
        self._in_flight = InFlight()
        self._parked: dict[bytes, _Parked] = {}
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._retry_s = _MIN_RETRY_S

    @property
    def num_parked(self) -> int:
        """Messages that wait."""
        return sum(len(parked.messages) for parked in self._parked.values())

    def send(self, client: ClientRef, frames: Sequence[bytes]) -> bool:
        """Send a message after all that was sent to this client before.

        Returns:
            False if it reaches nobody: the client has gone, or too much waits for it.
        """
        parked = self._parked.get(client.identity)
        if parked is not None and not self._flush(parked):
            return self._park(parked, frames)
        is_sent = self._hand_over(client, frames)
        if is_sent is None:
            parked = self._parked[client.identity] = _Parked(client, self._loop.time())
            return self._park(parked, frames)
        return is_sent

    def forget(self, identity: bytes) -> None:
        """Drop what waits for a client that has gone."""
        self._in_flight.forget(identity)
        parked = self._parked.pop(identity, None)
        if parked is not None:
            self._counters.dropped += len(parked.messages)
            self._num_bytes -= parked.num_bytes

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing is parked, at most so long."""
        give_up_s = self._loop.time() + timeout_s
        while self._parked and self._loop.time() < give_up_s:
            await asyncio.sleep(_MIN_RETRY_S)
            self._retry()

    def stop(self) -> None:
        """Drop what is parked. May be called twice."""
        for identity in list(self._parked):
            self.forget(identity)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hand_over(self, client: ClientRef, frames: Sequence[bytes]) -> bool | None:
        """Whether libzmq took the message; None if the client's queue is full."""
        if not self._is_there(client.identity):
            return self._unreachable(client)
        try:
            if not self._send(client.identity, frames):
                return None
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return self._unreachable(client)
        self._counters.sent += 1
        return True

    def _send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """Whether it may be sent; large messages only as long as libzmq does not hold too many."""
        num_bytes = len(frames[-1])
        if num_bytes < LARGE_BYTES:
            self._pump.send(frames)
            return True
        if not self._in_flight.has_room(identity, num_bytes):
            return False
        tracker = self._pump.send_tracked(frames)
        if tracker is not None:
            self._in_flight.add(identity, tracker, num_bytes)
        return True

    def _unreachable(self, client: ClientRef) -> bool:
        self._counters.unreachable += 1
        self.forget(client.identity)
        self._on_gone(client)
        return False

    def _park(self, parked: _Parked, frames: Sequence[bytes]) -> bool:
        num_bytes = sum(map(len, frames))
        self._retry_later()
        if parked.is_slow or not self._has_room(parked, num_bytes):
            self._declare_slow(parked)
            if not self._has_room(parked, num_bytes, share=2):
                self._counters.dropped += 1
                return False
        self._counters.parked += 1
        parked.messages.append(frames)
        parked.num_bytes += num_bytes
        self._num_bytes += num_bytes
        return True

    def _declare_slow(self, parked: _Parked) -> None:
        is_new = not parked.is_slow
        self._counters.slow_readers += is_new
        parked.is_slow = True
        self._on_slow(parked.client, is_new)

    def _has_room(self, parked: _Parked, num_bytes: int, *, share: int = 1) -> bool:
        limits = self._limits
        return (
            len(parked.messages) < share * limits.max_messages
            and parked.num_bytes + num_bytes <= share * limits.max_bytes
            and self._num_bytes + num_bytes <= share * limits.max_total_bytes
        )

    def _flush(self, parked: _Parked) -> bool:
        """Hand over what waits, as much as there is room for; whether nothing waits any more."""
        while parked.messages:
            frames = parked.messages[0]
            is_sent = self._hand_over(parked.client, frames)
            if is_sent is None:
                return False
            if not is_sent:
                return True  # the client has gone, and what waited for it
            parked.messages.popleft()
            parked.waits_since_s = self._loop.time()
            parked.num_bytes -= (num_bytes := sum(map(len, frames)))
            self._num_bytes -= num_bytes
        self._parked.pop(parked.client.identity, None)
        return True

    def _retry(self) -> bool:
        """Try all; whether anybody has read something."""
        num_before = self.num_parked
        for parked in list(self._parked.values()):
            is_stuck = not self._flush(parked) and not parked.is_slow
            if is_stuck and self._loop.time() - parked.waits_since_s >= PATIENCE_S:
                self._declare_slow(parked)
        return self.num_parked < num_before

    def _retry_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._retry_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        has_progress = self._retry()
        self._retry_s = _MIN_RETRY_S if has_progress else min(2 * self._retry_s, _MAX_RETRY_S)
        if self._parked:
            self._retry_later()
