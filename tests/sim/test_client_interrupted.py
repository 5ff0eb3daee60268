"""The clients, interrupted: by Ctrl-C or a signal handler at any line, by `close` and `cancel`
while somebody waits, by a fork; and one that nobody looks at."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq

import ipc
from ipc import dealer
from ipc.client import AnswerStream as AsyncStream
from ipc.client import Client as AsyncClient
from ipc.dealer import Dealer
from ipc.errors import Closed, Timeout
from ipc.sync_client import Client
from tests.support.ipc_daemon import PATIENCE_S, DaemonThread

#: More news than libzmq keeps of one connection unless it is told to.
_MANY = 1100


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def daemon(endpoint: str) -> Iterator[DaemonThread]:
    with DaemonThread(endpoint) as thread:
        yield thread


class Line:
    """Runs `action` once, before the line of `ipc` that is executed as number `number`."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.was_reached = False
        self._left = number
        self._action = action

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(ipc.__path__[0]):
            return None
        if event == "line" and not self.was_reached:
            self._left -= 1
            if self._left == 0:
                self.was_reached = True
                self._action()
        return self.trace


@contextmanager
def at(line: Line) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(line.trace)
    try:
        yield
    finally:
        sys.settrace(before)


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_of_a_reconnection_leaves_two_sockets_or_none(endpoint: str) -> None:
    number, is_through = 0, False
    while not is_through:
        number += 1
        sockets = Dealer(endpoint)
        line = Line(number, ctrl_c)
        with suppress(KeyboardInterrupt), at(line):
            sockets.renew()
        assert sockets.has_socket == (not sockets.socket.closed and not sockets.events.closed)
        assert not sockets.has_broken()
        is_through = not line.was_reached
        sockets.close()


def test_after_ctrl_c_at_any_line_of_a_call_the_next_is_answered(
    endpoint: str, daemon: DaemonThread
) -> None:
    with Client(endpoint) as client:
        number, is_through = 0, False
        while not is_through:
            number += 1
            line = Line(number, ctrl_c)
            with suppress(KeyboardInterrupt), at(line):
                client.ping()
            assert client.tokenize("x") == (1, 2)
            is_through = not line.was_reached


def test_all_calls_may_be_cancelled_at_any_line_of_one(endpoint: str, daemon: DaemonThread) -> None:
    with Client(endpoint) as client:
        number, is_through = 0, False
        while not is_through:
            number += 1
            held = client.generate("hold")
            line = Line(number, client.cancel_all)
            with suppress(Closed), at(line):
                client.ping()
            held.cancel()
            is_through = not line.was_reached


class Polls:
    """What waits for sockets have found, with something done at the beginning of each."""

    def __init__(self, patch: pytest.MonkeyPatch, begin: Callable[[], object] = int) -> None:
        self.found: list[object] = []
        poll = zmq.Poller.poll

        def observed(poller: zmq.Poller, timeout_ms: int) -> list[tuple[Any, int]]:
            if not timeout_ms:
                return poll(poller, timeout_ms)
            begin()
            self.found.append(found := poll(poller, timeout_ms))
            return found

        patch.setattr(zmq.Poller, "poll", observed)


def test_a_signal_handler_closes_the_client_that_waits(
    endpoint: str, daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(endpoint, lease_s=5)
    stream = client.generate("hold")
    Polls(monkeypatch, lambda: signal.setitimer(signal.ITIMER_REAL, 0.05))
    before = signal.signal(signal.SIGALRM, lambda *_: client.close())
    try:
        with pytest.raises(Closed, match="the client was closed"):
            stream.result()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(Closed):
        client.ping()


def test_who_waits_is_woken_when_another_thread_closes_the_client(
    endpoint: str, daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = Polls(monkeypatch)
    with Client(endpoint) as client:

        def close_soon() -> None:
            daemon.wait_for(lambda seen: seen.requests)
            client.close()

        closing = threading.Thread(target=close_soon)
        stream = client.generate("hold")
        closing.start()
        with pytest.raises(Closed):
            stream.result()
        closing.join()
    assert all(polls.found)


def test_a_context_that_is_terminated_can_end(endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = Client(endpoint, timeout_s=0.01, context=context)
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    with suppress(zmq.ContextTerminated):
        while True:
            with suppress(Timeout):
                client.ping()
    client.close()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_process_every_call_says_so_and_the_parents_go_on(
    endpoint: str, daemon: DaemonThread
) -> None:
    with Client(endpoint) as client:
        stream = client.generate("begin")
        pieces = iter(stream)
        next(pieces)
        calls = [client.ping, stream.result, lambda: client.generate("x"), lambda: next(pieces)]
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE_S))
            num_closed = 0
            for call in calls:
                with suppress(Closed):
                    call()
                    num_closed -= 1
                num_closed += 1
            client.cancel_all()
            client.close()
            os._exit(num_closed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
        assert client.tokenize("x") == (1, 2)


def test_a_client_that_nobody_looks_at_holds_up_no_other(
    tmp_path: Path, endpoint: str, daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq connects on and on to a daemon with another key, and tells of it each time."""
    monkeypatch.setattr(dealer, "_RECONNECT_MS", 1)
    monkeypatch.setattr(dealer, "_RECONNECT_MAX_MS", 1)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/other")
        other.listen()
        other.settimeout(PATIENCE_S)
        with Client(f"ipc://{tmp_path}/other"), Client(endpoint) as client:
            for _ in range(_MANY):
                other.accept()[0].close()
            assert client.tokenize("x") == (1, 2)


@pytest.mark.parametrize(
    "give_up", [lambda client, _: client.cancel_all(), lambda _, s: s.cancel()]
)
async def test_who_reads_what_is_given_up_hears_of_it_at_once(
    endpoint: str, give_up: Callable[[AsyncClient, AsyncStream], None]
) -> None:
    async with AsyncClient(endpoint) as client:
        stream = client.generate("hold")
        reading = asyncio.ensure_future(stream.result())
        await turns()
        give_up(client, stream)
        await turns()
        assert isinstance(reading.exception(), Closed)


async def test_all_who_read_one_answer_hear_of_its_end(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        stream = client.generate("hold")
        reading = [asyncio.ensure_future(stream.result()) for _ in range(3)]
        await turns()
        reading[1].cancel()
        await turns()
        assert isinstance(reading[0].exception(), Closed)
        assert isinstance(reading[2].exception(), Closed)


async def turns() -> None:
    """Let the loop do what is to be done at once."""
    for _ in range(5):
        await asyncio.sleep(0)
