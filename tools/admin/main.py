"""`rtcache-admin COMMAND`: look into a running daemon's cache and change it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import EndpointError, IpcError, ServerError
from ipc.sync_client import Client
from tools.admin.commands import COMMANDS

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

_EPILOG = """\
examples:
  rtcache-admin list
  rtcache-admin register system_prompt.txt
  rtcache-admin stats --json

exit codes:
  0 done               1 the daemon said no
  2 wrong command line 3 no daemon answers
"""

_ENDPOINT_VARIABLE = "RTCACHE_ADMIN_ENDPOINT"


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; returns the exit code."""
    args = _parser().parse_args(argv)
    out = Console(quiet=args.json, highlight=False)
    try:
        with Client(args.endpoint, timeout_s=args.timeout) as client:
            result = args.command.run(client, args, out)
    except ServerError as error:
        return _fail(f"{error.message} ({error.code})", EXIT_REFUSED)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", EXIT_USAGE)
    except (EndpointError, ValueError) as error:
        return _fail(str(error), EXIT_USAGE)
    except IpcError as error:
        return _fail(str(error), EXIT_UNREACHABLE)
    if args.json:
        print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcache-admin",
        description="Look into a running daemon's cache and change it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser, is_command=False)
    names = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        doc = command.__doc__ or ""
        sub = names.add_parser(
            command.name,
            help=doc.splitlines()[0],
            description=doc.replace("\n    ", "\n"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_common(sub, is_command=True)
        command.add_flags(sub)
        sub.set_defaults(command=command)
    return parser


def _add_common(parser: argparse.ArgumentParser, *, is_command: bool) -> None:
    """Options that may stand before or after the command; only the former have defaults."""
    endpoint = os.environ.get(_ENDPOINT_VARIABLE, f"{DEFAULT_ENDPOINT}.admin")

    def default(value: object) -> object:
        return argparse.SUPPRESS if is_command else value

    parser.add_argument(
        "--endpoint",
        metavar="URL",
        default=default(endpoint),
        help=f"admin socket (environment {_ENDPOINT_VARIABLE}; now {endpoint})",
    )
    parser.add_argument(
        "--timeout", type=float, default=default(30.0), metavar="S", help="seconds (30)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=default(False),
        help="print the reply as one JSON object",
    )


def _fail(message: str, code: int) -> int:
    print(f"rtcache-admin: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
