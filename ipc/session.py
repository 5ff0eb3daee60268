"""The client's half of the protocol: request ids, routing of replies, what a lost connection means
for whom. Pure.

`Session` turns calls into bytes to send and received bytes into replies of the right call; `Link`
puts a socket around it, the async and the blocking client a clock. It knows neither. A call may be
given up within any other method: by a signal handler, or when an answer that nobody reads is
collected.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ipc.codec import Encoding, Limits, decode_reply, encode
from ipc.errors import Closed, ConnectionLost, IpcError, MessageTooLarge, ProtocolError, ServerError
from ipc.messages import (
    AnyReply,
    AnyRequest,
    Cancel,
    Credit,
    Done,
    Error,
    Info,
    MessageId,
    Opened,
    OpenSession,
    Ping,
    Pong,
    Tokens,
    type_name,
)

#: What is asked once more by itself after a lost connection: it changes nothing, and cannot be
#: what the daemon died of. Whether to repeat the rest is for the caller to say.
REPEATABLE = frozenset(
    {"cancel", "config", "explain", "info", "list", "ping", "show", "stats", "tokenize"}
)


class Call:
    """One request and the replies to it that nobody has taken yet.

    Attributes:
        id: its name on the wire.
        kind: the request's type word.
        payload: the request as it was sent.
        window: `tokens` messages that the daemon may be ahead; None: no limit.
        incarnation: which daemon it was sent to, as far as known.
        is_finished: the last reply has come; nothing more will.
    """

    def __init__(
        self, message_id: MessageId, kind: str, payload: bytes = b"", window: int | None = None
    ) -> None:
        self.id = message_id
        self.kind = kind
        self.payload = payload
        self.window = window
        self.incarnation = ""
        self.is_finished = False
        self._was_repeated = False
        self._num_tokens = 0
        self._num_ungranted = 0
        self._inbox: deque[AnyReply | IpcError] = deque()

    def take(self) -> AnyReply | None:
        """The next reply, or None if it has not come yet.

        Raises:
            ServerError: the daemon refused, or failed at, this request.
            ProtocolError: the replies make no sense; the call is over.
            ConnectionLost: the connection broke before the last reply.
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
        self._num_ungranted += isinstance(reply, Tokens)
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
        self.is_finished = self.is_finished or not isinstance(reply, Tokens)
        self._inbox.append(reply)

    def fail(self, error: IpcError) -> None:
        """End the call; what has come already can still be taken."""
        self.is_finished = True
        self._inbox.append(error)

    def repeat(self) -> bytes | None:
        """What to send once more after a lost connection; None if it is not to be repeated."""
        if self._was_repeated or self.kind not in REPEATABLE:
            return None
        self._was_repeated = True
        self.incarnation = ""
        return self.payload

    def credit_due(self) -> int:
        """How many messages to grant now: those taken, once they are half of the window."""
        if self.window is None or self.is_finished or 2 * self._num_ungranted < self.window:
            return 0
        due, self._num_ungranted = self._num_ungranted, 0
        return due


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What a lost connection leaves to do.

    Attributes:
        repeated: requests to send over the next connection.
        failed: calls that ended with `ConnectionLost`.
    """

    repeated: Sequence[bytes]
    failed: Sequence[Call]


class Session:
    """All calls of one client.

    Args:
        encoding: of the requests; replies come in the same.
        limits: `max_wire_bytes` is kept here, since libzmq cuts the connection beyond it.
        endpoint: for the messages of errors.

    Attributes:
        incarnation: which daemon answers, as far as known; empty: not known.
        num_stale: replies to calls that were given up, or never made.
    """

    def __init__(
        self,
        encoding: Encoding = Encoding.MSGPACK,
        limits: Limits | None = None,
        endpoint: str = "",
    ) -> None:
        self.incarnation = ""
        self.num_stale = 0
        self._encoding = encoding
        self._limits = limits or Limits()
        self.endpoint = endpoint
        self._calls: dict[MessageId, Call] = {}
        self._numbers = itertools.count(1)
        self._probe: MessageId | None = None
        self._lease: MessageId | None = None
        self._lease_error: Error | None = None

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """Calls whose last reply has not come, oldest first."""
        return tuple(self._calls.values())

    def start(
        self, kind: type[AnyRequest], fields: Mapping[str, Any], window: int | None = None
    ) -> Call:
        """Make a request; its `payload` is to be sent at once.

        Args:
            kind: type of the request.
            fields: its fields besides `id`.
            window: for answers: how many messages the daemon may be ahead of the reader.

        Raises:
            TypeError: a field does not exist or cannot be encoded. Nothing has started.
            ValueError: fields contradict each other, or a number is too large for the wire. Nothing
                has started.
            MessageTooLarge: the wire cannot carry it. Nothing has started.
            ServerError: the daemon refused this client's lease. Nothing has started.
        """
        if self._lease_error is not None:
            raise ServerError(self._lease_error)
        if window is not None:
            fields = {**fields, "credit": window}
        request = kind(self._next_id(), **fields)
        try:
            payload = encode(request, self._encoding)
        except OverflowError as error:
            text = f"a number is too large for `{type_name(request)}`: {error}"
            raise ValueError(text) from error
        if len(payload) > self._limits.max_wire_bytes:
            raise MessageTooLarge(
                f"the request has {len(payload)} bytes, the wire carries "
                f"{self._limits.max_wire_bytes}"
            )
        call = Call(request.id, type_name(request), payload, window)
        call.incarnation = self.incarnation
        self._calls[call.id] = call
        return call

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
        failed: Sequence[Call] = ()
        if isinstance(reply, (Pong, Opened, Info)):
            failed = self._heard_from(reply.incarnation)
        if self._is_own(reply):
            return failed
        call = self._owner(reply)
        if call is None:
            self.num_stale += 1
            return failed
        call.put(reply)
        if call.is_finished:
            self._calls.pop(call.id, None)
        return (*failed, call)

    def give_up(self, call: Call) -> bytes | None:
        """Forget a call; its late replies count as stale.

        Returns:
            A `cancel` to send, or None if the call was over already.
        """
        if self._calls.pop(call.id, None) is None:
            return None
        call.is_finished = True
        return encode(Cancel(self._next_id(), target=call.id), self._encoding)

    def grant(self, call: Call) -> bytes | None:
        """A `credit` to send, if the reader has taken enough of this answer."""
        due = call.credit_due()
        if not due:
            return None
        return encode(Credit(self._next_id(), target=call.id, credit=due), self._encoding)

    def probe(self) -> bytes | None:
        """A `ping` to send: its answer tells which daemon is there. None while one is under way."""
        if self._probe is not None:
            return None
        self._probe = self._next_id()
        return encode(Ping(self._probe), self._encoding)

    def lease(self, lease_ms: int) -> bytes:
        """An `open` to send: makes a session, or renews it."""
        self._lease = self._next_id()
        return encode(OpenSession(self._lease, lease_ms=lease_ms), self._encoding)

    def lost(self) -> Aftermath:
        """The connection broke: nothing that was asked over it will be answered."""
        self.incarnation = ""
        self._probe = self._lease = None
        repeated = []
        failed = []
        for call in self.open_calls:
            payload = call.repeat()
            if payload is None:
                failed.append(call)
            else:
                repeated.append(payload)
        self._lose(failed)
        return Aftermath(repeated, failed)

    def fail_all(self, error: IpcError) -> Sequence[Call]:
        """End every call with `error`; returns them."""
        calls = self.open_calls
        for call in calls:
            call.fail(error)
            self._calls.pop(call.id, None)
        return calls

    def _heard_from(self, incarnation: str) -> Sequence[Call]:
        """Which daemon answers; fails what an earlier one took along.

        Only behind a proxy does a daemon change while the connection stays.
        """
        before, self.incarnation = self.incarnation, incarnation
        if not before:
            for call in self.open_calls:
                call.incarnation = call.incarnation or incarnation
        failed = [call for call in self.open_calls if call.incarnation not in ("", incarnation)]
        self._lose(failed)
        return failed

    def _lose(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.fail(ConnectionLost(self.endpoint, call.kind))
            self._calls.pop(call.id, None)

    def _is_own(self, reply: AnyReply) -> bool:
        """Whether it answers what no caller has asked."""
        if reply.id is None:
            return False
        if reply.id == self._probe:
            self._probe = None
            return True
        if reply.id == self._lease:
            self._lease_error = reply if isinstance(reply, Error) else None
            return True
        return False

    def _owner(self, reply: AnyReply) -> Call | None:
        """The call a reply belongs to.

        An error without an id answers a message the daemon could not read; it can be attributed
        only while one call is open.
        """
        if reply.id is None:
            return next(iter(self._calls.values())) if len(self._calls) == 1 else None
        return self._calls.get(reply.id)

    def _next_id(self) -> MessageId:
        return MessageId(str(next(self._numbers)))
