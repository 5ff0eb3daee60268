"""What a server and its handler say to each other: who a client is, what the server has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ipc.codec import Encoding
from ipc.messages import AnyRequest

Role = Literal["user", "admin"]

#: Called with the name of an event and its fields; never with message contents.
LogHook = Callable[[str, Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class ClientRef:
    """One connection, and how its last message was written.

    Two refs are equal if they are the same connection, whatever encoding it used; so
    `(client, message.id)` names a request.

    Attributes:
        identity: libzmq's name of the connection; a client that reconnects gets a new one, unless
            it has chosen its own.
        role: what it may ask.
        tenant: whose cache it uses; empty is the default tenant's. Clients of two sockets are
            two clients, even if both chose the same identity.
        encoding: to answer in.
        socket: the name of the server it is connected to.
        key: what the operator calls its key; empty without CURVE.
        is_delimited: whether an empty frame stands before the payload, as REQ sockets want it.
        correlation: the frame before that, which ZMQ_REQ_CORRELATE puts there; empty without it.
    """

    identity: bytes
    role: Role
    encoding: Encoding = field(compare=False)
    is_delimited: bool = field(compare=False)
    tenant: str = ""
    socket: str = ""
    key: str = ""
    correlation: bytes = field(default=b"", compare=False)

    @property
    def envelope(self) -> tuple[bytes, ...]:
        """The frames that stand before the payload of every message to it."""
        if not self.is_delimited:
            return (self.identity,)
        if not self.correlation:
            return (self.identity, b"")
        return (self.identity, self.correlation, b"")


class Handler(Protocol):
    """What the server calls. Each call returns soon: the server reads nothing meanwhile."""

    def on_message(self, client: ClientRef, message: AnyRequest) -> None:
        """A well-formed request. If this raises, the client gets an `internal` error."""

    def on_client_gone(self, client: ClientRef) -> None:
        """The client has disconnected: it was looked for, or a message could not be delivered.

        Called from the loop, not from within `send`, for every connection that sent a message,
        and perhaps twice. Its requests should be cancelled.
        """

    def on_slow_reader(self, client: ClientRef) -> None:
        """The client does not read, and a bound of what is kept for it is reached.

        Called from the loop, not from within `send`, and again when more is sent. Its requests
        should be cancelled; their last replies are kept too.
        """


@dataclass(slots=True)
class Counters:
    """What the server has seen since it started; all only grow.

    Attributes:
        received: messages, bad ones included.
        sent: messages handed to libzmq.
        refused: error code → messages the server itself refused.
        handler_errors: exceptions out of the handler.
        clients_gone: connections that have ended, as far as it was noticed.
        unreachable: sends to a client that had gone.
        slow_readers: how often a client was found to be one.
        parked: messages that were kept for a client whose queue was full.
        connections_cut: connections that were ended because there were too many.
        dropped: messages for such a client that were beyond the bound, or that it never took.
    """

    received: int = 0
    sent: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    handler_errors: int = 0
    clients_gone: int = 0
    unreachable: int = 0
    slow_readers: int = 0
    parked: int = 0
    connections_cut: int = 0
    dropped: int = 0
