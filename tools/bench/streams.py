"""Many streamed answers over few or many connections, counted token by token.

Raw DEALER sockets rather than the client library: what is counted is what came over the wire, and
one process can take far more than the library's futures and iterators would let it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq

from ipc.codec import Encoding, decode_reply, encode
from ipc.messages import AnyReply, Done, Error, Generate, MessageId, Tokens
from runtime_cache.errors import InternalError

#: No message for so long, and something is wrong [seconds].
PATIENCE_S = 60.0


@dataclass(slots=True)
class Stream:
    """One answer as it comes.

    Attributes:
        num_tokens: answer tokens so far.
        num_finals: last messages so far; more than one is a fault.
    """

    num_tokens: int = 0
    num_finals: int = 0

    def take(self, reply: AnyReply) -> int:
        """Take its next message; returns how many tokens it brought.

        Raises:
            InternalError: tokens are missing, or came twice, or it has ended already.
        """
        if self.num_finals:
            raise InternalError(f"after the end of answer {reply.id} came {reply}")
        if isinstance(reply, Error):
            raise InternalError(f"answer {reply.id}: {reply.code}, {reply.message}")
        if not isinstance(reply, Tokens | Done):
            raise InternalError(f"answer {reply.id} got {reply}")
        if reply.index != self.num_tokens:
            raise InternalError(f"{self.num_tokens} tokens have come, then {reply}")
        self.num_tokens += len(reply.token_ids)
        self.num_finals += isinstance(reply, Done)
        return len(reply.token_ids)


class Streams:
    """The answers that one thread reads, on connections of its own.

    Attributes:
        answers: by connection, then by the request's id.
    """

    def __init__(self, endpoint: str, num_connections: int) -> None:
        """Connect; `connected` closes what this opens."""
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        for _ in range(num_connections):
            socket = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            # The daemon is never to wait for this reader: what is measured is how fast it writes.
            socket.set(zmq.RCVHWM, 0)
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        self.answers: dict[zmq.Socket[bytes], dict[MessageId, Stream]] = {
            socket: {} for socket in self._sockets
        }

    @property
    def num_tokens(self) -> int:
        """All tokens so far."""
        return sum(s.num_tokens for answers in self.answers.values() for s in answers.values())

    def ask(self, requests: Iterable[Generate]) -> None:
        """Send every request, the connections in turn; ids are their callers' to keep apart."""
        for number, request in enumerate(requests):
            socket = self._sockets[number % len(self._sockets)]
            self.answers[socket][request.id] = Stream()
            socket.send(encode(request, Encoding.MSGPACK))

    def read(self, until_s: float | None = None) -> Iterator[int]:
        """Take what comes until every answer has ended; yields tokens, one turn's at a time.

        Args:
            until_s: stop at this time of `time.monotonic` even if some have not ended.

        Raises:
            InternalError: as `Stream.take`, or nothing comes any more.
        """
        num_left = sum(not s.num_finals for a in self.answers.values() for s in a.values())
        while num_left and (until_s is None or time.monotonic() < until_s):
            ready = self._poller.poll(int(PATIENCE_S * 1000))
            if not ready:
                raise InternalError(f"{num_left} answers do not go on")
            num_tokens = 0
            for socket, _ in ready:
                num_ended, num_new = self._drain(socket)
                num_left -= num_ended
                num_tokens += num_new
            yield num_tokens

    def _drain(self, socket: zmq.Socket[bytes]) -> tuple[int, int]:
        """(answers that ended, tokens that came) of what is there now."""
        answers, num_ended, num_tokens = self.answers[socket], 0, 0
        with suppress(zmq.Again):
            while True:
                reply = decode_reply(socket.recv(zmq.NOBLOCK))
                stream = answers[MessageId(reply.id or "")]
                num_tokens += stream.take(reply)
                num_ended += stream.num_finals
        return num_ended, num_tokens

    def close(self) -> None:
        """Close all connections; nothing is waited for."""
        self._context.destroy(linger=0)


@contextmanager
def connected(endpoint: str, num_connections: int) -> Iterator[Streams]:
    """So many connections, closed at the end."""
    streams = Streams(endpoint, num_connections)
    try:
        yield streams
    finally:
        streams.close()


def requests(num_streams: int, num_tokens: int, run: int = 0) -> list[Generate]:
    """Greedy answers of so many tokens each, to prompts of one token.

    A prompt of one token joins the next decode step, so all of them are written at once almost from
    the beginning.

    Args:
        run: makes the ids those of one run.
    """
    return [
        Generate(
            id=MessageId(f"r{run}-{number}"),
            prompt_ids=(1 + number % 250,),
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        for number in range(num_streams)
    ]
