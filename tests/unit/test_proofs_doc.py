"""`docs/proofs.md`: every report of the facts is on it once, every test it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "proofs.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`([^`]+\.py::[^`]+)`", TEXT)))
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")[1:]}
#: The rows of facts/peers.md (d): a selection, so that numbers are left out.
REPORTS = [1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 28, 29]
REPORTS += [31, 32, 33, 34, 35, 37, 38, 39, 40, 43, 44, 47, 50, 52, 53, 54, 55, 56, 57, 59]
REPORTS += [62, 63, 65, 66]
#: Those of them that are about what is not there yet: events, tiers, persistence.
LATER = {11, 54, 55, 56, 57, 59, 66}


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table."""
    lines = re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE)
    return [line.split(" | ") for line in lines[1:]]


@cache
def names_of(path: str) -> frozenset[str]:
    """The test functions of a file, and the state machines that are assigned as tests."""
    tree = ast.parse((TESTS / path).read_text("utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if name.startswith(("test_", "Test")))


@pytest.mark.parametrize("test", NAMED)
def test_it_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in names_of(path)


def test_there_are_tests_on_the_page() -> None:
    assert len(NAMED) > 150


def test_every_report_is_there_once() -> None:
    table = rows("What went wrong elsewhere")
    assert [int(number) for number, *_ in table] == REPORTS
    assert all(len(cells) == 3 for cells in table)
    assert [text for _, text, _ in table if len(text.split()) > 10] == []


def test_every_report_has_a_test_or_says_why_not() -> None:
    for number, _, shown in rows("What went wrong elsewhere"):
        assert ("`" in shown) != shown.startswith("Later: ")
        assert shown.startswith("Later: ") == (int(number) in LATER)


def test_every_promise_and_every_proof_is_there() -> None:
    promises = rows("What this cache promises")
    assert [int(number) for number, *_ in promises] == list(range(1, 12))
    proofs = rows("What was to be proved")
    assert len(proofs) == 6
    operated = rows("A daemon that is operated")
    assert len(operated) == 19
    records = rows("The security record of others")
    assert len(records) == 6
    assert all("::" in cells[-1] for cells in promises + proofs + operated + records)
