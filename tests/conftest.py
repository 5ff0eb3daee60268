"""What all tests share: the loops that async tests run on, and the converted SmolLM2."""

from __future__ import annotations

import asyncio
import getpass
import io
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import structlog
import uvloop
from rich.console import Console

from ipc.endpoint import MAX_IPC_PATH_BYTES
from om_models.atc import check_paths
from runtime_cache.errors import ConversionError
from tools.demo import ensure_bundle

ROOT = Path(__file__).resolve().parents[1]

# The same examples in every run: a test that fails here fails everywhere, however slow it is here.
# `make test-long` draws new ones.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same")

#: What a shell, or who started it, may have set for itself; the commands under test would heed it.
_OF_THE_CALLER = (
    *("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"),
    *("PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONIOENCODING", "LANGUAGE", "BASH_ENV"),
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM"),
)
#: In a test's own directory, whose name pytest cuts.
_LONGEST_SOCKET = f"/{'x' * 30}0/d/r/s.admin"
#: For hundreds of clients in one process.
_MIN_OPEN_FILES = 4096
#: What is meant for the tests themselves.
_OURS = {"RTCACHE_CLIENTS", "RTCACHE_SOAK_SEED"}


def pytest_configure(config: pytest.Config) -> None:
    """Nothing that whoever runs the tests has chosen may make them fail: what cannot be mended is
    said at once."""
    _check_temporary_directory(config)
    # What they ignore (`nohup`, `&`), the commands under test would ignore too.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _nothing)  # a handler; at exec it becomes the default


def _check_temporary_directory(config: pytest.Config) -> None:
    """Sockets lie in it, and ATC's output."""
    given = config.getoption("basetemp")
    root = Path(given or os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()).resolve()
    try:
        check_paths("ascend", root)
    except ConversionError as error:
        raise pytest.UsageError(f"temporary directory: {error}") from None
    below = "" if given else f"/pytest-of-{_user()}/pytest-1000/popen-gw10"
    if len(os.fsencode(f"{root}{below}{_LONGEST_SOCKET}")) > MAX_IPC_PATH_BYTES:
        sentence = f"{root} is too long for the sockets in it: set TMPDIR, or give --basetemp"
        raise pytest.UsageError(f"temporary directory: {sentence}")


def _user() -> str:
    """As pytest names its directory."""
    try:
        return getpass.getuser()
    except (ImportError, OSError, KeyError):
        return "unknown"


def _nothing(*_: object) -> None:
    """Ignores a signal."""


def pytest_sessionstart() -> None:
    """The same environment whoever runs the tests: no options, no colours, one language, and as
    many files as they need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        wanted = _MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MIN_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    for name in list(os.environ):
        if name in _OF_THE_CALLER or (name.startswith("RTCACHE_") and name not in _OURS):
            del os.environ[name]
    os.environ["LC_ALL"] = "C.UTF-8"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every async test runs on both loops, unless its mark names one of them."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_runtest_setup() -> None:
    """A command that an earlier test ran in this process may have set its log's level."""
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def smollm2_bundle() -> Path:
    """The demo's bundle; the first run fetches and converts the model, which takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return ROOT / ensure_bundle(Console(file=io.StringIO()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tokens were compared, and how many were ties: those are never hidden."""
    counts = {"equal_tokens": 0, "ties_within_the_bound": 0}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in counts and isinstance(value, int):
                counts[name] += value
    if counts["equal_tokens"]:
        terminalreporter.write_line(
            f"greedy tokens compared: {counts['equal_tokens']} equal, "
            f"{counts['ties_within_the_bound']} ties within the stated bounds"
        )
