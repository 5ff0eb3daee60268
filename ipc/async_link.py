"""A link in an event loop: who waits for a reply is woken when it comes, or in time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ipc.dealer import Dealer
from ipc.errors import Closed, EndpointError, Timeout
from ipc.link import PROBE_S, Link, LinkOptions
from ipc.messages import AnyRequest
from ipc.session import Call, Session
from ipc.watcher import Watcher

#: Clocks of event loops are not finer than this [seconds].
_TICK_S = 0.001


class _Waiter:
    """Somebody who waits for news of a call, until `end_s` of the loop's clock."""

    __slots__ = ("end_s", "news")

    def __init__(self, news: asyncio.Future[None], end_s: float) -> None:
        self.news = news
        self.end_s = end_s

    def wake(self) -> None:
        if not self.news.done():
            self.news.set_result(None)


class ClientLink:
    """Made, used and closed within one event loop."""

    def __init__(self, endpoint: str, options: LinkOptions) -> None:
        """Raises:
        EndpointError: the endpoint is not one.
        """
        self._endpoint = endpoint
        self._beat_s = options.beat_s
        #: By the call's id; one each, unless several tasks read one answer.
        self._waiters: dict[str, list[_Waiter]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
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
        self._is_closed = False
        self._watcher.start()
        self._schedule_beat()

    def start(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], window: int | None = None
    ) -> Call:
        """Make and send a request; raises what `Session.start` raises, and Closed."""
        if self._is_closed:
            raise Closed("the client is closed")
        return self._link.start(kind, fields, window)

    async def next_reply(self, call: Call, timeout_s: float) -> Any:
        """The next reply to `call`; on a timeout the call is given up.

        Raises:
            Timeout: nothing came.
        """
        if (reply := self._link.take(call)) is not None:
            return reply
        now_s = self._loop.time()
        end_s = now_s + timeout_s
        while now_s < end_s:
            await self._until(call, min(end_s, now_s + PROBE_S))
            if (reply := self._link.take(call)) is not None:
                return reply
            now_s = self._loop.time()
            if end_s - now_s > _TICK_S:
                self._link.probe()
        self.give_up(call)
        raise Timeout(self._endpoint, timeout_s)

    def give_up(self, call: Call) -> None:
        """Forget a call, and tell the daemon unless it has ended."""
        self._link.give_up(call)
        self._wake((call,))

    def give_up_all(self) -> None:
        """Forget all calls."""
        self._wake(self._link.give_up_all())

    def close(self) -> None:
        """End every call with `Closed`, and vanish."""
        self._is_closed = True
        if self._heart is not None:
            self._heart.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        self._watcher.stop()
        self._wake(self._link.close(Closed("the client was closed")))

    async def _until(self, call: Call, end_s: float) -> None:
        """Wait until there may be something to take, but no longer than to `end_s`."""
        waiter = _Waiter(self._loop.create_future(), end_s)
        self._waiters.setdefault(call.id, []).append(waiter)
        if end_s < self._alarm_s:
            self._set_alarm(end_s)
        try:
            await waiter.news
        finally:
            others = [other for other in self._waiters.pop(call.id, ()) if other is not waiter]
            if others:
                self._waiters[call.id] = others

    def _set_alarm(self, at_s: float) -> None:
        """One timer for all that wait: most waits end before it, and cost none."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        """Wake those who have waited long enough."""
        self._alarm, self._alarm_s = None, math.inf
        # The loop may ring a clock's tick too early.
        now_s = self._loop.time() + _TICK_S
        waiting = [waiter for waiters in self._waiters.values() for waiter in waiters]
        for waiter in waiting:
            if waiter.end_s <= now_s:
                waiter.wake()
        later = [waiter.end_s for waiter in waiting if waiter.end_s > now_s]
        if later:
            self._set_alarm(min(later))

    def _receive(self) -> None:
        self._wake(self._link.receive())
        if self._link.has_more:
            self._watcher.soon()

    def _wake(self, calls: Iterable[Call]) -> None:
        for call in calls:
            for waiter in self._waiters.pop(call.id, ()):
                waiter.wake()

    def _reconnect(self) -> None:
        self._watcher.stop()
        try:
            self._dealer.renew()
        except EndpointError:
            self._loop.call_soon(self._receive)  # there is nothing to watch: who waits hears of it
            raise
        self._watcher.start()

    def _beat(self) -> None:
        self._link.renew_lease()
        self._schedule_beat()

    def _schedule_beat(self) -> None:
        if self._beat_s is not None:
            self._heart = self._loop.call_later(self._beat_s, self._beat)
