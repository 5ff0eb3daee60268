"""`rtcache-admin COMMAND`: look into a running daemon's cache and change it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from ipc.command_line import Program, greet, print_json
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.sync_client import Client
from tools.admin.commands import COMMANDS

_PROGRAM = Program("rtcache-admin", "RTCACHE_ADMIN_ENDPOINT", f"{DEFAULT_ENDPOINT}.admin")

_EXAMPLES = """\
examples:
  rtcache-admin list
  rtcache-admin explain prompt.txt
  rtcache-admin register system_prompt.txt
  rtcache-admin lease 5e884898da280471 --ttl 10m
  rtcache-admin evict --idle 1h
  rtcache-admin stats --json
"""


class _Console(Console):
    """A console that leaves a broken pipe to `Program.run`; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; returns the exit code (see `ipc.command_line`)."""
    args = _parser().parse_args(argv)
    return _PROGRAM.run(args, lambda client: _run(client, args))


def _run(client: Client, args: argparse.Namespace) -> None:
    greet(client, args)
    result = args.command.run(client, args, _Console(quiet=args.json, highlight=False))
    if args.json:
        print_json(result)


def _parser() -> argparse.ArgumentParser:
    parser = _PROGRAM.parser("Look into a running daemon's cache and change it.", _EXAMPLES)
    names = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        doc = command.__doc__ or ""
        sub = names.add_parser(
            command.name,
            help=doc.splitlines()[0],
            description=doc.replace("\n    ", "\n"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _PROGRAM.add_common(sub, is_command=True)
        command.add_flags(sub)
        sub.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
