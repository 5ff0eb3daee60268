"""What a check found: how it stands, in words, and how to mend it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem", "skipped"]

#: In the order in which people want them counted.
STATUSES: tuple[Status, ...] = ("problem", "warning", "ok", "skipped")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name, one word.
        text: what is so, a sentence; for `skipped` why it was not looked at.
        remedy: what to do, a sentence; empty if there is nothing to do.
    """

    check: str
    status: Status
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, remedy: str = "") -> Finding:
    """It may work, but somebody should look at it."""
    return Finding(check, "warning", text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    """It cannot work like this."""
    return Finding(check, "problem", text, remedy)


def skipped(check: str, text: str) -> Finding:
    """It was not looked at, and why."""
    return Finding(check, "skipped", text)


def sentence(text: str) -> str:
    """A message of elsewhere as a sentence: its capital, unless a name is first, and full stop."""
    first = text.partition(" ")[0]
    if first.isalpha() and first.islower():
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?")) else f"{text}."


def count(findings: Iterable[Finding]) -> dict[Status, int]:
    """How many there are of each kind."""
    numbers = Counter(finding.status for finding in findings)
    return {status: numbers[status] for status in STATUSES}
