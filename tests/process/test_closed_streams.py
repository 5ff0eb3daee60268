"""Commands that are started without standard input, output or error, or with a full disk there."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ipc.command_line import EXIT_RETRY
from ipc.sync_client import Client
from tests.support.ipc_daemon import DaemonThread
from tests.support.rtcached import PATIENCE_S

ALL = "<&- >&- 2>&-"


@contextmanager
def started(closed: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A module of this project, started by a shell that closes streams for it; it has not ended."""
    words = shlex.join([sys.executable, "-m", *command])
    with subprocess.Popen(["sh", "-c", f"exec {words} {closed}"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ALL])
def test_the_daemon_serves_and_ends(null_bundle: Path, tmp_path: Path, closed: str) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    options = ("--model-bundle", str(null_bundle), "--device", "sim:0", "--ipc-endpoint", endpoint)
    with started(closed, "runtime_cache.daemon", *options) as process:
        with Client(endpoint, timeout_s=PATIENCE_S) as client:
            assert client.generate("x", max_tokens=1).result().usage.completion_tokens == 1
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("closed", [">&-", ALL])
@pytest.mark.parametrize("command", [("ipc.cli", "info"), ("tools.admin.main", "list")])
def test_commands_that_ask_it(tmp_path: Path, closed: str, command: tuple[str, ...]) -> None:
    with (
        DaemonThread(f"ipc://{tmp_path}/s", role="admin") as daemon,
        started(closed, *command, "--endpoint", daemon.endpoint) as process,
    ):
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("full", ["2>/dev/full", ">/dev/full 2>&1"])
def test_the_exit_code_says_it_where_stderr_cannot(tmp_path: Path, full: str) -> None:
    with (
        DaemonThread(f"ipc://{tmp_path}/s") as daemon,
        started(full, "ipc.cli", "generate", "refuse", "--endpoint", daemon.endpoint) as process,
    ):
        assert process.wait(PATIENCE_S) == EXIT_RETRY
