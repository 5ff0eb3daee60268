"""Turns msgspec's error texts into sentences for the people who wrote the message. Pure.

msgspec says "Expected `float` >= 0.0 - at `$.temperature`"; a client developer is told
"`temperature`: expected a number ≥ 0, got -1". A text that is not recognised passes unchanged.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from ipc.fields import (
    DIGEST_PATTERN,
    ID_PATTERN,
    TENANT_PATTERN,
    TOKEN_ID_KEY_PATTERN,
    KeptFilter,
    Role,
    SortKey,
)

_MAX_SHOWN_CHARS = 40

_TYPE_WORDS = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "bytes": "binary data",
    "null": "null",
    "ext": "an extension type",
    "datetime": "a timestamp",
}
_LENGTH_UNITS = {"str": "characters", "array": "items", "object": "entries"}
_OPERATORS = {">=": "≥", "<=": "≤", ">": ">", "<": "<"}
_PATTERN_WORDS = {
    ID_PATTERN: "visible ASCII characters without spaces",
    TENANT_PATTERN: "visible ASCII characters without spaces",
    DIGEST_PATTERN: "lower-case hexadecimal digits",
    TOKEN_ID_KEY_PATTERN: "a token id in decimal",
}

#: What a field of a few words may hold.
_CHOICES = {"role": Role, "sort": SortKey, "kept": KeptFilter}

_AT = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`\Z")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|(?P<unknown>\[\.\.\.\])")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`\Z", re.DOTALL)
_LENGTH = re.compile(r"Expected `(?P<type>\w+)` of length (?P<op>[<>]=|==) (?P<limit>\d+)\Z")
_RANGE = re.compile(r"Expected `(?P<type>\w+)` (?P<op>[<>]=?) (?P<limit>\S+)\Z")
_PATTERN = re.compile(r"Expected `str` matching regex '(?P<pattern>.*)'\Z", re.DOTALL)
_TYPE = re.compile(r"Expected `(?P<types>[^`]+)`(, got `(?P<got>\w+)`)?\Z")
_CHOICE = re.compile(r"Invalid enum value '(?P<value>.*)'\Z", re.DOTALL)

#: Stands for "the value at the path is not known".
_UNSEEN = object()


def explain(text: str, content: object) -> str:
    """One sentence, led by the path of the field at fault.

    Args:
        text: what msgspec said.
        content: the message decoded without a type, to show the value at fault; None to show none.
    """
    path, is_key, problem = _split(text)
    value = _UNSEEN if is_key or content is None else _value_at(content, path)
    name = path.lstrip(".")
    if match := _MISSING.match(problem):
        return f"`{_join(name, match['name'])}`: missing"
    if match := _UNKNOWN.match(problem):
        return f"`{_join(name, _short(match['name']))}`: there is no such field in this message"
    if match := _CHOICE.match(problem):
        return _choice_sentence(name, match["value"])
    sentence = _expectation(problem, value)
    if sentence is None:
        return f"`{name}`: {problem}" if name else problem
    where = f"a key of `{name or 'the message'}`" if is_key else f"`{name or 'the message'}`"
    return f"{where}: {sentence}"


def _split(text: str) -> tuple[str, bool, str]:
    """(path without `$`, whether a key is at fault, the problem)."""
    match = _AT.search(text)
    if match is None:
        return "", False, text
    return match["path"], match["key"] is not None, text[: match.start()]


def _expectation(problem: str, value: object) -> str | None:
    """What was expected and what came; None if the problem is not recognised."""
    if match := _LENGTH.match(problem):
        return _length_sentence(match["type"], match["op"], int(match["limit"]), value)
    if match := _RANGE.match(problem):
        limit = match["limit"].removesuffix(".0")
        return f"expected {_words(match['type'])} {_OPERATORS[match['op']]} {limit}{_got(value)}"
    if match := _PATTERN.match(problem):
        pattern = match["pattern"].replace("\\\\", "\\")
        return f"expected {_PATTERN_WORDS.get(pattern, pattern)}{_got(value)}"
    if match := _TYPE.match(problem):
        got = _got(value)
        if not got and match["got"]:
            got = f", got {_words(match['got'])}"
        return f"expected {_words(match['types'])}{got}"
    return None


def _choice_sentence(name: str, value: str) -> str:
    words = ", ".join(get_args(_CHOICES[name.rpartition(".")[2]]))
    return f"`{name}`: expected one of {words}, got {show(value)}"


def _length_sentence(kind: str, operator: str, limit: int, value: object) -> str:
    bound = {"<=": "at most", ">=": "at least", "==": "exactly"}[operator]
    got = f", got {len(value)}" if isinstance(value, (str, list, dict)) else ""
    return f"expected {bound} {limit} {_LENGTH_UNITS.get(kind, 'items')}{got}"


def _words(types: str) -> str:
    """`int | null` → "an integer or null"."""
    return " or ".join(_TYPE_WORDS.get(part, part) for part in types.split(" | "))


def _value_at(content: Any, path: str) -> object:
    """The value that `path` leads to, or `_UNSEEN`."""
    value = content
    for step in _STEP.finditer(path):
        if step["unknown"]:
            return _UNSEEN
        key = step["name"] if step["name"] is not None else int(step["index"])
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _UNSEEN
    return value


def _got(value: object) -> str:
    return "" if value is _UNSEEN else f", got {show(value)}"


def show(value: object) -> str:
    """A value as its author would write it, shortened."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'"{_short(value)}"'
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    if isinstance(value, (int, float)):
        return _short(repr(value))
    return "binary data"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
