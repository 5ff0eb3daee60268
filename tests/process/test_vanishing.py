"""A running daemon and clients that are killed, fall silent, or ask while it ends."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.sync_client import Client
from tests.support.rtcached import (
    RawClient,
    python,
    wait_for_input,
    wait_until,
    wait_until_idle,
)
from tools.daemon_process import DaemonProcess

#: A REQ client that waits for one message that takes long.
_WAITING = """
import sys, zmq
socket = zmq.Context().socket(zmq.REQ)
socket.connect(sys.argv[1])
socket.send_json({"type": "ping", "id": "p"})
socket.recv()
socket.send_json({"type": "generate", "id": "g", "prompt_ids": [1], "stream": False,
                  "max_tokens": 4000, "ignore_eos": True})
print("asked", flush=True)
socket.recv()
"""


@pytest.fixture(scope="module")
def daemon(null_bundle: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(null_bundle, "sim:0") as daemon:
        yield daemon


@pytest.fixture
def admin(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.admin_endpoint) as admin:
        yield admin


def num_cancelled(admin: Client, reason: str) -> int:
    by_reason: dict[str, int] = admin.stats()["engine"]["cancelled_by"]
    return by_reason.get(reason, 0)


def generate(client: RawClient, message_id: str, max_tokens: int, **fields: Any) -> None:
    client.send(
        type="generate",
        id=message_id,
        prompt_ids=[1],
        max_tokens=max_tokens,
        ignore_eos=True,
        **fields,
    )


@pytest.fixture
def slow_daemon(null_bundle: Path, slow_steps: None) -> Iterator[DaemonProcess]:
    with DaemonProcess(null_bundle, "sim:0") as daemon:
        yield daemon


def test_a_client_that_is_killed_while_it_waits(slow_daemon: DaemonProcess) -> None:
    with Client(slow_daemon.admin_endpoint) as admin:
        with python("-c", _WAITING, slow_daemon.endpoint, stdout=subprocess.PIPE) as waiting:
            assert waiting.stdout is not None
            wait_for_input(waiting.stdout)
            assert waiting.stdout.readline() == "asked\n"
            wait_until(lambda: admin.stats()["engine"]["num_running"])
            waiting.send_signal(signal.SIGKILL)
        wait_until(lambda: num_cancelled(admin, "client_gone") == 1)
        wait_until_idle(admin)
        assert admin.stats()["pool"]["live_blocks"] == 0


def test_a_client_that_falls_silent(slow_daemon: DaemonProcess) -> None:
    with RawClient(slow_daemon.endpoint) as client, Client(slow_daemon.admin_endpoint) as admin:
        opened = client.ask(type="open", id="o", lease_ms=1000)
        assert (opened["lease_ms"], len(opened["incarnation"])) == (1000, 16)
        generate(client, "g", 4000, stream=False)
        done = client.receive()
        assert (done["id"], done["finish_reason"]) == ("g", "lease_expired")
        assert client.ask(type="ping", id="p")["incarnation"] == opened["incarnation"]
        assert client.ask(type="close", id="c") == {"type": "closed", "id": "c", "num_cancelled": 0}
        wait_until_idle(admin)


def test_a_stream_without_credit_waits_and_ends(daemon: DaemonProcess, admin: Client) -> None:
    with RawClient(daemon.endpoint) as client:
        generate(client, "g", 50, credit=2)
        pieces = [client.receive() for _ in range(2)]
        done = client.receive()
        assert [piece["type"] for piece in pieces] == ["tokens", "tokens"]
        held = done["token_ids"]
        assert (done["type"], done["finish_reason"]) == ("done", "length")
        assert sum(len(piece["token_ids"]) for piece in pieces) + len(held) == 50
        assert done["index"] == 50 - len(held)


def test_a_client_that_does_not_read_beside_one_that_does(null_bundle: Path) -> None:
    with (
        DaemonProcess(null_bundle, "sim:0", ipc_max_queued_replies="16") as daemon,
        RawClient(daemon.endpoint, max_unread=1) as lazy,
        Client(daemon.endpoint) as fast,
        Client(daemon.admin_endpoint) as admin,
    ):
        names = [f"g{number}" for number in range(8)]
        for name in names:
            generate(lazy, name, 4000)
        wait_until(lambda: admin.stats()["ipc"]["user"]["slow_readers"])
        wait_until_idle(admin)
        answer = fast.generate(prompt_ids=[1], max_tokens=200, ignore_eos=True).result()
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 200)
        assert num_cancelled(admin, "slow_reader") > 0
        ends = [end for name, end in read_answers(lazy, names)]
        assert set(ends) <= {"length", "slow_reader"}
        assert "slow_reader" in ends
        counters = admin.stats()["ipc"]["user"]
        assert (counters["parked"] > 0, counters["dropped"]) == (True, 0)


def read_answers(client: RawClient, names: list[str]) -> list[tuple[str, str]]:
    """Name and end of each answer, none of which may have a hole."""
    num_tokens = dict.fromkeys(names, 0)
    ends: list[tuple[str, str]] = []
    while len(ends) < len(names):
        reply = client.receive()
        name = reply["id"]
        assert reply["index"] == num_tokens[name]
        num_tokens[name] += len(reply["token_ids"])
        if reply["type"] == "done":
            assert reply["usage"]["completion_tokens"] == num_tokens[name]
            ends.append((name, reply["finish_reason"]))
    assert client.rest() == []
    return ends


def test_every_request_is_answered_when_the_daemon_ends(null_bundle: Path) -> None:
    with (
        DaemonProcess(null_bundle, "sim:0", ipc_drain_timeout_s="0.2") as daemon,
        RawClient(daemon.endpoint) as client,
        RawClient(daemon.endpoint) as other,
    ):
        other.ask(type="ping", id="p")
        for number in range(100):
            generate(client, f"a{number}", 500, stream=False)
        assert client.last_reply()["type"] == "done"
        daemon.process.send_signal(signal.SIGTERM)
        for number in range(100):
            generate(client, f"b{number}", 5)
        daemon.wait_for("drained")
        for number in range(100):
            generate(other, f"c{number}", 5)
        ends = Counter(_end_of(client.last_reply()) for _ in range(199))
        assert set(ends) <= {"length", "shutdown", "draining"}
        late = {_end_of(other.last_reply()) for _ in range(100)}
        assert late == {"draining"}
        assert daemon.wait() == 0
        assert client.rest() == other.rest() == []


def _end_of(reply: dict[str, Any]) -> str:
    end: str = reply["finish_reason"] if reply["type"] == "done" else reply["code"]
    return end
