"""Which clients are there, and which of them read: the handler is told of those that do not.

Looks at the connections every half second, and at the number of all files of the process more
often; all of it runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ipc.connections import Connection, Connections
from ipc.crowd import Crowd
from ipc.endpoint import IpcAddress, TcpAddress
from ipc.handler import ClientRef, Counters, Handler, LogHook, Role
from ipc.outbox import Outbox

#: How often it is looked whether clients are still there [seconds].
SWEEP_S = 0.5


class Failed(Protocol):
    """Told that the handler has failed, and where."""

    def __call__(self, where: str, error: Exception) -> None: ...


class Attendance:
    """Of one server's clients.

    Attributes:
        connections: those that have sent something and have not been seen to end.
    """

    def __init__(
        self, handler: Handler, counters: Counters, *, role: Role, failed: Failed, log: LogHook
    ) -> None:
        """Args:
        failed: told of what the handler raises.
        """
        self.connections = Connections(self._on_end)
        self._handler = handler
        self._counters = counters
        self._role = role
        self._failed = failed
        self._log = log
        self._outbox: Outbox | None = None
        #: Callbacks that are on their way, so that one event is told once.
        self._told: set[tuple[str, ClientRef]] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    def start(self, outbox: Outbox, address: IpcAddress | TcpAddress) -> None:
        """Look from now on.

        Args:
            outbox: forgets what waits for clients that have gone.
            address: where the server listens.
        """
        self._outbox = outbox
        self._sweep_later()
        self._look(Crowd(address, self._on_cut))

    def stop(self) -> None:
        """Look no more. May be called twice, and before `start`."""
        for timer in (self._sweep_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self._sweep_timer = self._look_timer = None
        self._outbox = None

    def _sweep_later(self) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self.connections.sweep()
        self._sweep_later()

    def _look(self, crowd: Crowd) -> None:
        """Look again and again whether there are too many connections."""
        again_s = crowd.look(lambda: {connection.fd for connection in self.connections})
        loop = asyncio.get_running_loop()
        self._look_timer = loop.call_later(again_s, self._look, crowd)

    def _on_cut(self, num_cut: int, num_files: int) -> None:
        self._counters.connections_cut += num_cut
        fields = {"role": self._role, "num_cut": num_cut, "open_files": num_files}
        self._log("connections_cut", fields)

    def _on_end(self, connection: Connection) -> None:
        """A connection is found to have ended; called from the loop or before its next message."""
        self._counters.clients_gone += 1
        if self._outbox is not None:
            self._outbox.forget(connection.identity)
        if connection.ref is not None:
            self._tell_gone(connection.ref)

    def on_unreachable(self, client: ClientRef) -> None:
        """A message could not be sent; its connection is not one that comes meanwhile."""
        connection = self.connections.find(client.identity)
        self._tell_soon("client_gone", client, partial(self._end, connection))

    def _end(self, connection: Connection | None, client: ClientRef) -> None:
        if connection is None:
            self._tell_gone(client)
        elif self.connections.find(client.identity) is connection:
            self.connections.end(client.identity)

    def on_slow(self, client: ClientRef, is_new: bool) -> None:
        """It does not read; `is_new` if that was not told before."""
        if is_new:
            self._log_of("slow_reader", client)
        self._tell_soon("slow_reader", client, self._tell_slow)

    def _tell_slow(self, client: ClientRef) -> None:
        self._call("on_slow_reader", client, self._handler.on_slow_reader)

    def _tell_soon(
        self, event: str, client: ClientRef, callback: Callable[[ClientRef], None]
    ) -> None:
        """Call back from the loop, once for all sends until then."""
        key = (event, client)
        if key not in self._told:
            self._told.add(key)
            asyncio.get_running_loop().call_soon(self._tell_now, key, callback)

    def _tell_now(self, key: tuple[str, ClientRef], callback: Callable[[ClientRef], None]) -> None:
        self._told.discard(key)
        callback(key[1])

    def _tell_gone(self, client: ClientRef) -> None:
        self._log_of("client_gone", client)
        self._call("on_client_gone", client, self._handler.on_client_gone)

    def _log_of(self, event: str, client: ClientRef) -> None:
        fields = {"role": self._role, "tenant": client.tenant, "identity": client.identity.hex()}
        if client.key:
            fields["key"] = client.key
        self._log(event, fields)

    def _call(self, name: str, client: ClientRef, callback: Callable[[ClientRef], None]) -> None:
        try:
            callback(client)
        except Exception as error:
            self._failed(name, error)
