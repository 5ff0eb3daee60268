"""The async client: `async with Client() as client: async for piece in client.generate("…")`.

Every call ends: with its answer, with an exception of `ipc.errors`, or, when nothing comes from
the daemon for `timeout_s`, with `Timeout`. One client carries any number of calls at once. Use it
in one event loop; asyncio and uvloop both work. `ipc.sync_client` has the same names without await.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from ipc.answers import Answer, Piece, Result
from ipc.arguments import (
    Conversation,
    SamplingOptions,
    conversation,
    lease_ms,
    prompt_fields,
    sampling_fields,
)
from ipc.async_link import ClientLink
from ipc.client_calls import Calls, R
from ipc.client_many import Outcomes
from ipc.codec import Encoding
from ipc.curve_keys import CurveKeys
from ipc.dealer import DEFAULT_TIMEOUT_S
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import Closed, ProtocolError
from ipc.link import DEFAULT_WINDOW, LinkOptions
from ipc.many import DEFAULT_AT_ONCE, Prompt, request_of
from ipc.messages import AnyRequest, Chat, Generate, type_name
from ipc.session import Call

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AnswerStream:
    """An answer on its way: iterate over its pieces, or await `result()`, or first one and then
    the other.

    The request was sent when this object was made. Leaving the loop early, `aclose()`, and
    cancellation of the task that reads all send `cancel` to the daemon. Who reads slowly holds the
    daemon up, as far as it has room for what it computes; then the answer ends with the
    `finish_reason` "slow_reader".

    Attributes:
        id: the request's name on the wire, for `Client.cancel`.
    """

    def __init__(self, link: ClientLink, call: Call, timeout_s: float) -> None:
        self.id = str(call.id)
        self._link = link
        self._call = call
        self._timeout_s = timeout_s
        self._answer = Answer()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces as they come; raises what the methods of `Client` raise."""
        try:
            while not self._answer.is_done:
                reply = await self._link.next_reply(self._call, self._timeout_s)
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
        self._link.give_up(self._call)

    async def aclose(self) -> None:
        """The same as `cancel`, for `contextlib.aclosing`."""
        self.cancel()


class Client(Calls):
    """A connection to a daemon; to its admin socket for what is marked "Admin".

    Connecting does not wait for the daemon: the client connects, and reconnects, by itself. What
    was asked over a connection that broke is asked once more if that is harmless
    (`session.REPEATABLE`), else its call ends with `ConnectionLost`.

    Args:
        endpoint: where the daemon listens.
        timeout_s: how long a call waits for the next message, in seconds. A long answer does not
            time out while it grows.
        encoding: `msgpack`, or `json` for easier debugging.
        window: how many messages of a streamed answer may wait for its reader, in all places
            together; None: any number.
        lease_s: make a session: when the daemon has not heard of this client for so long, it
            drops the client's requests [1 to 3600 seconds]. Heartbeats are sent by themselves.
            None: the daemon notices only what libzmq notices.
        context: libzmq context to share; the process-wide one by default.
        curve: keys, where the daemon wants some: over TCP.

    Every method raises:
        ServerError: the daemon refused, or failed at, the request.
        Timeout: nothing came in time; the request is cancelled.
        ConnectionLost: the connection broke before the last reply.
        NotWelcome: the daemon does not let this client connect.
        ProtocolError: the daemon's reply makes no sense.
        Closed: the client is, or was meanwhile, closed.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        encoding: str = "msgpack",
        window: int | None = DEFAULT_WINDOW,
        lease_s: float | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        """Raises:
        ValueError: an argument that is wrong in itself.
        """
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._window = window
        self._options = LinkOptions(Encoding(encoding), lease_ms(lease_s), context, curve)
        self._link: ClientLink | None = None

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
        """Make the sockets; called from within the event loop. May be called twice.

        Raises:
            EndpointError: the endpoint is not one.
        """
        if self._link is None:
            self._link = ClientLink(self.endpoint, self._options)

    def close(self) -> None:
        """End all calls with `Closed` and drop what is not sent yet. May be called twice."""
        if self._link is not None:
            self._link.close()
            self._link = None

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

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        max_at_once: int = DEFAULT_AT_ONCE,
        in_order: bool = True,
        max_tries: int = 3,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Outcomes:
        """Answer many prompts, some of them at a time.

        Args:
            prompts: texts, lists of token ids, or mappings with the keyword arguments of `generate`
                or (with `messages`) of `chat`. Taken as room becomes free.
            max_at_once: requests that are begun and not handed out yet.
            in_order: hand outcomes out in the order of the prompts; False: as they end.
            max_tries: of a request that was refused for now, or lost with its connection.
            timeout_s: instead of the client's own.
            **sampling: for all of them; a prompt's own arguments come first.
        """

        def ask(prompt: Prompt) -> AnswerStream:
            # All of an answer is kept in any case: holding the daemon up would save nothing.
            call = self._open_link().start(*request_of(prompt, sampling), window=None)
            return AnswerStream(self._open_link(), call, self._patience(timeout_s))

        return Outcomes(
            prompts,
            ask,
            max_at_once=max_at_once,
            in_order=in_order,
            max_tries=max_tries,
        )

    def cancel_all(self) -> None:
        """Give up every unfinished request of this client; does not wait for the daemon."""
        if self._link is not None:
            self._link.give_up_all()

    def _stream(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], timeout_s: float | None
    ) -> AnswerStream:
        window = self._window if fields.get("stream", True) else None
        call = self._open_link().start(kind, fields, window)
        return AnswerStream(self._open_link(), call, self._patience(timeout_s))

    async def _ask(
        self,
        kind: type[AnyRequest],
        fields: Mapping[str, Any],
        expected: type[R],
        timeout_s: float | None = None,
    ) -> R:
        """One request, one reply."""
        link = self._open_link()
        call = link.start(kind, fields)
        try:
            reply = await link.next_reply(call, self._patience(timeout_s))
        finally:
            link.give_up(call)
        if not isinstance(reply, expected):
            raise ProtocolError(f"`{call.kind}` was answered by `{type_name(reply)}`")
        return reply

    def _patience(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _open_link(self) -> ClientLink:
        if self._link is None:
            raise Closed("the client is not open; use `async with Client(...)`")
        return self._link
