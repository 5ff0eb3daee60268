"""The daemon's end of the socket: a ROUTER that hands typed requests to a handler.

What it is not: it knows nothing of models or caches, keeps no request, and never waits. It reads
and checks messages, refuses the bad ones, and sends replies; who asked what, and when an answer is
due, is the handler's matter. All of it runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

import zmq

from ipc.codec import Encoding, Limits, decode_request, encode, sniff
from ipc.endpoint import IpcAddress, SocketClaim, parse_endpoint
from ipc.errors import EndpointError, MalformedMessage
from ipc.messages import (
    ADMIN_REQUESTS,
    AnyReply,
    AnyRequest,
    Error,
    type_name,
    without_stream,
)
from ipc.pump import Pump

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
        role: which kind of socket it is connected to.
        tenant: whose socket that is; empty is the default tenant's. Clients of two sockets are
            two clients, even if both chose the same identity.
        encoding: to answer in.
        is_delimited: whether an empty frame stands before the payload, as REQ sockets want it.
    """

    identity: bytes
    role: Role
    encoding: Encoding = field(compare=False)
    is_delimited: bool = field(compare=False)
    tenant: str = ""


class Handler(Protocol):
    """What the server calls. Each call returns soon: the server reads nothing meanwhile."""

    def on_message(self, client: ClientRef, message: AnyRequest) -> None:
        """A well-formed request. If this raises, the client gets an `internal` error."""

    def on_client_gone(self, client: ClientRef) -> None:
        """A message could not be delivered because the client has disconnected.

        Called from the loop, not from within `send`. Its requests should be cancelled.
        """

    def on_slow_reader(self, client: ClientRef) -> None:
        """A message was dropped because the client does not read and its queue is full.

        Called from the loop, not from within `send`. Its answers have holes from now on, so its
        requests should be cancelled.
        """


@dataclass(slots=True)
class Counters:
    """What the server has seen since it started; all only grow.

    Attributes:
        received: messages, bad ones included.
        sent: messages handed to libzmq.
        refused: error code → messages the server itself refused.
        handler_errors: exceptions out of the handler.
        clients_gone: sends to a client that had disconnected.
        slow_readers: sends to a client whose queue was full.
    """

    received: int = 0
    sent: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    handler_errors: int = 0
    clients_gone: int = 0
    slow_readers: int = 0

    @property
    def unanswerable(self) -> int:
        """Replies that reached nobody."""
        return self.clients_gone + self.slow_readers


class Server:
    """Binds one endpoint for one role.

    Args:
        endpoint: `ipc://PATH` or `tcp://HOST:PORT`.
        handler: gets the requests.
        role: `user` refuses administrators' requests; `admin` accepts all.
        tenant: whose socket it is; every request that comes here is this tenant's.
        limits: of a message.
        socket_mode: permissions of an ipc socket file.
        max_queued_replies: per client; a client that leaves more unread is a slow reader.
        claim: the right to an ipc path, if the caller took it before; `close` releases it.
        log: hears of refusals and failures.
    """

    def __init__(
        self,
        endpoint: str,
        handler: Handler,
        *,
        role: Role = "user",
        tenant: str = "",
        limits: Limits | None = None,
        socket_mode: int = 0o660,
        max_queued_replies: int = 4096,
        claim: SocketClaim | None = None,
        log: LogHook | None = None,
    ) -> None:
        self._address = parse_endpoint(endpoint)
        self._handler = handler
        self._socket_mode = socket_mode
        self._max_queued_replies = max_queued_replies
        self._log = log or _log_nothing
        #: Callbacks that are on their way, so that one event is told once.
        self._told: set[tuple[str, ClientRef]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._claim = claim
        self._pump: Pump | None = None
        self.endpoint = endpoint
        self.role = role
        self.tenant = tenant
        self.limits = limits or Limits()
        self.counters = Counters()

    def __repr__(self) -> str:
        state = "listening" if self._pump else "closed"
        counters = self.counters
        return (
            f"<Server {self.role} {self.endpoint} {state}: {counters.received} received, "
            f"{counters.sent} sent, {counters.refused.total() if counters.refused else 0} refused>"
        )

    async def start(self) -> None:
        """Bind and begin to deliver; on return clients can connect.

        Raises:
            EndpointBusy: another daemon serves here.
            EndpointError: the endpoint cannot be bound. Nothing is left behind.
        """
        if self._claim is None and isinstance(self._address, IpcAddress):
            self._claim = SocketClaim(self._address.path)
        try:
            self._context = zmq.Context(io_threads=1)
            self._socket = self._context.socket(zmq.ROUTER)
            self._configure(self._socket)
            self._bind(self._socket)
        except BaseException:
            await self.close(linger_ms=0)
            raise
        self._pump = Pump(self._socket, self._on_frames, max_frames=self.limits.max_frames + 1)

    async def close(self, *, linger_ms: int = 500) -> None:
        """Stop receiving, give queued replies `linger_ms` to leave, remove the socket file.

        May be called twice, and after a failed start.
        """
        if self._pump is not None:
            self._pump.stop()
            self._pump = None
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None
        if self._context is not None:
            # Waits for the lingering replies, so not in the loop's thread.
            await asyncio.get_running_loop().run_in_executor(None, self._context.term)
            self._context = None
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def send(self, client: ClientRef, message: AnyReply) -> bool:
        """Send one reply: at once, in order, never waiting.

        Returns:
            False if it reached nobody; then the handler is told from the loop, once.

        Raises:
            TypeError, UnicodeEncodeError: the message cannot be encoded. Nothing was sent.
        """
        if self._pump is None:
            return False
        payload = encode(message, client.encoding)
        head = (client.identity, b"") if client.is_delimited else (client.identity,)
        try:
            self._pump.send((*head, payload))
        except zmq.Again:
            self.counters.slow_readers += 1
            self._tell("slow_reader", client, self._handler.on_slow_reader)
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters.clients_gone += 1
            self._tell("client_gone", client, self._handler.on_client_gone)
            return False
        self.counters.sent += 1
        return True

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.set(zmq.LINGER, 0)
        # Sending to a vanished client fails instead of being dropped without a word.
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDHWM, self._max_queued_replies)
        socket.set(zmq.MAXMSGSIZE, self.limits.max_wire_bytes)

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        listener_fd = -1
        if self._claim is not None:
            listener_fd = self._claim.listen(self._socket_mode)
            socket.set(zmq.USE_FD, listener_fd)
        if self.endpoint.startswith("tcp://["):
            socket.set(zmq.IPV6, 1)
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            if listener_fd >= 0:
                os.close(listener_fd)
            raise EndpointError(f"cannot bind {self.endpoint}: {error.strerror}") from error
        bound = socket.get(zmq.LAST_ENDPOINT)
        if self._claim is None and isinstance(bound, bytes):
            self.endpoint = bound.rstrip(b"\0").decode("ascii")

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        """One message of a client: identity, then what the client sent."""
        self.counters.received += 1
        payload = frames[-1]
        client = ClientRef(
            identity=frames[0],
            role=self.role,
            encoding=sniff(payload) or Encoding.MSGPACK,
            is_delimited=len(frames) > 2 and not frames[1],
            tenant=self.tenant,
        )
        try:
            self._check_frames(client, frames)
            request = decode_request(payload, self.limits)
            self._check_role(request)
        except MalformedMessage as refusal:
            self._refuse(client, refusal)
            return
        self._handle(client, without_stream(request) if client.is_delimited else request)

    def _check_frames(self, client: ClientRef, frames: Sequence[bytes]) -> None:
        expected = 3 if client.is_delimited else 2
        if len(frames) != expected:
            raise MalformedMessage(
                "bad_frames",
                "expected one frame with the message, or an empty frame and one with the message",
            )

    def _check_role(self, request: AnyRequest) -> None:
        if self.role != "admin" and isinstance(request, ADMIN_REQUESTS):
            raise MalformedMessage(
                "forbidden",
                f"`{type_name(request)}` is accepted on the admin socket only",
                request.id,
            )

    def _handle(self, client: ClientRef, request: AnyRequest) -> None:
        """Give the request to the handler; its failure costs this request only."""
        try:
            self._handler.on_message(client, request)
        except Exception as error:
            text = "the daemon failed on this request; its log has the details"
            self.send(client, Error(id=request.id, code="internal", message=text, retryable=False))
            self._handler_failed("on_message", error)

    def _refuse(self, client: ClientRef, refusal: MalformedMessage) -> None:
        self.counters.refused[refusal.code] += 1
        self.send(client, refusal.as_reply())
        # Not the sentence: it quotes what the client sent.
        self._log("message_refused", {"code": refusal.code})

    def _tell(self, event: str, client: ClientRef, callback: Callable[[ClientRef], None]) -> None:
        """Call the handler soon, and once for all sends that failed until then."""
        key = (event, client)
        if key not in self._told:
            self._told.add(key)
            asyncio.get_running_loop().call_soon(self._tell_now, key, callback)

    def _tell_now(self, key: tuple[str, ClientRef], callback: Callable[[ClientRef], None]) -> None:
        event, client = key
        self._told.discard(key)
        fields = {"role": self.role, "tenant": self.tenant, "identity": client.identity.hex()}
        self._log(event, fields)
        try:
            callback(client)
        except Exception as error:
            self._handler_failed(f"on_{event}", error)

    def _handler_failed(self, where: str, error: Exception) -> None:
        self.counters.handler_errors += 1
        self._log("handler_failed", {"where": where, "error": error})


def _log_nothing(event: str, fields: Mapping[str, object]) -> None:
    """The log hook of a server that was given none."""
