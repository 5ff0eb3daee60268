"""A `rtcached` process of one's own: started on a private socket, stopped at the end.

For the demo, the benchmarks and the tests. The daemon is the real command; it says when it is ready
in its log, which is JSON lines here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_STACKS_TIMEOUT_S = 5.0


class DaemonFailed(Exception):
    """The daemon did not start or did not end well; the message carries the end of its log."""


class DaemonProcess:
    """One running daemon; a context manager.

    Attributes:
        endpoint: for clients; `ipc_endpoint` chooses another one than a private socket.
        admin_endpoint: for administrators.
        socket: path of the client socket.
        events: the daemon's log so far, one dict a line; lines that are no JSON as `{"text": …}`.
        process: the process itself, for signals.
    """

    def __init__(self, bundle: Path, device: str, **options: str) -> None:
        """Prepare; `with` starts it.

        Args:
            options: further options of `rtcached`: its flags without the dashes, `_` for `-`.
        """
        # A socket path may have 107 bytes only, so it lies in a short temporary directory.
        self._directory = tempfile.TemporaryDirectory(prefix="rtcache-")
        private = f"ipc://{self._directory.name}/rtcached.sock"
        self.endpoint = options.setdefault("ipc_endpoint", private)
        self.admin_endpoint = f"{self.endpoint}.admin"
        self.socket = Path(self.endpoint.removeprefix("ipc://"))
        self.events: list[dict[str, Any]] = []
        self.process: subprocess.Popen[str]
        self._said_more = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._follow_log, daemon=True)
        flags = {"model_bundle": str(bundle), "device": device}
        self._command = [sys.executable, "-m", "runtime_cache.daemon", *_flags(flags | options)]

    def __enter__(self) -> DaemonProcess:
        """Start and wait until it is ready.

        Raises:
            DaemonFailed: it ended, or was not ready in time; it does not run any more.
        """
        self.process = subprocess.Popen(
            [*self._command, "--log-format", "json"],
            stderr=subprocess.PIPE,
            text=True,
            env={name: text for name, text in os.environ.items() if not _is_option(name)},
        )
        self._reader.start()
        try:
            self.wait_for("ready", READY_TIMEOUT_S)
        except BaseException:
            self.kill()
            self._directory.cleanup()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc is None:
                self.stop()
            else:
                self.kill()
        finally:
            self._directory.cleanup()

    def wait_for(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> dict[str, Any]:
        """Wait until it has logged the event; returns it.

        Raises:
            DaemonFailed: it ended without, or did not log it in time.
        """
        with self._said_more:
            self._said_more.wait_for(lambda: self._has_ended or self._find(name), timeout_s)
            found = self._find(name)
        if found is None:
            if self._has_ended:
                self.process.wait(STOP_TIMEOUT_S)  # its exit code is to be its own
            raise DaemonFailed(f"rtcached did not say {name!r}:\n{self.log_text()}")
        return found

    def stop(self) -> None:
        """SIGTERM, and wait for the end.

        Raises:
            DaemonFailed: its exit code was not 0.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.wait()
        if code != 0:
            raise DaemonFailed(f"rtcached exited with {code}:\n{self.log_text()}")

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Wait until it has ended and its log is read; returns the exit code.

        Raises:
            DaemonFailed: it did not end in time; it was killed. The stacks of its threads are at
                the end of its log.
        """
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._end_with_stacks()
            raise DaemonFailed(f"rtcached did not end:\n{self.log_text(200)}") from None
        self._reader.join(STOP_TIMEOUT_S)  # a child that outlives it may hold its stderr
        return code

    def log_text(self, num_lines: int = 20) -> str:
        """The end of its log, for people."""
        lines = (event.get("text") or json.dumps(event) for event in self.events[-num_lines:])
        return "\n".join(lines)

    def _end_with_stacks(self) -> None:
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STACKS_TIMEOUT_S)
        self.process.kill()
        self.process.wait()
        self._reader.join(_STACKS_TIMEOUT_S)

    def _follow_log(self) -> None:
        if self.process.stderr is None:
            return
        with self.process.stderr as lines:
            for line in lines:
                with self._said_more:
                    self.events.append(_event(line))
                    self._said_more.notify_all()
        with self._said_more:
            self._has_ended = True
            self._said_more.notify_all()

    def _find(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event.get("event") == name), None)


def _is_option(name: str) -> bool:
    """Whether an environment variable would change the daemon's options.

    Those of the software device itself stay: they work in this process too.
    """
    return name.startswith("RTCACHE_") and not name.startswith("RTCACHE_ACLSIM_")


def _flags(options: Mapping[str, str]) -> list[str]:
    return [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"text": line.rstrip()}
