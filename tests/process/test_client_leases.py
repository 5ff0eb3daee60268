"""A program with a lease that hangs: the daemon drops its requests, and it hears of it later."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S
from tools.daemon_process import DaemonProcess

#: Begins answers that take seconds together, and tells how they ended.
PROGRAM = """
import json, sys
from ipc.sync_client import Client

with Client(sys.argv[1], lease_s=1, window=4) as client:
    ask = {"temperature": 0, "ignore_eos": True, "max_tokens": 3900}
    answers = [client.generate(f"question {number}", **ask) for number in range(16)]
    pieces = iter(answers[0])
    print(len(next(pieces).token_ids), flush=True)
    print(json.dumps([answer.result().finish_reason for answer in answers]))
"""


def begin(endpoint: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, endpoint], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return process


def wait_for_lost_leases(admin: Client) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not admin.stats()["engine"]["cancelled_by"].get("lease_expired"):
        assert time.monotonic() < give_up_s


@pytest.mark.long
def test_a_program_that_hangs_loses_its_requests(null_bundle: Path, slow_steps: None) -> None:
    with DaemonProcess(null_bundle, "sim:0") as daemon, Client(daemon.admin_endpoint) as admin:
        program = begin(daemon.endpoint)
        program.send_signal(signal.SIGSTOP)
        wait_for_lost_leases(admin)
        program.send_signal(signal.SIGCONT)
        out, _ = program.communicate(timeout=PATIENCE_S)
        assert "lease_expired" in json.loads(out)
        assert set(json.loads(out)) <= {"lease_expired", "length"}


@pytest.mark.long
def test_one_that_only_waits_keeps_them(null_bundle: Path) -> None:
    with DaemonProcess(null_bundle, "sim:0") as daemon:
        out, _ = begin(daemon.endpoint).communicate(timeout=PATIENCE_S)
        assert json.loads(out) == ["length"] * 16
