"""The program that compiles, and one run of it: CANN's ATC or the software device's."""

from __future__ import annotations

import codecs
import io
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from om_models.atc import SOFTWARE_ATC
from om_models.atc_errors import explain
from om_models.atc_log import AtcLog
from om_models.atc_table import Release
from om_models.cann import check_python, find_cann, python_notes
from om_models.manifest import OmFile
from om_models.plan import Target
from runtime_cache.errors import ConversionError

#: A real ATC then prints its log, so that its errors are read here. Source: page `--log`.
_LOG_TO_STDOUT = {"ASCEND_SLOG_PRINT_TO_STDOUT": "1"}
#: Operators compiled at the same time; 1 needs the least memory.
#: Source: environment pages of the ATC guide (TE_PARALLEL_COMPILER: 1 to 32, default 8).
_JOB_VARIABLES = ("TE_PARALLEL_COMPILER", "MAX_COMPILE_CORE_NUMBER")
MAX_JOBS = 32
#: A longer line of output is read in pieces: what a compiler prints must not fill the memory.
_LINE_CHARACTERS = 4096
#: The longest that a signal waits to be heeded while a compiler is silent.
_HEED_S = 0.2


@dataclass(frozen=True)
class Compiler:
    """What is started for one `.om`.

    Attributes:
        command: the program, and what comes before ATC's own arguments.
        environment: the child's, whole; None for this program's own.
        release: of CANN; None for the software device or if it is not known.
        name: for people.
        notes: what may go wrong with it; sentences.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] | None
    release: Release | None
    name: str
    notes: tuple[str, ...] = ()

    @property
    def log_directory(self) -> str:
        """Where a real ATC leaves its log (plog). Source: page `--log`; not confirmed on a host."""
        environment = os.environ if self.environment is None else self.environment
        base = environment.get("ASCEND_PROCESS_LOG_PATH") or "~/ascend/log"
        return f"{base}/debug/plog"


@dataclass(frozen=True)
class CompilerOptions:
    """How the user wants the compiler to be found and run.

    Attributes:
        cann: directory of the installation; None to look for it.
        release: believed instead of what the installation says of itself.
        jobs: operators compiled at the same time; None for ATC's own default.
        checks_python: see that ATC's Python has what it needs.
    """

    cann: Path | None = None
    release: Release | None = None
    jobs: int | None = None
    checks_python: bool = True


def find_compiler(target: Target, options: CompilerOptions | None = None) -> Compiler:
    """The program that compiles for a target.

    Raises:
        ConversionError: the target is a real SoC and there is no CANN that could compile; the
            message says exactly what is missing.
    """
    options = options or CompilerOptions()
    if target == "sim":
        command = (sys.executable, *SOFTWARE_ATC)
        return Compiler(command, None, options.release, "the software device's compiler")
    cann = find_cann(options.cann)
    notes = []
    if options.checks_python:
        check_python(cann)
        notes = list(python_notes(cann))
    release = options.release or cann.release
    if release is None:
        notes.append("no file of this CANN says its release: --cann-release has options checked")
    return Compiler(
        command=(str(cann.atc),),
        environment={**cann.environment, **_LOG_TO_STDOUT, **job_variables(options.jobs)},
        release=release,
        name=cann.describe(),
        notes=tuple(notes),
    )


def run_atc(compiler: Compiler, arguments: Sequence[str], scratch: Path, log: AtcLog) -> None:
    """Compile; returns when the `.om` is written.

    Args:
        arguments: paths in them must be absolute.
        scratch: where to make a directory for the compiler's litter, which is removed.
        log: fed with the compiler's output.

    Raises:
        ConversionError: it could not be started, failed, or was ended by a signal; the message
            carries its last lines and explains the codes in them.
    """
    with (
        # ATC leaves kernel_meta/ and fusion_result.json where it runs.
        tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as directory,
        _interrupts_held() as release,
        _start([*compiler.command, *arguments], directory, compiler.environment) as process,
    ):
        watcher = threading.Thread(target=_end_what_outlives, args=(process.pid,), daemon=True)
        try:
            watcher.start()
            release()
            assert process.stdout is not None
            for line in _lines(process.stdout):
                log.feed(line.rstrip())
            watcher.join()
        except BaseException:
            # Interrupted: nobody waits an hour for what nobody wants.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        raise ConversionError(_failure(process.returncode, log, compiler.log_directory))


def find_compiled(directory: Path, om: OmFile) -> Path | None:
    """The file ATC wrote, if it is there.

    ATC adds OS and processor to the name if host code is inside.

    Raises:
        ConversionError: there are several.
    """
    plain = directory / om.path
    if plain.is_file():
        return plain
    found = sorted(directory.glob(f"{plain.stem}_linux_*.om"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConversionError(f"{directory} holds several of {om.path}: {names}; leave one of them")
    return found[0] if found else None


def job_variables(jobs: int | None) -> dict[str, str]:
    """Variables by which ATC compiles so many operators at a time; none for its own default."""
    return {} if jobs is None else dict.fromkeys(_JOB_VARIABLES, str(jobs))


def _start(
    command: Sequence[str], directory: str, environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: CANN's atc is a script with children
        )
    except OSError as error:
        raise ConversionError(f"{command[0]} cannot be started: {error.strerror}") from error


def _lines(output: IO[bytes]) -> Iterator[str]:
    """Line after line as they come, long ones in pieces; heeds signals while nothing comes.

    A signal that comes just before the thread goes to sleep, or to another thread, does not wake
    it: so it sleeps for a moment only.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    pending, is_open = "", True
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while is_open:
            if not selector.select(_HEED_S):
                continue
            chunk = os.read(output.fileno(), _LINE_CHARACTERS)
            is_open = bool(chunk)
            *whole, pending = (pending + decoder.decode(chunk, final=not chunk)).split("\n")
            for line in whole:
                yield from _pieces(line)
            if len(pending) > _LINE_CHARACTERS:
                *full, pending = _pieces(pending)
                yield from full
    if pending:
        yield pending


def _pieces(line: str) -> list[str]:
    starts = range(0, max(len(line), 1), _LINE_CHARACTERS)
    return [line[start : start + _LINE_CHARACTERS] for start in starts]


def _end_what_outlives(pid: int) -> None:
    """End the group of a program when it has ended itself.

    A compiler that was killed may leave workers behind that hold its output open for ever.
    """
    with suppress(ChildProcessError, ProcessLookupError):
        # It stays to be waited for, so that its number is nobody else's yet.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.killpg(pid, signal.SIGKILL)


def _failure(code: int, log: AtcLog, log_directory: str) -> str:
    """What is told of a run that failed: how it ended, its last words, what they mean."""
    found = explain(log.lines, log_directory)
    return "\n".join(
        [
            f"atc {_ending(code)}:",
            *log.last_lines,
            *(["what this means:", *(f"- {text}" for text in found)] if found else []),
        ]
    )


def _ending(code: int) -> str:
    # A shell, as CANN's atc is one, reports a signal of its child as 128 and its number.
    number = -code if code < 0 else code - 128
    if number in {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM}:
        name = signal.Signals(number).name
        hint = (
            "; a host that runs out of memory ends programs so: --compile-jobs 1 needs the least"
            if number == signal.SIGKILL
            else ""
        )
        return f"was ended by {name}{hint}"
    return f"failed with exit code {code}"


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Signals that would end the program wait until the function given is called.

    An interrupt within `Popen` would leave a compiler behind that nobody knows of.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) not in (signal.SIG_IGN, None):
                before[each] = signal.signal(each, lambda number, _: came.append(number))

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def release() -> None:
        restore()
        for number in came:
            signal.raise_signal(number)

    try:
        yield release
    finally:
        restore()
