"""The clients' socket: a DEALER, and what libzmq tells of its connection: when it is up, when it
broke, and when the daemon refuses it.

libzmq connects, and reconnects, by itself. But what was on its way when a connection broke is lost
silently, and what was not sent yet goes to whoever is there next. So the clients make a new socket
after every broken connection: then it is certain that nothing asked before reaches the next
daemon unless it is sent again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ipc.curve_keys import CurveKeys
from ipc.errors import EndpointError

#: How long a call waits for the next message [seconds].
DEFAULT_TIMEOUT_S = 60.0

#: libzmq asks the other side so often whether it is there; it answers without the daemon's help.
_HEARTBEAT_MS = 5_000
#: So long without any sign, and the connection counts as broken, on either side.
_HEARTBEAT_TIMEOUT_MS = 20_000
#: First and longest pause between two attempts to connect.
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_MONITOR_STOPPED
)

#: What a refused handshake means, by the event that tells of it.
_REFUSALS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not in the daemon's list of keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the keys of client and daemon do not belong together, or "
    "only one side uses CURVE",
}
#: A daemon with another key than the client expects ends the handshake without a word. It may be
#: chance, of a daemon that is being stopped, once or twice.
_MAX_BROKEN_HANDSHAKES = 3
_WRONG_SERVER_KEY = "it ends the handshake: the server key is not its public key, most likely"


#: A client needs three sockets of its context; libzmq's own limit, 1023, were few hundred clients.
_MAX_SOCKETS = 16_384


class _SharedContext(zmq.Context["zmq.Socket[bytes]"]):
    """The process-wide context of clients that are given none; `instance()` makes it anew after a
    fork.
    """

    _instance = None
    _instance_pid = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)


class Dealer:
    """The sockets of a client; one owner, one thread at a time.

    Attributes:
        socket: the DEALER.
        events: where libzmq tells of its connection.
        is_up: the daemon has answered libzmq's handshake, and the connection has not broken since.
        refusal: why the daemon did not accept the last attempt to connect; empty: it did, or there
            was none.
    """

    socket: zmq.Socket[bytes]
    events: zmq.Socket[bytes]

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        """Args:
        endpoint: where the daemon listens.
        context: libzmq context to share; the process-wide one by default.
        curve: keys, where the daemon wants some.

        Raises:
            EndpointError: the endpoint is not one.
        """
        self._endpoint = endpoint
        self._context = context
        self._curve = curve
        self._process_id = os.getpid()
        self._open()

    def send(self, payload: bytes) -> bool:
        """Hand a message to libzmq; never waits.

        Returns:
            False if it was dropped: there is no socket, or libzmq does not try to connect any more,
            since the daemon has refused it (of which there is news) or since what listens there is
            no daemon (of which there may be none).
        """
        if not self.has_socket:
            return False
        try:
            self.socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message, or None if there is none yet. A message is one frame."""
        if not self.has_socket:
            return None
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def has_broken(self) -> bool:
        """Take libzmq's news; whether a connection that was up has ended. It stays so until
        `renew`, since whoever asks may be interrupted.
        """
        while self.has_socket and not self._has_broken and self.events.poll(0):
            self._note(self.events.recv_multipart(zmq.NOBLOCK))
        return self._has_broken

    @property
    def has_socket(self) -> bool:
        """False once it is closed, when no new socket could be made, and in a forked process."""
        return not (self.socket.closed or self.is_foreign)

    @property
    def is_foreign(self) -> bool:
        """Whether another process made it: libzmq's threads, and its answers, are left there."""
        return os.getpid() != self._process_id

    def wake(self) -> None:
        """Have `events` report that they end; from any thread, and from a signal handler."""
        if self.has_socket:
            with suppress(zmq.ZMQError):  # it is being closed, or its context terminated
                self.socket.disable_monitor()

    def renew(self) -> None:
        """Drop all that was not sent or received yet, and connect anew.

        Raises:
            EndpointError: there is no room for another socket; there is none now.
        """
        self.close()
        self._open()

    def close(self) -> None:
        """Vanish; may be called twice."""
        if self.has_socket:
            self.wake()
            self.socket.close(linger=0)
            self.events.close(linger=0)

    def _open(self) -> None:
        """Both sockets, or, whatever interrupts it, none."""
        self.is_up = False
        self.refusal = ""
        self._has_broken = False
        self._num_broken_handshakes = 0
        try:
            socket = _unconnected(self._context)
            # Before it connects, so that no event is missed.
            events = _monitor(socket)
        except zmq.ZMQError as error:
            raise EndpointError(f"cannot make a socket for {self._endpoint}: {error}") from error
        try:
            self._connect(socket)
        except BaseException:
            socket.close(linger=0)
            events.close(linger=0)
            raise
        self.socket, self.events = socket, events

    def _connect(self, socket: zmq.Socket[bytes]) -> None:
        if self._curve is not None:
            self._curve.apply(socket)
        if "://[" in self._endpoint:
            socket.set(zmq.IPV6, 1)
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise EndpointError(
                f"cannot connect to {self._endpoint!r}: expected ipc://PATH or tcp://HOST:PORT"
            ) from error

    def _note(self, frames: Sequence[bytes]) -> None:
        """Take one piece of news."""
        event = int(parse_monitor_message(list(frames))["event"])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return
        was_up, self.is_up = self.is_up, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._has_broken = was_up and not self.is_up
        if self.is_up:
            self.refusal = ""
            self._num_broken_handshakes = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._curve is not None:
            self._num_broken_handshakes += 1
            if self._num_broken_handshakes == _MAX_BROKEN_HANDSHAKES:
                self.refusal = _WRONG_SERVER_KEY
        elif event in _REFUSALS:
            self.refusal = _REFUSALS[event]


def _unconnected(context: zmq.Context[zmq.Socket[bytes]] | None) -> zmq.Socket[bytes]:
    """A DEALER that never keeps a program from ending and notices a peer that is silently gone."""
    socket = (context or _SharedContext.instance()).socket(zmq.DEALER)
    # Closing drops what is unsent; a daemon that is away must not keep the program alive.
    socket.set(zmq.LINGER, 0)
    # Requests wait in memory while the daemon is away; their calls time out.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
    return socket


def _monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Where libzmq tells of the connection; if there is no room for it, both are closed."""
    try:
        events = socket.get_monitor_socket(_EVENTS)
        # A client that waits for nothing takes no news, while libzmq goes on to connect. At a limit
        # its thread would wait, and with it every client of the process.
        events.set(zmq.RCVHWM, 0)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return events
