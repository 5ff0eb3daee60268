"""A link in an event loop: who waits for a reply is woken when it comes, or in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from ipc.dealer import Dealer
from ipc.errors import Closed, Timeout
from ipc.link import PROBE_S, Link, LinkOptions
from ipc.messages import AnyRequest
from ipc.session import Call, Session
from ipc.watcher import Watcher


class ClientLink:
    """Made, used and closed within one event loop."""

    def __init__(self, endpoint: str, options: LinkOptions) -> None:
        """Raises:
        EndpointError: the endpoint is not one.
        """
        self._endpoint = endpoint
        self._beat_s = options.beat_s
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._dealer = Dealer(endpoint, options.context, options.curve)
        self._watcher = Watcher(self._dealer, self._receive)
        session = Session(options.encoding, endpoint=endpoint)
        self._link = Link(
            session,
            self._dealer,
            options.lease_ms,
            reconnect=self._reconnect,
            on_send=self._watcher.soon,
        )
        self._heart: asyncio.TimerHandle | None = None
        self._watcher.start()
        self._schedule_beat()

    def start(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], window: int | None = None
    ) -> Call:
        """Make and send a request; raises what `Session.start` raises, and Closed."""
        if self._dealer.socket.closed:
            raise Closed("the client is closed")
        return self._link.start(kind, fields, window)

    async def next_reply(self, call: Call, timeout_s: float) -> Any:
        """The next reply to `call`; on a timeout the call is given up.

        Raises:
            Timeout: nothing came.
        """
        end_s = self._loop.time() + timeout_s
        while (reply := self._link.take(call)) is None:
            remaining_s = end_s - self._loop.time()
            if remaining_s <= 0:
                self.give_up(call)
                raise Timeout(self._endpoint, timeout_s)
            turn_s = min(remaining_s, PROBE_S)
            if not await self._hears_of(call, turn_s) and turn_s == PROBE_S:
                self._link.probe()
        return reply

    def give_up(self, call: Call) -> None:
        """Forget a call, and tell the daemon unless it has ended."""
        self._link.give_up(call)

    def give_up_all(self) -> None:
        """Forget all calls."""
        self._link.give_up_all()

    def close(self) -> None:
        """End every call with `Closed`, and vanish."""
        if self._heart is not None:
            self._heart.cancel()
        self._watcher.stop()
        self._wake(self._link.close(Closed("the client was closed")))

    async def _hears_of(self, call: Call, wait_s: float) -> bool:
        """Wait until there may be something to take; False if there was not, for so long."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters[call.id] = waiter
        alarm = self._loop.call_later(wait_s, _wake_one, waiter)
        try:
            await waiter
        finally:
            alarm.cancel()
            is_silent = self._waiters.pop(call.id, None) is not None
        return not is_silent

    def _receive(self) -> None:
        self._wake(self._link.receive())
        if self._link.has_more:
            self._watcher.soon()

    def _wake(self, calls: Iterable[Call]) -> None:
        for call in calls:
            waiter = self._waiters.pop(call.id, None)
            if waiter is not None:
                _wake_one(waiter)

    def _reconnect(self) -> None:
        self._watcher.stop()
        self._dealer.renew()
        self._watcher.start()

    def _beat(self) -> None:
        self._link.renew_lease()
        self._schedule_beat()

    def _schedule_beat(self) -> None:
        if self._beat_s is not None:
            self._heart = self._loop.call_later(self._beat_s, self._beat)


def _wake_one(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
