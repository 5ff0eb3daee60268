"""The client's half of the protocol: request ids, routing of replies, answers as they grow. Pure.

`Session` turns calls into bytes to send and received bytes into replies of the right call; the
async and the blocking client put a socket and a clock around it. It knows neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ipc.codec import Encoding, Limits, decode_reply, encode
from ipc.errors import Closed, IpcError, MessageTooLarge, ProtocolError, ServerError
from ipc.messages import (
    AnyReply,
    AnyRequest,
    CacheReport,
    Cancel,
    Done,
    Error,
    Logprobs,
    MessageId,
    Timing,
    Tokens,
    Usage,
    type_name,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message added to an answer.

    Attributes:
        text: new text; may be empty.
        token_ids: new tokens.
        logprobs: one entry per new token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer.

    Attributes:
        text: all of it.
        token_ids: all answer tokens.
        finish_reason: why it ended.
        stop: the stop string or token text that ended it, if one did.
        usage: token counts.
        timing: durations measured in the daemon.
        logprobs: one entry per token, if asked for.
        cache: why so many prompt tokens were cached, and not more; None if the request ended
            before it was admitted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | None
    usage: Usage
    timing: Timing
    logprobs: tuple[Logprobs, ...] = ()
    cache: CacheReport | None = None


class Call:
    """One request and the replies to it that nobody has taken yet.

    Attributes:
        id: its name on the wire.
        kind: the request's type word.
        is_finished: the last reply has come; nothing more will.
    """

    def __init__(self, message_id: MessageId, kind: str) -> None:
        self.id = message_id
        self.kind = kind
        self.is_finished = False
        self._num_tokens = 0
        self._inbox: deque[AnyReply | IpcError] = deque()

    def take(self) -> AnyReply | None:
        """The next reply, or None if it has not come yet.

        Raises:
            ServerError: the daemon refused, or failed at, this request.
            ProtocolError: the replies make no sense; the call is over.
            Closed: the client was closed.
        """
        if not self._inbox:
            if self.is_finished:
                raise Closed(f"the call `{self.kind}` is over")
            return None
        reply = self._inbox.popleft()
        if isinstance(reply, Error):
            raise ServerError(reply)
        if isinstance(reply, IpcError):
            raise reply
        return reply

    def put(self, reply: AnyReply) -> None:
        """File a reply that belongs to this call."""
        if isinstance(reply, (Tokens, Done)):
            if reply.index != self._num_tokens:
                self.fail(
                    ProtocolError(
                        f"answer {self.id}: expected token {self._num_tokens} next, got "
                        f"{reply.index}; a message was lost or repeated"
                    )
                )
                return
            self._num_tokens += len(reply.token_ids)
        self.is_finished = not isinstance(reply, Tokens)
        self._inbox.append(reply)

    def fail(self, error: IpcError) -> None:
        """End the call; what has come already can still be taken."""
        self.is_finished = True
        self._inbox.append(error)


class Session:
    """All calls of one connection.

    Args:
        encoding: of the requests; replies come in the same.
        limits: `max_wire_bytes` is kept here, since libzmq cuts the connection beyond it.

    Attributes:
        num_stale: replies to calls that were given up, or never made.
    """

    def __init__(self, encoding: Encoding = Encoding.MSGPACK, limits: Limits | None = None) -> None:
        self._encoding = encoding
        self._limits = limits or Limits()
        self._calls: dict[MessageId, Call] = {}
        self._last_id = 0
        self.num_stale = 0

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """Calls whose last reply has not come, oldest first."""
        return tuple(self._calls.values())

    def start(self, kind: type[AnyRequest], fields: Mapping[str, Any]) -> tuple[Call, bytes]:
        """Make a request; the bytes are to be sent at once.

        Raises:
            TypeError: a field does not exist or cannot be encoded. Nothing has started.
            ValueError: fields contradict each other. Nothing has started.
            MessageTooLarge: the wire cannot carry it. Nothing has started.
        """
        request = kind(self._next_id(), **fields)
        payload = encode(request, self._encoding)
        if len(payload) > self._limits.max_wire_bytes:
            raise MessageTooLarge(
                f"the request has {len(payload)} bytes, the wire carries "
                f"{self._limits.max_wire_bytes}"
            )
        call = Call(request.id, type_name(request))
        self._calls[call.id] = call
        return call, payload

    def receive(self, payload: bytes) -> Sequence[Call]:
        """File what came from the daemon.

        Returns:
            The calls that now have something to take.
        """
        try:
            reply = decode_reply(payload)
        except ProtocolError as error:
            # Whose reply it was cannot be known, and the daemon is not to be trusted any more.
            return self.fail_all(error)
        call = self._owner(reply)
        if call is None:
            self.num_stale += 1
            return ()
        call.put(reply)
        if call.is_finished:
            del self._calls[call.id]
        return (call,)

    def give_up(self, call: Call) -> bytes | None:
        """Forget a call; its late replies count as stale.

        Returns:
            A `cancel` to send, or None if the call was over already.
        """
        if self._calls.pop(call.id, None) is None:
            return None
        call.is_finished = True
        return encode(Cancel(self._next_id(), target=call.id), self._encoding)

    def fail_all(self, error: IpcError) -> Sequence[Call]:
        """End every call with `error`; returns them."""
        calls = self.open_calls
        self._calls.clear()
        for call in calls:
            call.fail(error)
        return calls

    def _owner(self, reply: AnyReply) -> Call | None:
        """The call a reply belongs to.

        An error without an id answers a message the daemon could not read; it can be attributed
        only while one call is open.
        """
        if reply.id is None:
            return next(iter(self._calls.values())) if len(self._calls) == 1 else None
        return self._calls.get(reply.id)

    def _next_id(self) -> MessageId:
        self._last_id += 1
        return MessageId(str(self._last_id))


class Answer:
    """Puts the messages of one answer together."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._done: Done | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last message has been added."""
        return self._done is not None

    def add(self, reply: AnyReply) -> Piece:
        """Add the next message.

        Raises:
            ProtocolError: it is not part of an answer.
        """
        if not isinstance(reply, (Tokens, Done)):
            raise ProtocolError(f"expected `tokens` or `done`, got `{type_name(reply)}`")
        if isinstance(reply, Done):
            self._done = reply
        piece = Piece(reply.text, reply.token_ids, reply.logprobs)
        self._pieces.append(piece)
        return piece

    def result(self) -> Result:
        """The whole answer.

        Raises:
            Closed: it was given up before its end.
        """
        done = self._done
        if done is None:
            raise Closed("the answer was given up before its end")
        return Result(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(token for piece in self._pieces for token in piece.token_ids),
            finish_reason=done.finish_reason,
            stop=done.stop,
            usage=done.usage,
            timing=done.timing,
            logprobs=tuple(entry for piece in self._pieces for entry in piece.logprobs),
            cache=done.cache,
        )
