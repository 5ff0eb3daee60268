"""No regular expression comes from outside: every pattern stands in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime_cache", "om_models", "ipc", "tools")
FUNCTIONS = {
    "compile",
    "search",
    "match",
    "fullmatch",
    "split",
    "findall",
    "finditer",
    "sub",
    "subn",
}


def strange_patterns(source: str) -> Iterator[int]:
    """Lines with a call of `re` whose pattern is neither written there nor a constant's name.

    A name that is inserted into a pattern has to be written out in the function's own arguments.
    """
    for node in ast.walk(ast.parse(source)):
        is_of_re = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.func.attr in FUNCTIONS
        )
        if is_of_re and not _is_ours(node.args[0]):  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]


def _is_ours(pattern: ast.expr) -> bool:
    """A text, a constant by its name, or texts and constants put together."""
    if isinstance(pattern, ast.Constant):
        return True
    if isinstance(pattern, ast.Name | ast.Attribute):
        name = pattern.id if isinstance(pattern, ast.Name) else pattern.attr
        return name.isupper()
    if isinstance(pattern, ast.BinOp):
        return _is_ours(pattern.left) and _is_ours(pattern.right)
    if isinstance(pattern, ast.JoinedStr):
        return all(_is_ours(_inserted(part)) for part in pattern.values)
    return isinstance(pattern, ast.Call) and ast.unparse(pattern.func) == "re.escape"


def _inserted(part: ast.expr) -> ast.expr:
    return part.value if isinstance(part, ast.FormattedValue) else part


#: Names of tokens that conversion writes out; the texts of special tokens, escaped.
ALLOWED = {"om_models/chat.py": 1, "om_models/spelling.py": 1}


def test_every_pattern_is_ours() -> None:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if lines := list(strange_patterns(path.read_text("utf-8"))):
                found[str(path.relative_to(ROOT))] = len(lines)
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("call", "is_strange"),
    [
        ("re.search('a', text)", False),
        ("re.search(PATTERN, text)", False),
        ("re.search(f'{PATTERN}b', text)", False),
        ("re.search(re.escape(text) , text)", False),
        ("re.search(text, 'a')", True),
        ("re.compile(f'a{text}')", True),
        ("re.compile('a' + text)", True),
        ("re.compile(request.pattern)", True),
    ],
)
def test_what_is_strange(call: str, is_strange: bool) -> None:
    assert bool(list(strange_patterns(call))) == is_strange
