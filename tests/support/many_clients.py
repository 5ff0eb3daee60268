"""Processes full of clients that stream: each has a socket of its own and counts its tokens.

The clients of a process take turns on one thread, by raw DEALER sockets, so that a thousand of them
fit beside the daemon. Whatever is missing, comes twice, or comes after the end, raises.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

import zmq

from ipc.codec import Encoding, decode_reply, encode
from ipc.messages import Generate, MessageId, Ping, Pong
from tools.bench.streams import PATIENCE_S, Stream


@dataclass(frozen=True, slots=True)
class Plan:
    """What every client does: answer after answer, until the time is over.

    Attributes:
        num_clients: in all processes together.
        num_processes: they share the clients.
        num_tokens: of an answer.
        duration_s: no answer is asked for after so long; those that are being written end.
    """

    num_clients: int
    num_processes: int
    num_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Count:
    """What clients have got."""

    num_answers: int
    num_tokens: int

    def __add__(self, other: Count) -> Count:
        return Count(self.num_answers + other.num_answers, self.num_tokens + other.num_tokens)


def stream_from(endpoint: str, plan: Plan, meanwhile: Callable[[], None]) -> Count:
    """Let all clients stream; returns what they got together.

    Args:
        meanwhile: called again and again until they are done; it is to take its time.

    Raises:
        InternalError: as `Stream.take`, of any client.
    """
    spawn = multiprocessing.get_context("spawn")
    share = plan.num_clients // plan.num_processes
    start = (spawn.Barrier(plan.num_processes),)
    with ProcessPoolExecutor(
        plan.num_processes, mp_context=spawn, initializer=_begin_together, initargs=start
    ) as pool:
        running: list[Future[Count]] = [
            pool.submit(_run, endpoint, plan, share, number) for number in range(plan.num_processes)
        ]
        while not all(clients.done() for clients in running):
            meanwhile()
        return sum((clients.result() for clients in running), Count(0, 0))


def _begin_together(start: Barrier) -> None:
    """No process takes anything up before all have started, which takes one longer than another."""
    start.wait(PATIENCE_S)


def _run(endpoint: str, plan: Plan, num_clients: int, number: int) -> Count:
    """The clients of one process."""
    clients = _Clients(endpoint, num_clients, plan.num_tokens, seed=number)
    try:
        return clients.run(time.monotonic() + plan.duration_s)
    finally:
        clients.close()


class _Clients:
    def __init__(self, endpoint: str, num_clients: int, num_tokens: int, seed: int) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._num_tokens = num_tokens
        self._num_asked = seed
        self._streams: dict[zmq.Socket[bytes], Stream] = {}
        for _ in range(num_clients):
            socket = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
            self._streams[socket] = Stream()

    def run(self, until_s: float) -> Count:
        """Ask, count, ask again."""
        answers: list[Stream] = []
        for socket in self._streams:
            self._ask(socket)
        num_left = len(self._streams)
        while num_left:
            ready = self._poller.poll(int(PATIENCE_S * 1000))
            assert ready, f"{num_left} answers do not go on"
            for socket, _ in ready:
                if not self._take(socket):
                    continue
                answers.append(self._streams[socket])
                if time.monotonic() < until_s:
                    self._ask(socket)
                else:
                    num_left -= 1
        for socket in self._streams:
            _check_nothing_is_left(socket)
        assert all(answer.num_finals == 1 for answer in answers)
        assert all(answer.num_tokens == self._num_tokens for answer in answers)
        return Count(len(answers), sum(answer.num_tokens for answer in answers))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _ask(self, socket: zmq.Socket[bytes]) -> None:
        """One more answer; the id is that of the last one, which has ended."""
        self._num_asked += 1
        self._streams[socket] = Stream()
        request = Generate(
            id=MessageId("answer"),
            prompt_ids=(1 + self._num_asked % 250,),
            max_tokens=self._num_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        socket.send(encode(request, Encoding.MSGPACK))

    def _take(self, socket: zmq.Socket[bytes]) -> bool:
        """Everything that is there; whether the answer has ended with it."""
        stream = self._streams[socket]
        while not stream.num_finals:
            try:
                stream.take(decode_reply(socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return False
        return True


def _check_nothing_is_left(socket: zmq.Socket[bytes]) -> None:
    """Messages come in order: what comes before a pong was sent before it."""
    socket.send(encode(Ping(MessageId("ping")), Encoding.MSGPACK))
    answer = decode_reply(socket.recv())
    assert isinstance(answer, Pong), f"after the end came {answer}"
