"""`rtcache-admin` as a process, on a running daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S, Ended, run
from tools.daemon_process import DaemonProcess

PREFIX = "You are a help desk. " * 10  # 210 bytes, as many tokens: three whole blocks


@pytest.fixture(scope="module")
def daemon(null_bundle: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(null_bundle, "sim:0") as running:
        yield running


@pytest.fixture
def cold(daemon: DaemonProcess) -> DaemonProcess:
    """The daemon, with nothing registered and nothing cached."""
    with Client(daemon.admin_endpoint) as client:
        for entry in client.list().entries:
            if entry.prefix_id is not None:
                client.release(entry.prefix_id)
        client.evict(all=True)
    return daemon


def admin(daemon: DaemonProcess, *words: str) -> Ended:
    return run("tools.admin.main", *words, "--endpoint", daemon.admin_endpoint)


def reply(daemon: DaemonProcess, *words: str) -> dict[str, Any]:
    """What the command prints with --json."""
    ended = admin(daemon, *words, "--json")
    assert (ended.code, ended.complaint) == (0, "")
    found: dict[str, Any] = json.loads(ended.out)
    return found


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(PREFIX)
    return str(path)


def test_stats_after_a_cancel_say_why(cold: DaemonProcess):
    with Client(cold.endpoint) as client:
        stream = client.generate("abc", temperature=0, ignore_eos=True)
        next(iter(stream))  # leaving the loop cancels
        client.ping()
    by_reason = {"cancelled": 1, "cancelled_by": {"client": 1}}
    for encoding in ("json", "msgpack"):
        with Client(cold.admin_endpoint, encoding=encoding) as admin_client:
            engine = admin_client.stats()["engine"]
            assert {name: engine[name] for name in by_reason} == by_reason
    assert reply(cold, "stats")["engine"]["cancelled_by"] == {"client": 1}
    assert "cancelled_by.client" in admin(cold, "stats").out


def test_a_prefix_below_a_block_is_shown(cold: DaemonProcess, tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("short")
    ended = admin(cold, "register", str(path))
    assert "5 tokens" in ended.out
    assert "that is less than a block, so nothing is kept" in ended.out
    (entry,) = reply(cold, "list")["entries"]
    assert (entry["digest"], entry["num_tokens"], entry["num_bytes"]) == ("", 0, 0)
    assert "below a block" in admin(cold, "list").out
    assert reply(cold, "release", entry["prefix_id"]) == {"prefix_id": entry["prefix_id"]}


def test_hits_of_a_shared_beginning_are_seen(cold: DaemonProcess):
    with Client(cold.endpoint) as client:
        for end in ("a", "b", "c"):
            prompt = PREFIX + end * 100
            client.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True).result()
    entries = reply(cold, "list")["entries"]
    assert [(entry["num_tokens"], entry["hits"]) for entry in entries] == [(256, 2)] * 3


def test_register_list_release_evict(cold: DaemonProcess, prompt_file: str):
    registered = reply(cold, "register", prompt_file)
    prefix_id = registered.pop("prefix_id")
    assert registered == {"num_tokens": 210, "cached_tokens": 0, "num_bytes": 3 * 8192}
    (entry,) = reply(cold, "list")["entries"]
    shown = {name: entry[name] for name in ("prefix_id", "num_tokens", "num_blocks", "in_use")}
    assert shown == {"prefix_id": prefix_id, "num_tokens": 192, "num_blocks": 3, "in_use": False}
    assert reply(cold, "evict", "--all") == {"num_blocks": 0, "num_bytes": 0, "in_use_blocks": 3}
    assert reply(cold, "release", prefix_id) == {"prefix_id": prefix_id}
    assert reply(cold, "evict", "--blocks", "1")["num_blocks"] == 1
    assert reply(cold, "evict", "--all") == {
        "num_blocks": 2,
        "num_bytes": 2 * 8192,
        "in_use_blocks": 0,
    }
    assert reply(cold, "list") == {"entries": [], "total": 0}


def test_for_people(cold: DaemonProcess, prompt_file: str):
    out = admin(cold, "register", prompt_file).out
    prefix_id = out.partition(":")[0]
    assert out == (f"{prefix_id}: 210 tokens, 0 of them were cached already; 0.0 MiB are kept\n")
    listed = admin(cold, "list").out
    assert "cached, kept" in listed
    assert prefix_id in listed
    assert listed.endswith("1 of 1 prefixes (a shared beginning counts in each)\n")
    assert admin(cold, "evict", "--all").out == (
        "evicted 0 blocks (0.0 MiB); 3 blocks are in use or kept, and stay\n"
    )
    assert admin(cold, "release", prefix_id).out == f"released {prefix_id}\n"


def test_stats_shows_each_gauge_once_in_80_columns(cold: DaemonProcess):
    out = admin(cold, "stats").out
    assert max(map(len, out.splitlines())) <= 80
    stats = reply(cold, "stats")
    assert list(stats) == ["daemon", "pool", "cache", "engine", "device", "ipc"]
    assert stats["pool"] | {"free_blocks": 127, "live_blocks": 0} == stats["pool"]
    assert out.count("free_blocks") == 1


def test_a_table_of_long_entries_fits_80_columns(cold: DaemonProcess, prompt_file: str):
    admin(cold, "register", prompt_file)
    assert max(map(len, admin(cold, "list").out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (("release", "p-none"), 1, "no prefix `p-none` is registered (unknown_prefix)"),
        (("register", "/nowhere"), 2, "/nowhere: No such file or directory"),
        (("register", "/dev/null"), 1, "the prompt is empty: give at least one token"),
        (("evict", "--blocks", "0"), 1, "`max_blocks`: expected an integer ≥ 1, got 0"),
        (("list", "--limit", "0"), 1, "`limit`: expected an integer ≥ 1, got 0"),
        (("list", "--limit", "x"), 2, "argument --limit: invalid int value: 'x'"),
        (("evict",), 2, "one of the arguments --blocks --all is required"),
        (("reboot",), 2, "invalid choice: 'reboot'"),
    ],
)
def test_refusals(cold: DaemonProcess, words: tuple[str, ...], code: int, complaint: str):
    ended = admin(cold, *words)
    assert (ended.code, ended.out) == (code, "")
    assert complaint in ended.complaint


def test_common_options_may_stand_before_the_command(cold: DaemonProcess):
    ended = run("tools.admin.main", "--endpoint", cold.admin_endpoint, "--json", "list")
    assert (ended.code, json.loads(ended.out)) == (0, {"entries": [], "total": 0})


def test_a_prefix_that_is_no_text(cold: DaemonProcess, tmp_path: Path):
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    ended = admin(cold, "register", str(tmp_path / "noise"))
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcache-admin: {tmp_path}/noise is not UTF-8 text: invalid start byte",
    )


def test_on_the_users_socket(cold: DaemonProcess):
    ended = run("tools.admin.main", "stats", "--endpoint", cold.endpoint)
    assert ended.code == 1
    assert "accepted on the admin socket only (forbidden)" in ended.complaint


def test_nobody_is_there(tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/none"
    ended = run("tools.admin.main", "stats", "--endpoint", endpoint, "--timeout", "0.1")
    assert ended.code == 3
    assert endpoint in ended.complaint


def test_a_reader_that_goes_away_is_no_error(cold: DaemonProcess):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        ended = subprocess.run(
            [sys.executable, "-m", "tools.admin.main", "stats", "--endpoint", cold.admin_endpoint],
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
