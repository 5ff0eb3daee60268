"""What all tests share: the loops that async tests run on, and the converted SmolLM2."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import uvloop
from rich.console import Console

from tools.demo import ensure_bundle

ROOT = Path(__file__).resolve().parents[1]

# The same examples in every run: a test that fails here fails everywhere. `make test-long` draws
# new ones.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.load_profile("same")


def pytest_configure() -> None:
    """What the one who runs the tests ignores (`nohup`, `&`), their children would ignore too."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _nothing)  # a handler; at exec it becomes the default


def _nothing(*_: object) -> None:
    """Ignores a signal."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every async test runs on both loops, unless its mark names one of them."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


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
