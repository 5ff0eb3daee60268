"""docs/admin.md has a chapter for each command, as its help says it, and knows every exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.admin_client import WideClient, run
from tools.admin.commands import COMMANDS
from tools.admin.main import EXIT_CODES, new_parser
from tools.admin.manual import manual
from tools.admin.top_figures import Figures, HotPrefix

DOC = (Path(__file__).parents[2] / "docs" / "admin.md").read_text("utf-8")
_EXAMPLE = re.compile(r"^(?:\$ )?(rtcache-admin [^#|<>&\n]*)", re.MULTILINE)


def test_the_chapters_are_those_of_the_commands() -> None:
    """Made anew by: python -m tools.admin.manual (in place of all behind `## Commands`)."""
    head, _, chapters = DOC.partition("## Commands\n\n")
    assert head.startswith("# rtcache-admin\n")
    assert chapters == manual()
    names = re.findall(r"^### (.*)$", chapters, re.MULTILINE)
    assert names == [command.name for command in COMMANDS]


def test_every_example_is_a_command_line() -> None:
    examples = [line.strip() for line in _EXAMPLE.findall(DOC)]
    assert len(examples) > 40
    for line in examples:
        if not line.endswith('completion bash)"'):
            new_parser().parse_args(line.split()[1:])


@pytest.mark.parametrize("code", re.findall(r"(\d+) (?=[a-z])", EXIT_CODES))
def test_every_exit_code_is_explained(code: str) -> None:
    assert f"\n| {code} |" in DOC


def test_every_field_of_top_is_explained() -> None:
    chapter = DOC.partition("## What `top` shows")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`([a-z_0-9]+)`", chapter))
    names = {*Figures.__dataclass_fields__, *HotPrefix.__dataclass_fields__, "note"}
    frame = run(WideClient(), "top --once --interval 0.001")
    assert frame.outcome.code == 0
    assert names <= explained
