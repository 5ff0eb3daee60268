"""The async client: `async with Client() as client: async for piece in client.generate("…")`.

Every call ends: with its answer, with an exception of `ipc.errors`, or, when nothing comes from
the daemon for `timeout_s`, with `Timeout`. One client carries any number of calls at once. Use it
in one event loop; asyncio and uvloop both work. `ipc.sync_client` has the same names without await.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from ipc.arguments import (
    Conversation,
    SamplingOptions,
    conversation,
    prompt_fields,
    sampling_fields,
)
from ipc.client_calls import Calls, R
from ipc.codec import Encoding, Limits
from ipc.dealer import DEFAULT_TIMEOUT_S, dealer_socket
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import Closed, ProtocolError, Timeout
from ipc.messages import (
    AnyRequest,
    Chat,
    Generate,
    type_name,
)
from ipc.pump import Pump
from ipc.session import Answer, Call, Piece, Result, Session

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AnswerStream:
    """An answer on its way: iterate over its pieces, or await `result()`, or first one and then
    the other.

    The request was sent when this object was made. Leaving the loop early, `aclose()`, and
    cancellation of the task that reads all send `cancel` to the daemon.

    Attributes:
        id: the request's name on the wire, for `Client.cancel`.
    """

    def __init__(self, client: Client, call: Call, timeout_s: float) -> None:
        self.id = str(call.id)
        self._client = client
        self._call = call
        self._timeout_s = timeout_s
        self._answer = Answer()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces as they come; raises what the methods of `Client` raise."""
        try:
            while not self._answer.is_done:
                reply = await self._client._next_reply(self._call, self._timeout_s)
                piece = self._answer.add(reply)
                if piece.text or piece.token_ids:
                    yield piece
        finally:
            self.cancel()

    async def result(self) -> Result:
        """The whole answer, pieces that were iterated over included.

        Raises:
            Closed: it was cancelled before its end.
        """
        async for _ in self:
            pass
        return self._answer.result()

    def cancel(self) -> None:
        """Give the answer up; nothing happens if it has ended."""
        self._client._give_up(self._call)

    async def aclose(self) -> None:
        """The same as `cancel`, for `contextlib.aclosing`."""
        self.cancel()


class Client(Calls):
    """A connection to a daemon; to its admin socket for what is marked "Admin".

    Connecting does not wait for the daemon: libzmq connects, and reconnects, by itself.

    Args:
        endpoint: where the daemon listens.
        timeout_s: how long a call waits for the next message, in seconds. A long answer does not
            time out while it grows.
        encoding: `msgpack`, or `json` for easier debugging.
        context: libzmq context to share; the process-wide one by default.

    Every method raises:
        ServerError: the daemon refused, or failed at, the request.
        Timeout: nothing came in time; the request is cancelled.
        ProtocolError: the daemon's reply makes no sense.
        Closed: the client is, or was meanwhile, closed.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        encoding: str = "msgpack",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._session = Session(Encoding(encoding))
        self._context = context
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._socket: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None

    async def __aenter__(self) -> Client:
        self.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Make the socket; called from within the event loop.

        Raises:
            EndpointError: the endpoint is not one.
        """
        self._socket = dealer_socket(self.endpoint, self._context)
        self._pump = Pump(self._socket, self._on_frames, max_frames=Limits().max_frames)

    def close(self) -> None:
        """End all calls with `Closed` and drop what is not sent yet. May be called twice."""
        if self._pump is not None:
            self._pump.stop()
            self._pump = None
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        self._wake(self._session.fail_all(Closed("the client was closed")))

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: Iterable[int] | None = None,
        prefix_id: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Continue a prompt, given as text or as token ids.

        Args:
            prompt: text to continue.
            prompt_ids: or its token ids.
            prefix_id: a registered prefix that stands before it.
            timeout_s: instead of the client's own.
            **sampling: see `messages.AnswerRequest`.

        Raises:
            TypeError, ValueError: an argument that is wrong in itself. Nothing was sent.
        """
        fields = prompt_fields(prompt, prompt_ids, prefix_id) | sampling_fields(sampling)
        return self._stream(Generate, fields, timeout_s)

    def chat(
        self,
        messages: Conversation,
        *,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Answer a conversation of `{"role": …, "content": …}`, oldest first.

        Raises:
            TypeError, ValueError: an argument that is wrong in itself. Nothing was sent.
        """
        fields = {"messages": conversation(messages)} | sampling_fields(sampling)
        return self._stream(Chat, fields, timeout_s)

    def cancel_all(self) -> None:
        """Give up every unfinished request of this client; does not wait for the daemon."""
        for call in self._session.open_calls:
            self._give_up(call)

    def _stream(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], timeout_s: float | None
    ) -> AnswerStream:
        return AnswerStream(self, self._start(kind, fields), self._patience(timeout_s))

    async def _ask(
        self,
        kind: type[AnyRequest],
        fields: Mapping[str, Any],
        expected: type[R],
        timeout_s: float | None = None,
    ) -> R:
        """One request, one reply."""
        call = self._start(kind, fields)
        try:
            reply = await self._next_reply(call, self._patience(timeout_s))
        finally:
            self._give_up(call)
        if not isinstance(reply, expected):
            raise ProtocolError(f"`{call.kind}` was answered by `{type_name(reply)}`")
        return reply

    def _patience(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _start(self, kind: type[AnyRequest], fields: Mapping[str, Any]) -> Call:
        if self._pump is None:
            raise Closed("the client is not open; use `async with Client(...)`")
        call, payload = self._session.start(kind, fields)
        self._pump.send((payload,))
        return call

    async def _next_reply(self, call: Call, timeout_s: float) -> Any:
        """The next reply to `call`; on a timeout the call is given up."""
        while (reply := call.take()) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[call.id] = waiter
            try:
                await asyncio.wait_for(waiter, timeout_s)
            except asyncio.TimeoutError as error:
                self._give_up(call)
                raise Timeout(self.endpoint, timeout_s) from error
            finally:
                self._waiters.pop(call.id, None)
        return reply

    def _give_up(self, call: Call) -> None:
        cancel = self._session.give_up(call)
        if cancel is not None and self._pump is not None:
            self._pump.send((cancel,))

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        self._wake(self._session.receive(frames[-1]))

    def _wake(self, calls: Iterable[Call]) -> None:
        for call in calls:
            waiter = self._waiters.pop(call.id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
