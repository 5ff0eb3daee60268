"""The blocking client: the names of `ipc.client` without await, for scripts and threads.

No event loop and no thread of its own: the socket is read while a call waits. One client carries
several answers at once (read them in turn), but belongs to one thread at a time. Every call ends,
at the latest when nothing has come from the daemon for `timeout_s`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
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
from ipc.codec import Encoding
from ipc.dealer import DEFAULT_TIMEOUT_S, dealer_socket
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import Closed, ProtocolError, Timeout
from ipc.messages import (
    AnyReply,
    AnyRequest,
    Chat,
    Generate,
    type_name,
)
from ipc.session import Answer, Call, Piece, Result, Session
from ipc.sync_client_calls import Calls, R

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AnswerStream:
    """An answer on its way: iterate over its pieces, or call `result()`, or first one and then
    the other.

    The request was sent when this object was made. Leaving the loop early, or an exception (such
    as KeyboardInterrupt) in it, sends `cancel` to the daemon.

    Attributes:
        id: the request's name on the wire, for `Client.cancel`.
    """

    def __init__(self, client: Client, call: Call, timeout_s: float) -> None:
        self.id = str(call.id)
        self._client = client
        self._call = call
        self._timeout_s = timeout_s
        self._answer = Answer()

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come; raises what the methods of `Client` raise."""
        try:
            while not self._answer.is_done:
                reply = self._client._next_reply(self._call, self._timeout_s)
                piece = self._answer.add(reply)
                if piece.text or piece.token_ids:
                    yield piece
        finally:
            self.cancel()

    def result(self) -> Result:
        """The whole answer, pieces that were iterated over included.

        Raises:
            Closed: it was cancelled before its end.
        """
        for _ in self:
            pass
        return self._answer.result()

    def cancel(self) -> None:
        """Give the answer up; nothing happens if it has ended."""
        self._client._give_up(self._call)


class Client(Calls):
    """A connection to a daemon; to its admin socket for what is marked "Admin".

    Connecting does not wait for the daemon: libzmq connects, and reconnects, by itself.

    Args:
        endpoint: where the daemon listens.
        timeout_s: how long a call waits for the next message, in seconds. A long answer does not
            time out while it grows.
        encoding: `msgpack`, or `json` for easier debugging.
        context: libzmq context to share; the process-wide one by default.

    Raises:
        EndpointError: the endpoint is not one.

    Every method raises:
        ServerError: the daemon refused, or failed at, the request.
        Timeout: nothing came in time; the request is cancelled.
        ProtocolError: the daemon's reply makes no sense.
        Closed: the client is closed.
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
        self._socket: zmq.Socket[bytes] | None = dealer_socket(endpoint, context)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls with `Closed` and drop what is not sent yet. May be called twice."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        self._session.fail_all(Closed("the client was closed"))

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

    def _ask(
        self,
        kind: type[AnyRequest],
        fields: Mapping[str, Any],
        expected: type[R],
        timeout_s: float | None = None,
    ) -> R:
        """One request, one reply."""
        call = self._start(kind, fields)
        try:
            reply = self._next_reply(call, self._patience(timeout_s))
        finally:
            self._give_up(call)
        if not isinstance(reply, expected):
            raise ProtocolError(f"`{call.kind}` was answered by `{type_name(reply)}`")
        return reply

    def _patience(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _start(self, kind: type[AnyRequest], fields: Mapping[str, Any]) -> Call:
        if self._socket is None:
            raise Closed("the client is closed")
        call, payload = self._session.start(kind, fields)
        self._socket.send(payload, zmq.NOBLOCK)
        return call

    def _next_reply(self, call: Call, timeout_s: float) -> AnyReply:
        """The next reply to `call`; on a timeout the call is given up."""
        end_s = time.monotonic() + timeout_s
        while (reply := call.take()) is None:
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0:
                self._give_up(call)
                raise Timeout(self.endpoint, timeout_s)
            self._receive(remaining_s)
        return reply

    def _receive(self, wait_s: float) -> None:
        """File everything that has come; wait at most `wait_s` for the first of it."""
        socket = self._socket
        if socket is None:
            raise Closed("the client was closed")
        if not socket.poll(int(wait_s * 1000) + 1, zmq.POLLIN):
            return
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._session.receive(frames[-1])

    def _give_up(self, call: Call) -> None:
        cancel = self._session.give_up(call)
        if cancel is not None and self._socket is not None:
            self._socket.send(cancel, zmq.NOBLOCK)
