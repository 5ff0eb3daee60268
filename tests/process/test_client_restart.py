"""Clients of every kind over a daemon that is killed and started again: none hangs, and the same
ones go on.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from ipc.client import Client as AsyncClient
from ipc.errors import ConnectionLost, ServerError
from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S
from tools.daemon_process import DaemonProcess

LONG = {"temperature": 0.0, "ignore_eos": True}


class Requester:
    """A REQ socket that asks until it is answered, as docs/clients.md describes it.

    Attributes:
        has_asked_again: set when a request has remained without an answer.
    """

    def __init__(self, endpoint: str) -> None:
        self.has_asked_again = threading.Event()
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.REQ)
        socket.set(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        return socket

    def ask(self, **fields: Any) -> dict[str, Any]:
        patience_ms = 250
        while patience_ms < PATIENCE_S * 1000:
            self._socket.send(json.dumps({"id": "1", **fields}).encode())
            if self._socket.poll(patience_ms):
                reply: dict[str, Any] = json.loads(self._socket.recv())
                return reply
            self._socket.close()
            self._socket = self._connect()
            patience_ms *= 2
            self.has_asked_again.set()
        raise TimeoutError("no answer")

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def killed_at_the_end(bundle: Path, endpoint: str) -> Iterator[DaemonProcess]:
    """A daemon that ends without a word."""
    daemon = DaemonProcess(bundle, "sim:0", ipc_endpoint=endpoint)
    daemon.__enter__()
    try:
        yield daemon
    finally:
        daemon.kill()
        daemon.process.returncode = 0  # as wanted here
        daemon.__exit__(None, None, None)


def begin(endpoint: str) -> subprocess.Popen[str]:
    """`rtcache generate` with an answer that it has begun to print."""
    line = ["generate", "x", "--temperature", "0", "--ignore-eos", "--json", "--stream"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ipc.cli", "--endpoint", endpoint, *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["type"] == "tokens"
    return process


def test_a_kill_ends_what_it_must_and_the_same_clients_go_on(
    null_bundle: Path, tmp_path: Path, slow_steps: None
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    requester = Requester(endpoint)
    with ThreadPoolExecutor() as pool, Client(endpoint) as client, Client(endpoint) as other:
        with killed_at_the_end(null_bundle, endpoint) as daemon:
            pieces = iter(client.generate("x", **LONG))
            next(pieces)
            prefix_id = other.register("a prefix of a few tokens").prefix_id
            command = begin(endpoint)
            daemon.process.send_signal(signal.SIGSTOP)
            waiting = pool.submit(requester.ask, type="generate", prompt="x", max_tokens=3, **LONG)
            assert requester.has_asked_again.wait(PATIENCE_S)
            daemon.process.kill()
        with pytest.raises(ConnectionLost):
            list(pieces)
        out, err = command.communicate(timeout=PATIENCE_S)
        assert command.returncode == 3
        assert json.loads(out.splitlines()[-1])["retryable"] is True
        assert "ask again" in err
        asked_while_away = pool.submit(client.ping)
        with killed_at_the_end(null_bundle, endpoint):
            assert asked_while_away.result().state == "serving"
            reply = waiting.result()
            assert reply.get("finish_reason") == "length", reply
            assert client.generate("x", max_tokens=3, **LONG).result().usage.completion_tokens == 3
            with pytest.raises(ServerError) as caught:
                other.generate("x", prefix_id=prefix_id).result()
            assert caught.value.code == "unknown_prefix"
    requester.close()


@pytest.mark.long
def test_many_answers_outlive_a_kill(null_bundle: Path, tmp_path: Path) -> None:
    """Requests that were lost are made again: every one of them is answered in the end."""
    endpoint = f"ipc://{tmp_path}/s"
    prompts = [f"prompt {number}" for number in range(60)]

    async def scene() -> list[int]:
        indices = []
        async with AsyncClient(endpoint) as client:
            outcomes = client.generate_many(prompts, max_at_once=8, max_tokens=20, **LONG)
            loop = asyncio.get_running_loop()
            first = killed_at_the_end(null_bundle, endpoint)
            second = killed_at_the_end(null_bundle, endpoint)
            await loop.run_in_executor(None, first.__enter__)
            async for outcome in outcomes:
                assert outcome.get().usage.completion_tokens == 20
                indices.append(outcome.index)
                if outcome.index == 10:
                    await loop.run_in_executor(None, first.__exit__, None, None, None)
                    await loop.run_in_executor(None, second.__enter__)
            await loop.run_in_executor(None, second.__exit__, None, None, None)
        return indices

    assert asyncio.run(scene()) == list(range(60))
