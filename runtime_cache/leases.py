"""Sessions on the event loop: looks at the leases when one may have run out, and not more often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ipc.handler import ClientRef
from runtime_cache.errors import InvalidRequest
from runtime_cache.sessions import Sessions


class Leases:
    """Of all clients. There is a timer only while there is a session."""

    def __init__(self, on_expired: Callable[[ClientRef], None], clock: Callable[[], float]) -> None:
        """Args:
        on_expired: told from the loop of a client whose lease has run out; its session is over.
        clock: seconds; never goes back.
        """
        self._on_expired = on_expired
        self._clock = clock
        self._sessions = Sessions()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: ClientRef, lease_ms: int) -> None:
        """Begin a session, or give the one there is another time.

        Raises:
            InvalidRequest: this kind of client cannot keep a lease. Nothing has changed.
        """
        if client.is_delimited:
            raise InvalidRequest(
                "a REQ socket cannot renew a lease while it waits for a reply; use a DEALER"
            )
        self._sessions.open(client, lease_ms / 1000, self._clock())
        self._look_later()

    def renew(self, client: ClientRef) -> None:
        """The client was heard of; it need not have a session."""
        if len(self._sessions):
            self._sessions.renew(client, self._clock())

    def end(self, client: ClientRef) -> None:
        """The client has said good-bye, or has gone; it need not have a session."""
        self._sessions.end(client)

    def stop(self) -> None:
        """Look at nothing any more. May be called twice."""
        self._is_stopped = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._cancel_timer()
        now_s = self._clock()
        look_s = self._sessions.next_look_s(now_s)
        if look_s is not None and not self._is_stopped:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(look_s - now_s, self._look, look_s)

    def _look(self, due_s: float) -> None:
        now_s = self._clock()
        for client in self._sessions.take_expired(now_s, late_s=now_s - due_s):
            self._on_expired(client)
        self._look_later()
