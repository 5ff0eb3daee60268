"""Who may connect over CURVE: answers libzmq's questions (ZAP), and says who a key stands for.

libzmq asks for each handshake on a CURVE socket, over `inproc://zeromq.zap.01` of the socket's own
context. What it may connect is decided there; whether it may still do so is looked up again at
each message, by the key that libzmq notes at every frame, so that a key that was removed ends at
once. (What a peer says of itself cannot take the place of that note: libzmq puts its own in first.)
Without an answer nobody connects (ZAP_ENFORCE_DOMAIN).

The protocol is pyzmq's (`zmq.auth`); the reading is a `Pump`, as for all sockets here, because
pyzmq's own asyncio task would end at the first exception, and every handshake with it.
Source: ZeroMQ RFC 27 (ZAP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq import auth

from ipc.curve_keys import KeyPair
from ipc.handler import LogHook, Role
from ipc.pump import Pump

#: Frames of a ZAP request by CURVE: six, and the client's key.
_MAX_FRAMES = 8
#: An unfinished handshake is given up after this [milliseconds].
_HANDSHAKE_MS = 10_000
#: Every domain has a name, since libzmq asks nobody about an empty one.
_DOMAIN_PREFIX = "rtcached"


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a public key stands for.

    Attributes:
        key: the public key, as Z85.
        name: what the operator calls it; in logs.
        role: `admin` may send administrators' requests.
        tenant: whose cache its requests use; empty is the default tenant.
    """

    key: str
    name: str
    role: Role
    tenant: str = ""


class Authority(Protocol):
    """Knows the keys in force. Called from the loop's thread."""

    def find(self, key: str) -> Principal | None:
        """Whom the public key (Z85) stands for; None: nobody, or nobody any more."""


@dataclass(frozen=True)
class Curve:
    """How a socket is protected.

    Attributes:
        pair: the daemon's keys.
        authority: says who a client is.
    """

    pair: KeyPair
    authority: Authority

    def apply(self, socket: zmq.Socket[bytes], domain: str) -> None:
        """Make it a CURVE server; to be called before it is bound."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.pair.secret.encode("ascii"))
        socket.set(zmq.ZAP_DOMAIN, domain.encode("ascii"))
        # Without this, libzmq lets everybody in when nobody answers.
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def domain_of(role: Role, tenant: str) -> str:
    """The name of a socket's domain, of printable ASCII."""
    return f"{_DOMAIN_PREFIX}.{role}.{tenant}"


def may_use(principal: Principal, role: Role, tenant: str) -> bool:
    """Whether a client may use the socket of this role and tenant.

    The administrators' socket takes their keys only, a tenant's own socket its keys and those of
    administrators; the first users' socket takes every key.
    """
    if role == "admin":
        return principal.role == "admin"
    return not tenant or principal.role == "admin" or principal.tenant == tenant


class ZapHandler:
    """Answers the handshakes of one context's sockets. Everything happens in the loop's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        domain: str,
        is_allowed: Callable[[str], bool],
        log: LogHook,
    ) -> None:
        """Args:
        context: of the sockets; it has no other handler.
        domain: of the sockets; nobody may connect to one of another.
        is_allowed: whether a public key (Z85) may connect.
        log: hears of every refusal.
        """
        self._zap = auth.Authenticator(context)
        guard = _Guard(is_allowed, log)
        self._zap.configure_curve_callback(domain, credentials_provider=guard)
        self._zap.start()
        self._pump = Pump(self._zap.zap_socket, self._answer, max_frames=_MAX_FRAMES)

    def stop(self) -> None:
        """Answer nothing more. May be called twice."""
        self._pump.stop()
        self._zap.stop()

    def _answer(self, frames: Sequence[bytes]) -> None:
        """One question; pyzmq's coroutine awaits nothing, so it ends in its first turn."""
        with suppress(StopIteration):
            self._zap.handle_zap_message(list(frames)).send(None)


class _Guard:
    """What pyzmq asks whether a key may connect."""

    def __init__(self, is_allowed: Callable[[str], bool], log: LogHook) -> None:
        self._is_allowed = is_allowed
        self._log = log

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the key may connect; what fails may not."""
        text = key.decode("ascii")
        is_allowed = False
        try:
            is_allowed = self._is_allowed(text)
        except Exception as error:  # without an answer, all handshakes would stop
            self._log("handler_failed", {"where": "key_check", "error": error})
        if not is_allowed:
            self._log("key_refused", {"domain": domain, "key": text})
        return is_allowed
