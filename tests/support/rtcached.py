"""`rtcached` as an operator meets it: run to its end, or asked over a raw socket."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import TracebackType
from typing import IO, Any

import zmq

from ipc.sync_client import Client
from om_models.convert import convert
from om_models.plan import ConvertOptions
from tests.support.tiny import Silent

#: Longer than anything here takes; only a hanging test reaches it [seconds].
PATIENCE_S = 60.0
#: 128 blocks of 64 tokens, contexts of 4096.
NULL_OPTIONS = ConvertOptions(
    target="sim",
    kv_tokens=8192,
    gears="prefill=32,128@64,1024,4096 decode=1,4,16@64,1024,4096",
)


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        complaint: what it said to people, without the lines of its log.
    """

    code: int
    out: str
    complaint: str


def make_null_bundle(directory: Path) -> Path:
    """A do-nothing bundle; takes two seconds."""
    convert("null", directory / "null", NULL_OPTIONS, Silent())
    return directory / "null"


def copy_of(bundle: Path, directory: Path) -> Path:
    """A bundle that may be damaged."""
    return Path(shutil.copytree(bundle, directory / "bundle"))


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte (a negative offset counts from the end)."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)


def run(*command: str, env: Mapping[str, str] | None = None, user: int | None = None) -> Ended:
    """Run a module of this project to its end; a traceback is a failure of the test.

    Args:
        command: the module's name, and its arguments.
        env: added to an environment that has no settings of ours.
        user: user id to run as.
    """
    ours = ("RTCACHE_", "COLUMNS")
    plain = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", *command],
        env=plain | {"COLUMNS": "80"} | dict(env or {}),
        user=user,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    said = [line for line in ended.stderr.splitlines() if not line.startswith('{"')]
    return Ended(ended.returncode, ended.stdout, "\n".join(said))


@contextmanager
def python(
    *arguments: str, env: Mapping[str, str] | None = None, **streams: int
) -> Iterator[Popen[str]]:
    """Python in the background, which is to end within the test.

    If it has not, as a failed test leaves it, it shows where it is, and is ended.

    Args:
        arguments: of Python.
        env: added to the environment.
        streams: what `stdin`, `stdout` and `stderr` are, where they are not the test's own.
    """
    with Popen(
        [sys.executable, "-X", "faulthandler", *arguments],
        env=os.environ | dict(env or {}),
        text=True,
        **streams,  # type: ignore[call-overload]
    ) as process:
        try:
            yield process
        except BaseException:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
                with suppress(TimeoutExpired):  # a child of it may hold its stderr
                    print(process.communicate(timeout=1)[1] or "", file=sys.stderr)
                process.kill()
            raise


@contextmanager
def background(
    *command: str, env: Mapping[str, str] | None = None, **streams: int
) -> Iterator[Popen[str]]:
    """A module of this project, as `python` says; its stderr is a pipe.

    Args:
        command: the module's name, and its arguments.
    """
    streams = {"stderr": subprocess.PIPE} | streams
    with python("-W", "error", "-m", *command, env=env, **streams) as process:
        yield process


@contextmanager
def reading(fifo: Path) -> Iterator[IO[str]]:
    """A FIFO, as soon as somebody has written to it. To open it would wait for ever for one who
    has ended before."""
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as file:
        wait_for_input(file)
        os.set_blocking(file.fileno(), True)
        yield file


def wait_for_input(file: IO[str]) -> None:
    """Wait until there is something to read, be it the end."""
    ready, _, _ = select.select([file], [], [], PATIENCE_S)
    assert ready, "nothing came"


def wait_until(condition: Callable[[], object]) -> None:
    """Ask until it is true."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s


def wait_until_idle(admin: Client) -> None:
    """Wait until no request is in work, nor a step: its blocks are given back when it is done."""
    give_up_s = time.monotonic() + PATIENCE_S
    busy = ("num_waiting", "num_running", "is_step_in_flight")
    while any((engine := admin.stats()["engine"])[name] for name in busy):
        assert time.monotonic() < give_up_s, engine


class RawClient:
    """A socket of its own that sends what it likes and keeps everything it gets."""

    def __init__(
        self, endpoint: str, kind: int = zmq.DEALER, *, name: bytes = b"", max_unread: int = 1000
    ) -> None:
        """Connect.

        Args:
            name: of the connection; libzmq's if it is empty.
            max_unread: messages that its socket holds.
        """
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, max_unread)
        if name:
            self.socket.set(zmq.ROUTING_ID, name)
        self.socket.connect(endpoint)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Vanish; may be called twice."""
        self._context.destroy(linger=0)

    def send(self, **fields: Any) -> None:
        """Send one message as JSON."""
        self.socket.send(json.dumps(fields).encode())

    def receive(self) -> dict[str, Any]:
        """The next reply, whatever it belongs to."""
        if not self.socket.poll(PATIENCE_S * 1000):
            raise TimeoutError("the daemon sent nothing")
        reply: dict[str, Any] = json.loads(self.socket.recv())
        return reply

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Send one message and wait for its last reply; pieces of an answer are skipped."""
        self.send(**fields)
        return self.last_reply()

    def last_reply(self) -> dict[str, Any]:
        """The next reply that is not a piece of an answer."""
        while (reply := self.receive())["type"] == "tokens":
            pass
        return reply

    def rest(self) -> list[dict[str, Any]]:
        """What has arrived and was not read yet; to be asked when nothing more can come."""
        replies = []
        while self.socket.poll(0):
            replies.append(json.loads(self.socket.recv()))
        return replies
