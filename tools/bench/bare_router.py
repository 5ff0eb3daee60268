"""A ZeroMQ ROUTER with nothing behind it: what any daemon in Python is held against.

It runs in a process of its own. What it answers to pings and to requests for an answer was encoded
beforehand, of the daemon's sizes, and goes out in its order: a token of each stream in turn.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import zmq

from ipc.codec import Encoding, Limits, decode_request, encode
from ipc.messages import Done, Generate, MessageId, Ping, Pong, Timing, Tokens, Usage
from runtime_cache.errors import InternalError

#: The process may take so long to start [seconds].
_START_S = 60.0
PING_ID = MessageId("ping")


@contextmanager
def bare_router(endpoint: str, num_streams: int) -> Iterator[None]:
    """One that listens, as a process; ended when the block is left.

    Args:
        num_streams: it begins to answer when so many requests have come.
    """
    spawn = multiprocessing.get_context("spawn")
    is_listening = spawn.Event()
    process = spawn.Process(
        target=_serve, args=(endpoint, num_streams, is_listening), name="bare-router", daemon=True
    )
    process.start()
    try:
        if not is_listening.wait(_START_S):
            raise InternalError("the bare router does not start")
        yield
    finally:
        process.terminate()
        process.join()


def _serve(endpoint: str, num_streams: int, is_listening: Event) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, 0)
    socket.bind(endpoint)
    is_listening.set()
    ping = encode(Ping(PING_ID), Encoding.MSGPACK)
    answer = Pong(
        id=PING_ID, version="0.0.0", uptime_s=100.0, state="serving", incarnation="0" * 16
    )
    pong = encode(answer, Encoding.MSGPACK)
    asked: list[tuple[bytes, Generate]] = []
    while True:
        identity, payload = socket.recv_multipart()
        if payload == ping:
            socket.send_multipart((identity, pong))
            continue
        request = decode_request(payload, Limits())
        if isinstance(request, Generate):
            asked.append((identity, request))
            if len(asked) == num_streams:
                _answer(socket, asked)
                asked = []


def _answer(socket: zmq.Socket[bytes], asked: list[tuple[bytes, Generate]]) -> None:
    """Send every token of every answer, encoded before the first is sent."""
    num_tokens = max(request.max_tokens or 1 for _, request in asked)
    pieces = [[_piece(request.id, i) for i in range(num_tokens)] for _, request in asked]
    for index in range(num_tokens):
        for (identity, _), stream in zip(asked, pieces, strict=True):
            socket.send(identity, zmq.SNDMORE)
            socket.send(stream[index])
    for identity, request in asked:
        socket.send(identity, zmq.SNDMORE)
        socket.send(encode(_end(request.id, num_tokens), Encoding.MSGPACK))


def _piece(message_id: MessageId, index: int) -> bytes:
    piece = Tokens(id=message_id, index=index, text="x", token_ids=(index % 256,))
    return encode(piece, Encoding.MSGPACK)


def _end(message_id: MessageId, num_tokens: int) -> Done:
    return Done(
        id=message_id,
        index=num_tokens,
        text="",
        token_ids=(),
        finish_reason="length",
        usage=Usage(1, 0, 1, num_tokens),
        timing=Timing(0.0, 0.0, 0.0, None),
    )
