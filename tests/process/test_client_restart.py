"""Clients of every kind over a daemon that is killed and started again: none hangs, and the same
ones go on.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
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
    """A REQ socket that asks until it is answered, as docs/clients.md describes it."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.REQ)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.REQ_RELAXED, 1)
        self.socket.connect(endpoint)
        self.num_tries = 0

    def ask(self, wait_ms: int, **fields: Any) -> dict[str, Any]:
        while True:
            self.num_tries += 1
            self.socket.send(json.dumps({"id": str(self.num_tries), **fields}).encode())
            if self.socket.poll(wait_ms):
                reply: dict[str, Any] = json.loads(self.socket.recv())
                return reply
            wait_ms *= 2

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
    null_bundle: Path, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    requester = Requester(endpoint)
    with ThreadPoolExecutor() as pool, Client(endpoint) as client, Client(endpoint) as other:
        with killed_at_the_end(null_bundle, endpoint) as daemon:
            pieces = iter(client.generate("x", **LONG))
            next(pieces)
            waiting = pool.submit(requester.ask, 500, type="generate", prompt="x", **LONG)
            prefix_id = other.register("a prefix of a few tokens").prefix_id
            command = begin(endpoint)
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
            # The long answer takes as long as its context; the kill came long before its end.
            assert waiting.result()["finish_reason"] == "length"
            assert requester.num_tries > 1
            assert client.generate("x", max_tokens=3, **LONG).result().usage.completion_tokens == 3
            with pytest.raises(ServerError) as caught:
                other.generate("x", prefix_id=prefix_id).result()
            assert caught.value.code == "unknown_prefix"
    requester.close()


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
