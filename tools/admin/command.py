"""What every command of the admin tool has in common.

`add_flags` and `run` are the two halves of a command: what is asked of the user, what is asked of
the daemon and how the reply is shown. A command returns its reply as plain data (what `--json`
prints) and how it ended; its docstring is the manual.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
from rich.console import Console

from ipc.command_line import EXIT_OK
from ipc.sync_client import Client
from runtime_cache.config import parse_bytes
from runtime_cache.errors import ConfigError

#: Digits of a digest that are shown; every command takes them.
DIGEST_CHARS = 16
#: The same of a registered prefix's id.
PREFIX_ID_CHARS = 18

#: Less was done than was asked for, or nothing: something was in use or kept, or nothing matched.
EXIT_PARTLY = 4

#: What a terminal obeys instead of showing it, but for line ends and tabs; the last two ranges turn
#: the direction of writing.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)\Z", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Outcome(NamedTuple):
    """How a command ended.

    Attributes:
        result: what `--json` prints; None if the command has printed for itself.
        code: the exit code.
    """

    result: dict[str, Any] | None
    code: int = EXIT_OK


class Command(Protocol):
    """What `main` needs of a command that asks the daemon."""

    name: ClassVar[str]

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome: ...


class LocalCommand(Protocol):
    """The same of one that needs no daemon; raises ValueError or OSError (exit code 2)."""

    name: ClassVar[str]

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...
    def run_here(self, args: argparse.Namespace, out: Console) -> Outcome: ...


def add_tenant(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """The flag `--tenant`; without it the default tenant ("") or all of them (None)."""
    words = "all tenants" if default is None else "the default tenant"
    parser.add_argument(
        "--tenant", metavar="NAME", default=default, help=f"whose (without: {words})"
    )


def seconds(text: str) -> float:
    """A duration such as 600, 90s, 10m, 2h or 1d, in seconds.

    Raises:
        ArgumentTypeError: it is none.
    """
    match = _DURATION.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a duration such as 600, 10m or 2h, got {text}")
    return float(match[1]) * _SECONDS[match[2]]


def lifetime(text: str) -> float:
    """A duration that is not zero, in seconds.

    Raises:
        ArgumentTypeError: it is none.
    """
    duration_s = seconds(text)
    if not duration_s:
        raise argparse.ArgumentTypeError("expected more than zero seconds")
    return duration_s


def num_bytes(text: str) -> int:
    """A size such as 1073741824, 512MB, 1.5GiB, or as tables have it, 24.0K (KiB), in bytes.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        return parse_bytes(f"{text}iB" if text[-1:] in tuple("KMGT") else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 512MB or 1.5GiB, got {text}"
        ) from error


def some_bytes(text: str) -> int:
    """A size that is not zero, in bytes.

    Raises:
        ArgumentTypeError: it is none.
    """
    amount = num_bytes(text)
    if not amount:
        raise argparse.ArgumentTypeError("expected more than zero bytes")
    return amount


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """What reads a whole number that lies between two others, both included.

    It raises ArgumentTypeError for everything else.
    """

    def read(text: str) -> int:
        with suppress(ValueError):
            if least <= (value := int(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to {most}, got {text}"
        )

    return read


def size(num_bytes: int) -> str:
    """Device memory, for people."""
    for unit, word in ((1024**3, "GiB"), (1024**2, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {word}"
    return f"{num_bytes / 1024:.1f} KiB"


def short_size(num_bytes: int) -> str:
    """The same for a table: at most seven characters below 10 TiB."""
    return size(num_bytes).replace(" ", "").removesuffix("iB")


def short_time(duration_s: float) -> str:
    """A duration for a table: at most four characters below 1000 days."""
    for unit_s, word, next_s in ((1, "s", 60), (60, "m", 3600), (3600, "h", 86400)):
        if duration_s < next_s:
            return f"{int(duration_s / unit_s)}{word}"
    return f"{int(duration_s / 86400)}d"


def short_count(number: int) -> str:
    """A count for a table: at most four characters below 10^18."""
    for power, word in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power and number >= 10_000:
            return f"{number // 10**power}{word}"
    return str(number)


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """A number and what it is of: `1 block`, `2 blocks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def say(out: Console, text: str) -> None:
    """One line for people, whole: nothing in it is broken, or taken for markup.

    What is cached was sent by users: it is not to move an operator's cursor, or worse.
    """
    out.print(_CONTROLS.sub(_written_out, text), soft_wrap=True, markup=False)


def _written_out(control: re.Match[str]) -> str:
    """A control character as a programmer writes it, such as `\\x1b`."""
    return control[0].encode("unicode_escape").decode("ascii")


def plain(reply: msgspec.Struct) -> dict[str, Any]:
    """A reply's fields, all of them, without the wire's own `id`."""
    fields: dict[str, Any] = {
        name: _plain(getattr(reply, name)) for name in reply.__struct_fields__ if name != "id"
    }
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return plain(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
