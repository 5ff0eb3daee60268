"""A running daemon that is sent anything at all, and what it owes for it.

What is owed follows from `ipc.codec.decode_request`, asked here in the test's process: every
message gets exactly one last reply, under its own id if that could be read, else under none;
nothing that `decode_reply` cannot read ever comes, and no error that would be the daemon's fault.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import zmq

from ipc import messages as wire
from ipc.codec import Encoding, Limits, decode_reply, decode_request, encode
from ipc.errors import MalformedMessage
from tests.support.rtcached import PATIENCE_S

#: Requests that are answered by nothing, unless they are refused.
UNANSWERED = tuple(kind for name in ("Credit",) if (kind := getattr(wire, name, None)) is not None)

#: Errors that no message, however odd, may bring about on a device that works.
OUR_FAULT = frozenset({"internal", "acl", "device", "device_lost", "device_hung", "step_timeout"})

Frames = Sequence[bytes]


@dataclass
class Account:
    """Last replies that are owed, and those that came: by id, None for what showed no id.

    Attributes:
        kinds: the types of all replies, and the codes of errors, for tests that want to know what
            a fuzzer has reached.
    """

    owed: Counter[str | None] = field(default_factory=Counter)
    paid: Counter[str | None] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def is_settled(self) -> bool:
        return self.paid.total() >= self.owed.total()

    def difference(self) -> str:
        """What is missing and what is too much, for people."""
        return f"missing: {dict(self.owed - self.paid)}, too much: {dict(self.paid - self.owed)}"


def has_envelope(head: Frames) -> bool:
    """Whether these are frames that may stand before a message, and so before its replies."""
    is_correlated = len(head) == 2 and len(head[0]) == 4
    return not head or (head[-1] == b"" and (len(head) == 1 or is_correlated))


def owed_for(frames: Frames, limits: Limits) -> tuple[bool, str | None]:
    """Whether a message is answered by a last reply, and under which id."""
    if not has_envelope(frames[:-1]):
        return True, None
    try:
        request = decode_request(frames[-1], limits)
    except MalformedMessage as refusal:
        return True, refusal.message_id
    return not isinstance(request, UNANSWERED), request.id


class FuzzClient:
    """One connection; reads all it gets and keeps account.

    Args:
        limits: the daemon's.

    Attributes:
        account: of this connection.
        num_sent: messages so far.
    """

    def __init__(self, endpoint: str, limits: Limits, *, identity: bytes | None = None) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.SNDHWM, 0)
        if identity is not None:
            self._socket.set(zmq.ROUTING_ID, identity)
        self._socket.connect(endpoint)
        self._limits = limits
        self._answers: dict[str, int] = {}
        self._last_ping = 0
        self.account = Account()
        self.num_sent = 0

    def __enter__(self) -> FuzzClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Vanish; may be called twice."""
        self._context.destroy(linger=0)

    def send(self, frames: Frames) -> None:
        """Send one message, of any number of frames."""
        is_owed, message_id = owed_for(frames, self._limits)
        if is_owed:
            self.account.owed[message_id] += 1
        self._socket.send_multipart(frames)
        self.num_sent += 1

    def settle(self, sent: Iterable[Frames] = ()) -> None:
        """Wait until all that is owed has come, and see that nothing else has.

        Args:
            sent: what was sent since the last time, to be shown if something is wrong.

        Raises:
            AssertionError: a reply is missing, or too much, or cannot be read.
        """
        give_up_s = time.monotonic() + PATIENCE_S
        while not self.account.is_settled:
            wait_ms = int(1000 * (give_up_s - time.monotonic()))
            if wait_ms <= 0 or not self._socket.poll(wait_ms):
                raise AssertionError(f"no reply any more; {self._story(sent)}")
            self._receive()
        self._ping()
        assert self.account.owed == self.account.paid, self._story(sent)

    def _ping(self) -> None:
        """What the daemon has sent before it answers this has then come."""
        self._last_ping += 1
        message_id = wire.MessageId(f"barrier/{self._last_ping}")
        self.account.owed[message_id] += 1
        self._socket.send(encode(wire.Ping(message_id), Encoding.JSON))
        while not self.account.paid[message_id]:
            assert self._socket.poll(PATIENCE_S * 1000), "a `ping` is not answered"
            self._receive()

    def _receive(self) -> None:
        """Take all that has come."""
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            assert has_envelope(frames[:-1]), frames
            reply = decode_reply(frames[-1])
            self.account.kinds[wire.type_name(reply)] += 1
            if isinstance(reply, wire.Tokens):
                self._go_on(reply)
                continue
            self.account.paid[reply.id] += 1
            if isinstance(reply, wire.Done):
                known = self._answers.pop(reply.id, 0)
                assert reply.index in {0, known}, reply
            elif isinstance(reply, wire.Error):
                assert reply.code not in OUR_FAULT, reply
                self.account.kinds[f"error {reply.code}"] += 1

    def _go_on(self, reply: wire.Tokens) -> None:
        """Streamed pieces have no holes; an answer of the same id may have begun anew."""
        known = self._answers.get(reply.id, 0)
        assert reply.index in {0, known}, (reply, known)
        assert len(reply.token_ids) or reply.text, reply
        self._answers[reply.id] = reply.index + len(reply.token_ids)

    def _story(self, sent: Iterable[Frames]) -> str:
        shown = "\n".join(repr([frame[:400] for frame in frames][:5]) for frames in sent)
        return f"{self.account.difference()}\nlast replies: {self.account.kinds}\nsent:\n{shown}"
