"""The host that is looked at: its files, its environment, and commands run on it within a limit.

Checks ask only this object, so that tests can put a fabricated host in its place.
"""

from __future__ import annotations

import grp
import os
import platform
import selectors
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_MAX_FILE_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that was run.

    Attributes:
        code: its exit code, below 0 for a signal; None if it did not end in time or said too much.
        out: what it printed, standard output and standard error each.
        is_flood: it said too much, and was ended for that.
    """

    code: int | None
    out: str
    err: str
    is_flood: bool = False

    def how_it_ended(self, limit_s: float) -> str:
        """As the end of a sentence."""
        if self.is_flood:
            return f"printed more than {_MAX_OUTPUT_BYTES >> 20} MiB and was ended"
        if self.code is None:
            return f"did not end within {limit_s:g} seconds"
        what = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"ended with {what}"


class Runner(Protocol):
    """Runs a command; see `run`."""

    def __call__(self, command: Sequence[str], limit_s: float, env: Mapping[str, str]) -> Ran: ...


def run(command: Sequence[str], limit_s: float, env: Mapping[str, str]) -> Ran:
    """Run a command to its end, or end it and all that it started when the limit is over.

    Args:
        limit_s: how long it may take [seconds].

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        texts = _collect(process, time.monotonic() + limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    out, err = (text.decode("utf-8", "replace") for text in texts.raw)
    return Ran(code if texts.is_complete else None, out, err, texts.is_flood)


@dataclass(slots=True)
class _Texts:
    """What was printed so far, and whether that was all, or too much."""

    raw: list[bytes] = field(default_factory=lambda: [b"", b""])
    is_complete: bool = False

    @property
    def is_flood(self) -> bool:
        return max(map(len, self.raw)) > _MAX_OUTPUT_BYTES


def _collect(process: subprocess.Popen[bytes], end_s: float) -> _Texts:
    """Reads until the command has ended, the time is over or too much was said."""
    texts = _Texts()
    with selectors.DefaultSelector() as selector:
        for index, pipe in enumerate((process.stdout, process.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, index)
        while selector.get_map():
            left_s = end_s - time.monotonic()
            if left_s <= 0 or texts.is_flood:
                return texts
            for key, _ in selector.select(left_s):
                chunk = os.read(key.fd, 1 << 16)
                texts.raw[key.data] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(end_s - time.monotonic(), 0))
        texts.is_complete = True
    return texts


def may(path: Path, mode: int) -> bool:
    """Whether this process may use a file so (`os.R_OK` and the like)."""
    return os.access(path, mode)


@dataclass(frozen=True)
class Host:
    """Everything the checks look at.

    Attributes:
        root: where its file system starts; `/` but in tests.
        env: the environment the daemon would get.
        cwd: the directory the daemon would run in, as the host names it.
        uid: of the user.
        groups: names of the user's groups.
        machine: as `uname -m` has it.
        python: version of the interpreter.
        executable: the interpreter, by which programs are run.
        runner: how commands are run.
        access: whether a file may be used so.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    uid: int = 0
    groups: frozenset[str] = frozenset()
    machine: str = "aarch64"
    python: tuple[int, int, int] = (3, 11, 0)
    executable: str = sys.executable
    runner: Runner = run
    access: Callable[[Path, int], bool] = may

    def at(self, path: str) -> Path:
        """Where a path of the host lies; a relative one starts at its working directory."""
        return self.root / os.path.join(self.cwd, path).lstrip("/")

    def exists(self, path: str) -> bool:
        """Whether there is something, a broken link not counted."""
        try:
            return self.at(path).exists()
        except OSError:
            return False

    def is_dir(self, path: str) -> bool:
        """Whether it is a directory."""
        try:
            return self.at(path).is_dir()
        except OSError:
            return False

    def names_in(self, path: str) -> list[str]:
        """Names in a directory, sorted; none if it cannot be read."""
        try:
            return sorted(os.listdir(self.at(path)))
        except OSError:
            return []

    def read(self, path: str) -> str | None:
        """A regular file's text, at most 1 MiB of it; None if it cannot be read."""
        try:
            descriptor = os.open(self.at(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return os.read(descriptor, _MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def may(self, path: str, mode: int) -> bool:
        """Whether this user may use a file so."""
        return self.access(self.at(path), mode)

    def run(self, command: Sequence[str], limit_s: float) -> Ran:
        """Run a command in the host's environment; see `run`."""
        return self.runner(command, limit_s, self.env)

    def paths(self, variable: str) -> list[str]:
        """The directories in a variable such as PATH."""
        return [path for path in self.env.get(variable, "").split(":") if path]

    def find_in(self, directories: Sequence[str], name: str) -> str | None:
        """The first of the directories that has a file of that name."""
        return next((d for d in directories if self.exists(os.path.join(d, name))), None)


def this_host() -> Host:
    """The host on which this process runs."""
    return Host(
        env=dict(os.environ),
        cwd=_working_directory(),
        uid=os.getuid(),
        groups=frozenset(_group_names()),
        machine=platform.machine(),
        python=sys.version_info[:3],
    )


def _working_directory() -> str:
    """Its name even if it was removed meanwhile."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD") or "(removed)"


def _group_names() -> list[str]:
    names = []
    for number in {*os.getgroups(), os.getgid()}:
        with suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return names
