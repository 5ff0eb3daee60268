"""`rtcache-admin top` on a terminal, while its daemon ends and is started again."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rtcached import PATIENCE_S
from tools.daemon_process import DaemonProcess


class Screen:
    """A command on a terminal of its own, and what it has drawn so far."""

    def __init__(self, *words: str) -> None:
        self._terminal, other_end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.admin.main", *words],
            stdin=other_end,
            stdout=other_end,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "80", "LINES": "40", "TERM": "xterm"},
        )
        os.close(other_end)
        self.drawn = ""
        self._more = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        os.close(self._terminal)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # nobody has the other end any more
                data = b""
            with self._more:
                self.drawn += data.decode("utf-8", "replace")
                self._has_ended = not data
                self._more.notify_all()
            if not data:
                return

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until it is drawn behind a position; returns the position behind it."""
        with self._more:
            found = self._more.wait_for(
                lambda: text in self.drawn[after:] or self._has_ended, PATIENCE_S
            )
            assert found, f"{text!r} did not come"
            assert text in self.drawn[after:], self.drawn[after:]
            return self.drawn.index(text, after) + len(text)

    def end(self) -> tuple[int, bytes]:
        """Exit code and what it complained of."""
        _, complaint = self.process.communicate(timeout=PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return self.process.returncode, complaint


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rtcache-") as directory:
        yield f"ipc://{directory}/s"


def test_top_outlives_its_daemon(null_bundle: Path, endpoint: str) -> None:
    words = ("--endpoint", f"{endpoint}.admin", "--timeout", "0.3", "--interval", "0.05")
    # Another block size tells the two apart.
    options = {"ipc_endpoint": endpoint, "cache_block_size": "32"}
    with (
        DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint) as first,
        Screen("top", *words) as screen,
    ):
        screen.wait_for("blocks of 8.0 KiB")
        first.stop()
        screen.wait_for("trying again", after=len(screen.drawn))
        with DaemonProcess(null_bundle, "sim:0", **options):
            screen.wait_for("blocks of 4.0 KiB")
            screen.process.send_signal(signal.SIGINT)
            assert screen.end() == (0, b"")
    # The cursor is shown again, and what was on the terminal before.
    assert screen.drawn.endswith("\x1b[?25h\x1b[?1049l")
    assert screen.drawn.count("\x1b[?1049h") == screen.drawn.count("\x1b[?1049l") == 1
