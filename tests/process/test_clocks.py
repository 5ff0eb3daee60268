"""Clocks that jump: deadlines, leases and ages run on another one, whatever the date is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.launched import Launched
from tests.support.needed import need, need_root
from tests.support.rtcached import RawClient

DAY_S = 86_400
#: Python runs this at its start; the offset is read at every look at the clock.
SITECUSTOMIZE = """
import os
import time

_now, _now_ns = time.time, time.time_ns


def _offset_s():
    with open(os.environ["TEST_CLOCK_OFFSET"]) as file:
        return int(file.read() or 0)


time.time = lambda: _now() + _offset_s()
time.time_ns = lambda: _now_ns() + _offset_s() * 10**9
"""
LONG = {"type": "generate", "prompt": "x", "temperature": 0, "ignore_eos": True}


class Clock:
    """The wall clock of a daemon."""

    def __init__(self, directory: Path) -> None:
        (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self._offset = directory / "offset"
        self.jump(0)
        self.env = {"PYTHONPATH": str(directory), "TEST_CLOCK_OFFSET": str(self._offset)}

    def jump(self, offset_s: int) -> None:
        """Be so far off from now on [seconds]."""
        following = self._offset.with_suffix(".next")
        following.write_text(f"{offset_s}")
        following.replace(self._offset)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


def test_the_fake_clock_works(clock: Clock):
    clock.jump(10 * DAY_S)
    before_s = time.time()
    asked = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time(), time.time_ns() / 1e9)"],
        env=clock.env,
        capture_output=True,
        text=True,
        check=True,
    )
    for told_s in map(float, asked.stdout.split()):
        assert before_s <= told_s - 10 * DAY_S <= time.time()


def test_the_wall_clock_jumps(null_bundle: Path, tmp_path: Path, clock: Clock):
    with (
        Launched(null_bundle, f"ipc://{tmp_path}/s", env=clock.env) as daemon,
        RawClient(daemon.endpoint) as client,
        Client(daemon.admin_endpoint) as admin,
    ):
        client.ask(id="a", max_tokens=100, **LONG)
        (entry,) = admin.list().entries
        admin.pin(entry.digest, ttl_s=3600)
        client.send(id="long", max_tokens=1500, deadline_ms=60_000, **LONG)
        for offset_s in (400 * DAY_S, -400 * DAY_S):
            assert client.receive()["type"] == "tokens"
            clock.jump(offset_s)
        done = client.last_reply()
        assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("length", 1500)
        assert 0 <= done["timing"]["ttft_ms"] <= done["timing"]["total_ms"] < 60_000
        (kept,) = (entry for entry in admin.list().entries if entry.kept)
        assert 3500 < kept.expires_in_s <= 3600
        assert 0 <= kept.age_s < 60
        assert 0 <= client.ask(type="ping", id="p")["uptime_s"] < 60
        gone = client.ask(id="late", max_tokens=4000, deadline_ms=1, **LONG)
        assert gone["finish_reason"] == "deadline"


def test_a_host_that_has_been_up_for_years(null_bundle: Path, tmp_path: Path):
    need("unshare")
    need_root()
    prefix = ("unshare", "--time", "--monotonic", str(3000 * DAY_S))
    if (tried := subprocess.run([*prefix, "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"this system has no time namespaces: {tried.stderr.strip()}")
    with (
        Launched(null_bundle, f"ipc://{tmp_path}/s", prefix=prefix) as daemon,
        RawClient(daemon.endpoint) as client,
    ):
        done = client.ask(id="a", max_tokens=100, deadline_ms=60_000, **LONG)
        assert done["finish_reason"] == "length"
        assert 0 < done["timing"]["total_ms"] < 60_000
        gone = client.ask(id="late", max_tokens=4000, deadline_ms=20, **LONG)
        assert gone["finish_reason"] == "deadline"
