"""`rtcache-admin COMMAND`: look into a running daemon's cache and change it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from ipc import standard_streams
from ipc.command_line import Program, exit_code, greet, print_json
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.sync_client import Client
from tools.admin.command import Command, LocalCommand, Outcome
from tools.admin.commands import COMMANDS

EXIT_CODES = """\
exit codes:
  0 done               1 refused or failed         2 wrong command line or file
  3 no daemon answers  4 done in part, or nothing  75 refused for now: try again
  130 interrupted (Ctrl-C)  143 terminated (SIGTERM)
"""

_PROGRAM = Program(
    "rtcache-admin", "RTCACHE_ADMIN_ENDPOINT", f"{DEFAULT_ENDPOINT}.admin", EXIT_CODES
)

_EXAMPLES = """\
examples:
  rtcache-admin top
  rtcache-admin list --sort size
  rtcache-admin explain prompt.txt
  rtcache-admin register system_prompt.txt
  rtcache-admin lease 5e884898da280471 --ttl 10m
  rtcache-admin evict --idle 1h --dry-run
  rtcache-admin drain --wait 5m
  rtcache-admin stats --json
"""


class _Console(Console):
    """A console that leaves a broken pipe to `Program.run`; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; returns the exit code."""
    standard_streams.ensure()
    args = new_parser().parse_args(argv)
    if hasattr(args.command, "run_here"):
        return _run_here(args.command, args)
    return _PROGRAM.run(args, lambda client: _run(args.command, client, args))


def _run(command: Command, client: Client, args: argparse.Namespace) -> int:
    greet(client, args)
    return _end(command.run(client, args, _console(args)), args)


def _run_here(command: LocalCommand, args: argparse.Namespace) -> int:
    """A command that needs no daemon."""
    try:
        return _end(command.run_here(args, _console(args)), args)
    except (OSError, ValueError) as error:
        _PROGRAM.complain(error)
        return exit_code(error)


def _console(args: argparse.Namespace) -> _Console:
    return _Console(quiet=args.json, highlight=False, markup=False)


def _end(outcome: Outcome, args: argparse.Namespace) -> int:
    if args.json and outcome.result is not None:
        print_json(outcome.result)
    return outcome.code


def new_parser() -> argparse.ArgumentParser:
    """The command line of rtcache-admin."""
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
