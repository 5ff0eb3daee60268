"""`rtcached` in surroundings it did not choose: another user, another clock, a log nobody keeps.

Unlike `tools.daemon_process`, nothing here reads the daemon's log: it is ready when it answers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ipc.errors import IpcError
from ipc.sync_client import Client
from tests.support.needed import need
from tests.support.rtcached import PATIENCE_S

NOBODY = 65534


def as_nobody() -> Sequence[str]:
    """What stands before a command that shall have no right to write anywhere.

    It may read what root may read, or Python itself might be out of its reach. Who is not root
    needs nothing: he has few rights already.
    """
    if os.geteuid() != 0:
        return ()
    need("setpriv")
    reading = "-all,+dac_read_search"
    return (
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        *(f"--inh-caps={reading}", f"--ambient-caps={reading}", f"--bounding-set={reading}"),
    )


class Launched:
    """One daemon; a context manager that ends it with SIGTERM and checks its exit code.

    Args:
        endpoint: of users.
        prefix: what stands before the command.
        stderr: a descriptor or a file for its log; by default what the test has.
        env: added to the environment.
        options: as for `DaemonProcess`.

    Attributes:
        process: the process, for signals; of the prefix's program if that stays.
    """

    def __init__(
        self,
        bundle: Path,
        endpoint: str,
        *,
        prefix: Sequence[str] = (),
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: str,
    ) -> None:
        flags = {"model_bundle": str(bundle), "device": "sim:0", "ipc_endpoint": endpoint} | options
        words = [
            word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)
        ]
        self._command = [*prefix, sys.executable, "-m", "runtime_cache.daemon", *words]
        self._stderr = stderr
        others = ("RTCACHE_", "PYTHONUNBUFFERED")  # whose streams buffer nothing
        ours = {name: text for name, text in os.environ.items() if not name.startswith(others)}
        self._env = ours | dict(env or {})
        self.endpoint = endpoint
        self.admin_endpoint = f"{endpoint}.admin"
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Launched:
        self.process = subprocess.Popen(self._command, stderr=self._stderr, env=self._env)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.kill()
            return
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def _wait_until_it_answers(self) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        with Client(self.endpoint, timeout_s=1) as client:
            while self.process.poll() is None:
                assert time.monotonic() < give_up_s, "rtcached does not answer"
                try:
                    client.ping()
                except IpcError:
                    continue
                return
        raise AssertionError(f"rtcached ended with {self.process.returncode}")
