"""`docs/ascend.md`: every test it names exists, every command is taken, nothing is left out."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tools.bench import main as bench
from tools.convert_arguments import parse_arguments
from tools.doctor import main as doctor

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
TEXT = (DOCS / "ascend.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`([^`]+\.py::[^`]+)`", TEXT)))
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")[1:]}
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]


@cache
def names_of(path: str) -> frozenset[str]:
    """The test functions of a file."""
    tree = ast.parse((TESTS / path).read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def rows(text: str) -> list[list[str]]:
    """The cells of all tables but their heads."""
    lines = re.findall(r"^\| (.*) \|\n(?!\|---)", text, re.MULTILINE)
    return [line.split(" | ") for line in lines]


@pytest.mark.parametrize("test", NAMED)
def test_it_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in names_of(path)


def test_every_fact_has_a_source_and_a_test() -> None:
    tags = {cells[0] for cells in rows(SECTIONS["Sources"])}
    facts = rows(SECTIONS["What was verified against what"])
    assert len(facts) > 40
    for fact, source, held in facts:
        assert len(fact.split()) > 3
        assert set(re.findall(r"\b[A-Z]+[0-9]*\b", source)) & tags or "field reports" in source
        assert "::test_" in held


def test_every_program_is_there() -> None:
    programs = TESTS / "programs"
    files = {path.name for path in programs.glob("*.py")}
    named = {cells[0].strip("`") for cells in rows(SECTIONS["Programs of others"])}
    assert files | {"mistakes/"} <= named
    mistakes = len(list((programs / "mistakes").glob("*.py"))) - 1  # one file is what they share
    assert f"{NUMBERS[mistakes]} typical mistakes" in TEXT


NUMBERS = {15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen"}


def test_every_unknown_of_the_kernels_is_there() -> None:
    kernels = (DOCS / "kernels.md").read_text("utf-8").split("## Unknown until measured")[1]
    unknown = re.findall(r"^(\d+)\. ", kernels, re.MULTILINE)
    of_the_graph = SECTIONS["Never seen on a card"].partition("Of pyACL:")[0]
    assert re.findall(r"^(\d+)\. ", of_the_graph, re.MULTILINE) == unknown


def test_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([a-z_]+\.md)(?:#([^)]*))?\)", TEXT):
        headings = re.findall(r"^#+ (.*)$", (DOCS / target).read_text("utf-8"), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_the_commands_are_taken() -> None:
    tools = [command[0] for command in COMMANDS]
    assert tools == [".", "rtcache-doctor", "rtcache-bench", "rtcache-bench", "python"]
    for command in COMMANDS:
        words = command[1 : command.index(">")] if ">" in command else command[1:]
        if command[0] == "rtcache-bench":
            assert bench.new_parser().parse_args(words).device == "npu:0"
        elif command[0] == "rtcache-doctor":
            assert doctor.new_parser().parse_args(words).device == "npu:0"
    ((command,),) = [re.findall(r"`rtcache-convert (MODEL [^`]*)`", TEXT)]
    assert parse_arguments(command.split()).soc_version == "Ascend310P3"
