"""Findings for people, in 80 columns, and for programs. Pure."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tools.doctor.findings import Finding, Status, count

WIDTH = 80
_MARGIN = 20
_ARROW = "-> "
#: Stands behind a character of two columns while lines are measured; no text has it.
_PAD = "\0"
_WIDE = re.compile(f"(.{_PAD})")
_COLOURS: dict[Status, str] = {"ok": "32", "warning": "33", "problem": "31;1", "skipped": "2"}
_NOUNS: dict[Status, tuple[str, str]] = {
    "problem": ("problem", "problems"),
    "warning": ("warning", "warnings"),
    "ok": ("ok", "ok"),
    "skipped": ("skipped", "skipped"),
}


def render(title: str, findings: Sequence[Finding], *, has_colours: bool) -> str:
    """All findings and a summary, one text."""
    lines = wrap(title)
    for finding in findings:
        lines += _lines(finding, has_colours=has_colours)
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Iterable[Finding]) -> str:
    """How many there are of each kind."""
    numbers = count(findings)
    return ", ".join(
        f"{number} {_NOUNS[status][number != 1]}"
        for status, number in numbers.items()
        if number or status == "problem"
    )


def as_json(device: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "device": device,
        "has_problems": any(finding.status == "problem" for finding in findings),
        "summary": count(findings),
        "findings": msgspec.to_builtins(findings),
    }


def encode(value: object) -> str:
    """A value as JSON; names of files that are no text lose what cannot be shown."""
    return msgspec.json.encode(_without_surrogates(value)).decode()


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


def _lines(finding: Finding, *, has_colours: bool) -> Iterator[str]:
    status = f"{finding.status:<8}"
    if has_colours:
        status = f"\x1b[{_COLOURS[finding.status]}m{status}\x1b[0m"
    first, *others = wrap(finding.text, WIDTH - _MARGIN)
    yield f"{status} {finding.check:<10} {first}"
    yield from (" " * _MARGIN + line for line in others)
    if finding.remedy:
        yield from (
            " " * _MARGIN + line for line in wrap(f"{_ARROW}{finding.remedy}", WIDTH - _MARGIN)
        )


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Lines of a text; a path or option is never cut, so it may stand out."""
    indent = "   " if text.startswith(_ARROW) else ""
    wrapper = _Wrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    padded = "".join(c + _PAD if _is_wide(c) else c for c in printable(text))
    return [line.replace(_PAD, "") for line in wrapper.wrap(padded)] or [""]


def shorten(text: str, width: int = WIDTH) -> str:
    """A text whose words fit a line each: of a longer one, such as a list of gears, the start."""
    return " ".join(_short(word, width) for word in printable(text).split(" "))


def _short(word: str, width: int) -> str:
    return word if len(word) <= width else f"{word[: width - 3]}..."


class _Wrapper(textwrap.TextWrapper):
    """Wraps between characters that take two columns too: Chinese has no spaces."""

    def _split(self, text: str) -> list[str]:
        return [part for chunk in super()._split(text) for part in _WIDE.split(chunk) if part]


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def printable(text: str) -> str:
    """Without what could steer a terminal: texts come from files and other programs."""
    return "".join(c if c.isprintable() else " " for c in text)
