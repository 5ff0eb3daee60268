"""The commands' manual, made from their docstrings and options: the second part of docs/admin.md.

`python -m tools.admin.manual` prints it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

from tools.admin.command import Command, LocalCommand
from tools.admin.commands import COMMANDS

_EXAMPLES = re.compile(r"\n\s*examples?: ")


def manual() -> str:
    """One chapter for each command."""
    return "\n".join(line for command in COMMANDS for line in _chapter(command))


def _chapter(command: Command | LocalCommand) -> Iterator[str]:
    doc = (command.__doc__ or "").replace("\n    ", "\n").strip()
    text, _, examples = re.sub(_EXAMPLES, "\0", doc).partition("\0")
    yield f"### {command.name}\n"
    yield f"{text.strip()}\n"
    yield "```sh"
    yield from (line.strip() for line in examples.splitlines() if line.strip())
    yield "```\n"
    options = list(_options(command))
    if options:
        yield "| argument | meaning |"
        yield "|---|---|"
        yield from options
        yield ""


def _options(command: Command | LocalCommand) -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False)
    command.add_flags(parser)
    for action in parser._actions:
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            name = f"{name} {_value(action)}"
        meaning = (action.help or "").replace("%%", "%").replace("|", "\\|")
        yield f"| `{name}` | {meaning} |"


def _value(action: argparse.Action) -> str:
    value = "\\|".join(map(str, action.choices)) if action.choices else str(action.metavar)
    return f"[{value}]" if action.nargs == "?" else value


if __name__ == "__main__":
    sys.stdout.write(manual())
