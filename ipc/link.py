"""A session over a connection that may break: what both clients do, without waiting and without a
clock.

`Link` sends at once, takes what has come when it is told to look, and after a broken connection
connects anew, repeats what may be repeated and fails the rest. Whoever owns it watches
`dealer.socket` and `dealer.events`, two sockets that change when a connection is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from ipc.codec import Encoding
from ipc.curve_keys import CurveKeys
from ipc.dealer import Dealer
from ipc.errors import EndpointError, IpcError, NotWelcome
from ipc.messages import AnyRequest
from ipc.session import Call, Session

#: Messages of a streamed answer that may wait for its reader.
DEFAULT_WINDOW = 128
#: When a call has waited for so long, its client asks which daemon is there [seconds].
PROBE_S = 5.0
#: Heartbeats in the time that a lease lasts.
_BEATS_PER_LEASE = 3
#: What callers asked for and gave up before a connection was there may wait in libzmq [bytes].
_MAX_LITTER_BYTES = 65536
#: Messages taken before the owner gets its turn again.
_MAX_BATCH = 128


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What a client is to be.

    Attributes:
        encoding: of the requests; replies come in the same.
        lease_ms: how long the daemon keeps this client's requests without hearing of it; None: no
            session is made.
        context: libzmq context to share; the process-wide one by default.
        curve: keys, where the daemon wants some.
    """

    encoding: Encoding = Encoding.MSGPACK
    lease_ms: int | None = None
    context: zmq.Context[zmq.Socket[bytes]] | None = None
    curve: CurveKeys | None = None

    @property
    def beat_s(self) -> float | None:
        """When to send the next heartbeat [seconds]; None: never."""
        return None if self.lease_ms is None else self.lease_ms / 1000 / _BEATS_PER_LEASE


class Link:
    """Calls over a `Dealer`.

    Args:
        session: the calls.
        dealer: the sockets; closed by `close`.
        lease_ms: how long the daemon keeps this client's requests without hearing of it; None: no
            session is made.
        reconnect: has the dealer make new sockets.
        on_send: called after each message sent.

    Attributes:
        has_more: `receive` stopped before it had taken everything.
    """

    def __init__(
        self,
        session: Session,
        dealer: Dealer,
        lease_ms: int | None,
        *,
        reconnect: Callable[[], None],
        on_send: Callable[[], None],
    ) -> None:
        self.has_more = False
        self._session = session
        self._dealer = dealer
        self._lease_ms = lease_ms
        self._reconnect = reconnect
        self._on_send = on_send
        self._litter_bytes = 0
        #: libzmq tries no more to connect; the next call makes it.
        self._is_refused = False
        self._woken: list[Call] = []
        self._renew_lease()

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, as far as known."""
        return self._dealer.is_up

    def start(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], window: int | None = None
    ) -> Call:
        """Make and send a request; raises what `Session.start` raises, and EndpointError."""
        self._notice_loss()
        if self._is_refused or not self._dealer.has_socket:
            self._connect_anew([])
        if self._litter_bytes > _MAX_LITTER_BYTES and not self._dealer.is_up:
            # Requests of callers who gave up before a daemon was there must not pile up for it.
            self._send_all_anew()
        call = self._session.start(kind, fields, window)
        if not self._send(call.payload):
            self._notice_loss()
            if not call.is_finished:
                self._send_all_anew()
        return call

    def take(self, call: Call) -> Any:
        """The next reply to `call`, or None; lets an answer's daemon go on. Raises what
        `Call.take` raises.
        """
        reply = call.take()
        if reply is not None and (grant := self._session.grant(call)) is not None:
            self._send(grant)
        return reply

    def give_up(self, call: Call) -> None:
        """Forget a call, and tell the daemon if it may have begun."""
        cancel = self._session.give_up(call)
        if cancel is not None:
            self._send(cancel)
            self._litter_bytes += len(call.payload) + len(cancel)

    def receive(self) -> Sequence[Call]:
        """File what has come; returns the calls that have something to take."""
        for _ in range(_MAX_BATCH):
            payload = self._dealer.receive()
            self.has_more = payload is not None
            if payload is None:
                break
            self._woken += self._session.receive(payload)
        if not self.has_more:
            self._notice_loss()
        woken, self._woken = self._woken, []
        return woken

    def probe(self) -> None:
        """Ask which daemon is there; its answer ends calls that an earlier one took along."""
        if self._dealer.is_up and (ping := self._session.probe()) is not None:
            self._send(ping)

    def give_up_all(self) -> Sequence[Call]:
        """Give up every unfinished call; returns them."""
        calls = self._session.open_calls
        for call in calls:
            self.give_up(call)
        return calls

    def renew_lease(self) -> None:
        """Tell the daemon that this client is still there, if it wants to be missed."""
        if self._dealer.is_up:
            self._renew_lease()

    def close(self, error: IpcError) -> Sequence[Call]:
        """End every call with `error`, and vanish; returns them."""
        self._dealer.close()
        return self._session.fail_all(error)

    def _notice_loss(self) -> None:
        """Look at libzmq's news. What came before a connection broke is taken first."""
        is_lost = self._dealer.has_broken()
        if self._dealer.refusal:
            error = NotWelcome(self._session.endpoint, self._dealer.refusal)
            failed = self._session.fail_all(error)
            self._litter_bytes += sum(len(call.payload) for call in failed)
            self._woken += failed
            self._dealer.refusal = ""
            self._is_refused = True
        if not is_lost:
            return
        while (payload := self._dealer.receive()) is not None:
            self._woken += self._session.receive(payload)
        aftermath = self._session.lost()
        self._woken += aftermath.failed
        with suppress(EndpointError):  # all calls have ended with it
            self._connect_anew(aftermath.repeated)

    def _send_all_anew(self) -> None:
        """Over a new connection; the one before was never up."""
        self._connect_anew([call.payload for call in self._session.open_calls])

    def _connect_anew(self, payloads: Sequence[bytes]) -> None:
        self._litter_bytes = 0
        self._is_refused = False
        try:
            self._reconnect()
        except EndpointError as error:
            self._woken += self._session.fail_all(error)
            raise
        self._renew_lease()
        for payload in payloads:
            self._send(payload)

    def _renew_lease(self) -> None:
        if self._lease_ms is not None:
            self._send(self._session.lease(self._lease_ms))

    def _send(self, payload: bytes) -> bool:
        is_sent = self._dealer.send(payload)
        self._on_send()
        return is_sent
