"""A link for blocking calls: the sockets are read while a call waits.

Without a lease there is no thread behind it. With one, a thread of its own sends the heartbeats
while no call waits; a lock keeps the sockets to one thread at a time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import zmq

from ipc.dealer import Dealer
from ipc.errors import Closed, Timeout
from ipc.link import PROBE_S, Link, LinkOptions
from ipc.messages import AnyRequest
from ipc.session import Call, Session

#: Pause before the next look while no socket could be made [seconds].
_PAUSE_S = 0.1


class ClientLink:
    """Belongs to one thread at a time, but for its heartbeats.

    Attributes:
        endpoint: as given.
    """

    def __init__(self, endpoint: str, options: LinkOptions) -> None:
        """Raises:
        EndpointError: the endpoint is not one.
        """
        self.endpoint = endpoint
        self._lock = threading.RLock()
        self._dealer = Dealer(endpoint, options.context, options.curve)
        self._link = Link(
            Session(options.encoding, endpoint=endpoint),
            self._dealer,
            options.lease_ms,
            reconnect=self._dealer.renew,
            on_send=_do_nothing,
        )
        self._turn_s = min(PROBE_S, options.beat_s or PROBE_S)
        self._is_waiting = False
        self._has_ended = threading.Event()
        if options.beat_s is not None:
            beating = (weakref.ref(self), self._has_ended, options.beat_s)
            threading.Thread(target=_beat, args=beating, name="rtcache-lease", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """Whether it can be used no more; in a forked process, not at all."""
        return self._has_ended.is_set() or self._dealer.is_foreign

    def start(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], window: int | None = None
    ) -> Call:
        """Make and send a request; raises what `Session.start` raises, and Closed."""
        self._check_process()
        with self._lock:
            if self.is_closed:
                raise Closed("the client is closed")
            return self._link.start(kind, fields, window)

    def take(self, call: Call) -> Any:
        """The next reply to `call` if it has come, else None."""
        self._check_process()
        with self._lock:
            return self._link.take(call)

    def next_reply(self, call: Call, timeout_s: float) -> Any:
        """The next reply to `call`; on a timeout the call is given up.

        Raises:
            Timeout: nothing came.
        """
        end_s = time.monotonic() + timeout_s
        while (reply := self.take(call)) is None:
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0:
                self.give_up(call)
                raise Timeout(self.endpoint, timeout_s)
            self.wait(remaining_s)
        return reply

    def wait(self, wait_s: float) -> None:
        """File everything that has come; wait a while, but not longer, for the first of it."""
        turn_s = min(wait_s, self._turn_s)
        with self._lock:
            self._is_waiting = True
            try:
                if self._poll(turn_s):
                    self._receive()
                elif turn_s == self._turn_s:
                    self._beat()
            finally:
                self._is_waiting = False
                if self.is_closed:
                    self.close()

    def give_up(self, call: Call) -> None:
        """Forget a call, and tell the daemon unless it has ended."""
        if not self._dealer.is_foreign:
            with self._lock:
                self._link.give_up(call)

    def give_up_all(self) -> None:
        """Forget all calls."""
        if not self._dealer.is_foreign:
            with self._lock:
                self._link.give_up_all()

    def close(self) -> None:
        """End every call with `Closed`, and vanish; may be called twice, from another thread, and
        from a signal handler.
        """
        self._has_ended.set()
        if self._dealer.is_foreign:
            return
        self._dealer.wake()
        with self._lock:
            # A signal handler does not take the sockets from the wait that it interrupts.
            if not self._is_waiting:
                self._link.close(Closed("the client was closed"))

    def beat(self) -> None:
        """Send what must be sent while nobody waits, and keep what has come from piling up."""
        with self._lock:
            if not self.is_closed:
                self._receive()
                self._beat()

    def _beat(self) -> None:
        self._link.renew_lease()
        self._link.probe()

    def _receive(self) -> None:
        self._link.receive()
        while self._link.has_more:
            self._link.receive()

    def _poll(self, wait_s: float) -> bool:
        """Whether something has come."""
        if self.is_closed:
            raise Closed("the client was closed")
        if not self._dealer.has_socket:
            time.sleep(min(wait_s, _PAUSE_S))
            return False
        poller = zmq.Poller()
        poller.register(self._dealer.socket, zmq.POLLIN)
        poller.register(self._dealer.events, zmq.POLLIN)
        return bool(poller.poll(int(wait_s * 1000) + 1))

    def _check_process(self) -> None:
        """A lock that was held when the process was forked is never released in the new one.

        Raises:
            Closed: this is a forked process.
        """
        if self._dealer.is_foreign:
            raise Closed("the client belongs to the process that made it: make one here")


def _beat(link: weakref.ref[ClientLink], has_ended: threading.Event, beat_s: float) -> None:
    """The thread of the heartbeats; ends with its link."""
    while not has_ended.wait(beat_s):
        alive = link()
        if alive is None:
            return
        alive.beat()
        del alive


def _do_nothing() -> None:
    """Nobody has to be told of what is sent: who waits polls the sockets."""
