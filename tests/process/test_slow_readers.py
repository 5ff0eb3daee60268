"""Readers slower than the model: they lose nothing, or are told that they were too slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S, wait_until_idle
from tools.daemon_process import DaemonProcess

MAX_UNSENT_TOKENS = 64


@pytest.fixture
def daemon(null_bundle: Path) -> Iterator[DaemonProcess]:
    options = {"ipc_max_unsent_tokens": str(MAX_UNSENT_TOKENS)}
    with DaemonProcess(null_bundle, "sim:0", **options) as daemon:
        yield daemon


def wait_for_the_end(admin: Client, num_before: int) -> None:
    """Wait until a request has come, besides those before, and nothing is in work any more."""
    give_up_s = time.monotonic() + PATIENCE_S
    while admin.stats()["engine"]["arrived"] == num_before:
        assert time.monotonic() < give_up_s
    wait_until_idle(admin)


def test_a_reader_that_pauses_gets_the_same_answer_in_fewer_pieces(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, window=2) as client, Client(daemon.admin_endpoint) as admin:
        ask = {"temperature": 0.0, "ignore_eos": True, "max_tokens": MAX_UNSENT_TOKENS}
        whole = client.generate("x", stream=False, **ask).result()
        num_before = admin.stats()["engine"]["arrived"]
        stream = client.generate("x", **ask)
        wait_for_the_end(admin, num_before)
        pieces = list(stream)
        assert stream.result().token_ids == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole.text
        # Two that were let through, and the rest in one.
        assert len(pieces) == 3


def test_a_reader_that_stops_ends_its_answer_and_no_other(
    slow_steps: None, daemon: DaemonProcess
) -> None:
    """Who reads has more than half a second for 64 tokens, so that he is not too slow as well."""
    with Client(daemon.endpoint, window=2) as client, Client(daemon.admin_endpoint) as admin:
        unread = client.generate("x", temperature=0, ignore_eos=True, max_tokens=4000)
        read = client.generate("y", temperature=0, ignore_eos=True, max_tokens=100).result()
        wait_until_idle(admin)
        result = unread.result()
        assert (read.finish_reason, len(read.token_ids)) == ("length", 100)
        assert result.finish_reason == "slow_reader"
        assert MAX_UNSENT_TOKENS <= len(result.token_ids) <= MAX_UNSENT_TOKENS + 50
