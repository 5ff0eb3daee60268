"""`docs/speed.md` has every figure of `rtcache-bench ipc`, and its commands are taken."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tools.bench import round_trips

TEXT = (Path(__file__).parents[2] / "docs" / "speed.md").read_text("utf-8")
COMMANDS = re.findall(r"^    rtcache-bench ipc ?(.*)$", TEXT, re.MULTILINE)


def test_every_figure_is_explained() -> None:
    rows = re.findall(r"^\| (`.+?) \|", TEXT, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert explained == {*round_trips.Measured.__slots__, "streams", "connections", "peer"}


@pytest.mark.parametrize("flags", COMMANDS)
def test_every_command_is_taken(flags: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    round_trips.add_flags(parser)
    parser.parse_args(flags.split())


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 2
