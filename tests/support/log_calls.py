"""Finds every event that the source logs: its name and the names of its fields.

Only literals are understood, so that the list of events stays one that can be read off the source:
`log.info("event", field=...)` of a structlog logger, and the hook of `ipc`, which is called as
`self._log("event", {"field": ...})`, or `self._log_of("event", client)` for what is about a client.
The dict may have a name that it was given just before.
A function that hands on `(event, **fields)` is no call of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")
#: How far above its use a dict is looked for [lines].
_NEAR = 8
#: What the server adds about a client.
CLIENT_FIELDS = frozenset({"role", "tenant", "identity", "key"})


class LogCall(NamedTuple):
    """One call.

    Attributes:
        where: file and line.
        level: the method's name; `warning` for the hook.
    """

    where: str
    event: str
    level: str
    fields: frozenset[str]


def log_calls(paths: list[Path]) -> list[LogCall]:
    """All calls of these files.

    Raises:
        AssertionError: a call's name or fields are no literals.
    """
    return [call for path in paths for call in _calls(path)]


def _calls(path: Path) -> Iterator[LogCall]:
    tree = ast.parse(path.read_text("utf-8"))
    loggers = _loggers(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = node.func.value, node.func.attr
        where = f"{path.name}:{node.lineno}"
        if isinstance(owner, ast.Name) and owner.id in loggers and method in METHODS:
            position = 1 if method == "log" else 0
            if ast.unparse(node.args[position]) == "event":
                continue
            fields = frozenset(_keyword(keyword, where) for keyword in node.keywords) - {"exc_info"}
            level = "error" if method == "exception" else method
            for event in _events(node.args[position], where):
                yield LogCall(where, event, level, fields)
        elif ast.unparse(node.func) == "self._log" and ast.unparse(node.args[0]) != "event":
            (event,) = _events(node.args[0], where)
            fields = node.args[1]
            if isinstance(fields, ast.Name):
                fields = _assigned(tree, fields, node.lineno)
            yield LogCall(where, event, "warning", frozenset(_keys(fields, where)))
        elif ast.unparse(node.func) == "self._log_of":
            (event,) = _events(node.args[0], where)
            yield LogCall(where, event, "warning", CLIENT_FIELDS)


def _loggers(tree: ast.Module) -> set[str]:
    """Names that stand for a structlog logger anywhere in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "structlog.get_logger" in ast.unparse(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _assigned(tree: ast.Module, name: ast.Name, line: int) -> ast.expr:
    """What the name was last given in the lines just before; itself if nothing."""
    found: ast.expr = name
    for node in ast.walk(tree):
        is_near = isinstance(node, ast.Assign) and line - _NEAR <= node.lineno < line
        if is_near and ast.unparse(node.targets[0]) == name.id:
            found = node.value
    return found


def _events(node: ast.expr, where: str) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from (*_events(node.body, where), *_events(node.orelse, where))
        return
    assert isinstance(node, ast.Constant), f"{where}: the event's name is no literal"
    yield str(node.value)


def _keyword(keyword: ast.keyword, where: str) -> str:
    assert keyword.arg is not None, f"{where}: the event's fields are not written out"
    return keyword.arg


def _keys(node: ast.expr, where: str) -> Iterator[str]:
    assert isinstance(node, ast.Dict), f"{where}: the event's fields are no literal"
    for key in node.keys:
        assert isinstance(key, ast.Constant), f"{where}: a field's name is no literal"
        yield str(key.value)
