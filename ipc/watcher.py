"""Tells an event loop, asyncio or uvloop, when a dealer's sockets may have something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ipc.dealer import Dealer


class Watcher:
    """Calls back, in the loop's thread, whenever it is worthwhile to look at `dealer`.

    libzmq's descriptors report changes only: who is called back must take everything, or say
    `soon()`; and whoever sends must say it too, since sending may consume a descriptor's signal.

    Args:
        dealer: stays the caller's to close, after `stop()`.
        callback: looks at it; never called before this call has returned.
    """

    def __init__(self, dealer: Dealer, callback: Callable[[], None]) -> None:
        self._dealer = dealer
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._descriptors: tuple[int, ...] = ()
        self._pending: asyncio.Handle | None = None

    def start(self) -> None:
        """Watch the sockets that the dealer has now."""
        self._descriptors = (self._dealer.socket.fileno(), self._dealer.events.fileno())
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._look)
        # What came before is not reported.
        self.soon()

    def stop(self) -> None:
        """Call back no more; to be called before the sockets are closed. May be called twice."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors = ()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def soon(self) -> None:
        """Call back in the loop's next round."""
        if self._pending is None and self._descriptors:
            self._pending = self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._callback()
