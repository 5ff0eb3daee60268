"""The daemon's end of the socket: a ROUTER that hands typed requests to a handler.

What it is not: it knows nothing of models or caches, keeps no request, and never waits. It reads
and checks messages, refuses the bad ones, sends replies, and notices clients that have gone or do
not read; who asked what, and when an answer is due, is the handler's matter. All of it runs in the
event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from types import TracebackType

import zmq

from ipc.attendance import Attendance
from ipc.auth import Curve, ZapHandler, domain_of
from ipc.codec import Limits, decode_request, encode
from ipc.endpoint import IpcAddress, SocketClaim, TcpAddress, parse_endpoint
from ipc.errors import EndpointError, MalformedMessage
from ipc.handler import ClientRef as ClientRef
from ipc.handler import Counters, Handler, LogHook
from ipc.handler import Role as Role
from ipc.in_flight import LARGE_BYTES
from ipc.messages import (
    AnyReply,
    AnyRequest,
    Error,
    without_stream,
)
from ipc.outbox import Outbox, ParkingLimits
from ipc.pump import Pump
from ipc.reception import Reception
from ipc.tcp_port import refusal

#: How often clients on TCP are asked whether they are there; after three times that they are not
#: [milliseconds].
_HEARTBEAT_MS = 5000
#: A server that ends takes what has been sent to it: until nothing has come for so long [seconds].
_QUIET_S = 0.05
#: After so long without a word a peer is asked, so often, at such intervals [seconds].
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_KEEPALIVE_INTVL: 10,
}


class Server:
    """Binds one endpoint for one role.

    Args:
        endpoint: `ipc://PATH` or `tcp://HOST:PORT`.
        handler: gets the requests.
        role: `user` refuses administrators' requests; `admin` accepts all.
        tenant: whose socket it is; every request that comes here is this tenant's. On a CURVE
            socket role and tenant are those of the client's key, and may not be others than these.
        name: what it is called; no other server of a daemon has it. Empty: `user`, `admin`, or
            `user:` and the tenant's name.
        limits: of a message.
        socket_mode: permissions of an ipc socket file.
        max_queued_replies: per client; a client that leaves more unread is a slow reader.
        parking: what is kept for slow readers beyond that.
        claim: the right to an ipc path, if the caller took it before; `close` releases it.
        curve: protects a TCP port; an ipc socket has its mode.
        insecure_tcp: listen on TCP without it.
        log: hears of refusals and failures.
    """

    def __init__(
        self,
        endpoint: str,
        handler: Handler,
        *,
        role: Role = "user",
        tenant: str = "",
        name: str = "",
        limits: Limits | None = None,
        socket_mode: int = 0o660,
        max_queued_replies: int = 1024,
        parking: ParkingLimits | None = None,
        claim: SocketClaim | None = None,
        curve: Curve | None = None,
        insecure_tcp: bool = False,
        log: LogHook | None = None,
    ) -> None:
        self._address = parse_endpoint(endpoint)
        self._handler = handler
        self._socket_mode = socket_mode
        self._max_queued_replies = max_queued_replies
        self._parking = parking
        self._log = log or _log_nothing
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._claim = claim
        self._curve = curve if isinstance(self._address, TcpAddress) else None
        self._zap: ZapHandler | None = None
        if isinstance(self._address, TcpAddress) and not (curve or insecure_tcp):
            raise EndpointError(f"{endpoint}: TCP needs CURVE, or --insecure-tcp")
        self._pump: Pump | None = None
        self._outbox: Outbox | None = None
        #: When a message came last, by the loop's clock [seconds].
        self._heard_s = 0.0
        self.endpoint = endpoint
        self.role = role
        self.tenant = tenant
        self.name = name or (f"{role}:{tenant}" if tenant else role)
        self.limits = limits or Limits()
        self.counters = Counters()
        self._reception = Reception(role, tenant, self.name, self._curve)
        self._attendance = Attendance(
            handler, self.counters, role=role, failed=self._handler_failed, log=self._log
        )
        self._connections = self._attendance.connections

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
            socket = self._open()
        except BaseException:
            await self.close(linger_ms=0)
            raise
        self._pump = Pump(
            socket,
            self._on_frames,
            max_frames=self.limits.max_frames + 1,
            inspector=self._connections,
        )
        self._outbox = Outbox(
            self._pump,
            self.counters,
            on_gone=self._attendance.on_unreachable,
            on_slow=self._attendance.on_slow,
            is_there=self._connections.is_there,
            limits=self._parking,
        )
        self._attendance.start(self._outbox, parse_endpoint(self.endpoint))

    async def close(self, *, linger_ms: int = 500) -> None:
        """Let nobody connect, deliver what was sent before, let replies leave, stop.

        The handler goes on to get messages, and to answer them, until none has come for a moment.
        May be called twice, and after a failed start.

        Args:
            linger_ms: how long each of that may take, and replies in libzmq's queues after it; 0:
                what was sent and is not read yet gets no reply.
        """
        if self._claim is not None:
            self._claim.hide()
        if self._outbox is not None and linger_ms > 0:
            await self._until_quiet(linger_ms / 1000)
            await self._outbox.drain(linger_ms / 1000)
        self._attendance.stop()
        if self._outbox is not None:
            self._outbox.stop()
            self._outbox = None
        if self._pump is not None:
            self._pump.stop()
            self._pump = None
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None
        if self._zap is not None:
            self._zap.stop()
            self._zap = None
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
        """Send one reply: at once, in order, never waiting; one to a slow reader is kept for it.

        Returns:
            False if it reaches nobody. Of a client that has gone, or does not read, the handler is
            told from the loop, once.

        Raises:
            TypeError, UnicodeEncodeError: the message cannot be encoded. Nothing was sent.
        """
        if self._outbox is None:
            return False
        payload = encode(message, client.encoding)
        return self._outbox.send(client, (*client.envelope, payload))

    def expel(self) -> int:
        """Cut the connections whose key is no longer what it was; to be called when keys changed.

        Their requests are cancelled, and libzmq is told "no" when they try to come back.

        Returns:
            How many there were.
        """
        if self._curve is None:
            return 0
        gone = [c for c in self._connections if not self._reception.is_as_it_was(c)]
        for connection in gone:
            connection.cut()
            self._connections.end(connection.identity)
        return len(gone)

    @property
    def is_insecure(self) -> bool:
        """Whether it listens on TCP without protection."""
        return isinstance(self._address, TcpAddress) and self._curve is None

    @property
    def num_connections(self) -> int:
        """Connections that have sent something and are still there, as far as is known."""
        return len(self._connections)

    @property
    def num_parked(self) -> int:
        """Replies that are kept for clients that do not read."""
        return 0 if self._outbox is None else self._outbox.num_parked

    def _open(self) -> zmq.Socket[bytes]:
        """The socket, bound; what there is of it when this fails is for `close`.

        Raises:
            EndpointError: it cannot be bound, or there is no room for it.
        """
        try:
            self._context = zmq.Context(io_threads=1)
            self._socket = self._context.socket(zmq.ROUTER)
            self._configure(self._socket)
            self._protect(self._context, self._socket)
        except zmq.ZMQError as error:
            raise EndpointError(f"cannot make a socket for {self.endpoint}: {error}") from error
        self._bind(self._socket)
        return self._socket

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.set(zmq.LINGER, 0)
        # Sending to a vanished client fails instead of being dropped without a word.
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDHWM, self._max_queued_replies)
        socket.set(zmq.MAXMSGSIZE, self.limits.max_wire_bytes)
        socket.copy_threshold = LARGE_BYTES
        if isinstance(self._address, TcpAddress):
            # A host that vanishes says nothing; the kernel hears of a process that does.
            socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
            # The kernel asks as well, for clients that know no heartbeats: within a minute.
            socket.set(zmq.TCP_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                socket.set(option, value)

    def _protect(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Let nobody connect whose key may not."""
        if self._curve is not None:
            domain = domain_of(self.role, self.tenant)
            self._zap = ZapHandler(context, domain, self._reception.is_welcome, self._log)
            self._curve.apply(socket, domain)

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
            raise refusal(self.endpoint, error.errno or 0) from error
        bound = socket.get(zmq.LAST_ENDPOINT)
        if self._claim is None and isinstance(bound, bytes):
            self.endpoint = bound.rstrip(b"\0").decode("ascii")

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        """One message of a client: identity, then what the client sent."""
        self.counters.received += 1
        self._heard_s = asyncio.get_running_loop().time()
        payload = frames[-1]
        connection = self._connections.find(frames[0])
        client = self._reception.ref(frames, connection)
        if connection is not None:
            connection.ref = client
        try:
            self._reception.check_frames(client, frames)
            request = decode_request(payload, self.limits)
            self._reception.check_role(client, request)
        except MalformedMessage as refusal:
            self._refuse(client, refusal)
            return
        self._handle(client, without_stream(request) if client.is_delimited else request)

    def _handle(self, client: ClientRef, request: AnyRequest) -> None:
        """Give the request to the handler; its failure costs this request only."""
        try:
            self._handler.on_message(client, request)
        except Exception as error:
            text = "the daemon failed on this request; its log has the details"
            self.send(client, Error(id=request.id, code="internal", message=text, retryable=False))
            self._handler_failed("on_message", error, request.id)

    def _refuse(self, client: ClientRef, refusal: MalformedMessage) -> None:
        self.counters.refused[refusal.code] += 1
        self.send(client, refusal.as_reply())
        # Not the sentence: it quotes what the client sent.
        self._log(
            "message_refused",
            {
                "code": refusal.code,
                "message_id": refusal.message_id,
                "role": self.role,
                "tenant": client.tenant,
            },
        )

    async def _until_quiet(self, timeout_s: float) -> None:
        """Deliver messages until none has come for a moment, at most so long."""
        loop = asyncio.get_running_loop()
        start_s = self._heard_s = loop.time()
        while (quiet_s := loop.time() - self._heard_s) < _QUIET_S:
            if loop.time() - start_s > timeout_s:
                return
            await asyncio.sleep(_QUIET_S - quiet_s)

    def _handler_failed(self, where: str, error: Exception, message_id: str | None = None) -> None:
        self.counters.handler_errors += 1
        self._log("handler_failed", {"where": where, "error": error, "message_id": message_id})


def _log_nothing(event: str, fields: Mapping[str, object]) -> None:
    """The log hook of a server that was given none."""
