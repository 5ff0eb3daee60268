"""A whole daemon on TCP: who may connect, whom a key stands for, and what a reload changes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.curve_keys import CurveKeys
from ipc.errors import NotWelcome, ServerError
from ipc.sync_client import Client
from tests.support.curve import KeyFolder, keyed_daemon
from tools.daemon_process import DaemonProcess

PROMPT = "You are a help desk. " * 10  # 210 tokens
KEYS = {
    "alice-1": {"tenant": "alice"},
    "alice-2": {"tenant": "alice", "quota": {"max_requests": 1, "tokens_per_minute": 300}},
    "bob": {"tenant": "bob"},
    "nobody": {},
    "chief": {"role": "admin"},
}


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    made = KeyFolder(tmp_path)
    made.write(KEYS)
    return made


@pytest.fixture
def daemon(null_bundle: Path, folder: KeyFolder) -> Iterator[DaemonProcess]:
    with keyed_daemon(null_bundle, folder) as running:
        yield running


def cached(client: Client, prompt: str = PROMPT) -> int:
    done = client.generate(prompt, max_tokens=1, temperature=0.0)
    return done.usage.cached_tokens


def test_who_may_connect_and_what_for(daemon: DaemonProcess, folder: KeyFolder) -> None:
    strangers = {
        "no key": None,
        "a key of nobody": folder.curve("stranger"),
        "the wrong daemon": CurveKeys(folder.pair("stranger").public, folder.pair("bob")),
    }
    for curve in strangers.values():
        with (
            Client(daemon.endpoint, curve=curve) as client,
            pytest.raises(NotWelcome),
        ):
            client.ping()
    for name in KEYS:
        with Client(daemon.endpoint, curve=folder.curve(name)) as client:
            assert client.ping().state == "serving"
            if name == "chief":
                assert client.stats()["engine"]["num_running"] == 0
                continue
            with pytest.raises(ServerError, match="from administrators' keys only") as refused:
                client.stats()
            assert refused.value.code == "forbidden"

    # Plain bytes on the port, and a connection that says nothing, hurt nobody.
    host, port = daemon.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with Client(daemon.endpoint, curve=folder.curve("bob")) as client:
            assert client.ping().state == "serving"
