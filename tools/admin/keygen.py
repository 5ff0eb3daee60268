"""The command that draws CURVE keys; it needs no daemon."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from ipc.curve_keys import make_key_files, read_public_key
from ipc.errors import KeyFileError
from tools.admin.command import Outcome, say

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class Keygen:
    """Draw a pair of CURVE keys, for a client or for the daemon.

    Two files are written, never over others: NAME.key_secret (mode 0600), which
    stays with its owner, and NAME.key, the public half. For a client, the table
    that the list of keys wants (ipc.keys_file) is printed; put it there and
    `rtcache-admin reload`. docs/security.md tells the whole way.

    examples: rtcache-admin keygen server --server
              rtcache-admin keygen search-frontend --tenant search
              rtcache-admin keygen ops --role admin --directory ~/keys
    """

    name: ClassVar = "keygen"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("key", type=_name, metavar="NAME", help="what it is to be called")
        parser.add_argument(
            "--directory", default=".", metavar="DIR", help="where to (without: here)"
        )
        parser.add_argument("--server", action="store_true", help="the daemon's own pair")
        parser.add_argument(
            "--role", choices=("user", "admin"), default="user", help="(without: user)"
        )
        parser.add_argument(
            "--tenant", type=_tenant, default="", metavar="NAME", help="(without: the default one)"
        )
        parser.add_argument(
            "--max-requests", type=_limit, metavar="N", help="quota: unfinished requests at a time"
        )
        parser.add_argument(
            "--tokens-per-minute", type=_limit, metavar="N", help="quota: of prompts and answers"
        )

    def run_here(self, args: argparse.Namespace, out: Console) -> Outcome:
        if args.server and (option := _of_a_client(args)):
            raise ValueError(f"{option} is about a client's key, and --server the daemon's own")
        try:
            public_file, secret_file = make_key_files(args.directory, args.key)
            public_key = read_public_key(str(public_file))
        except KeyFileError as error:
            raise ValueError(error.message) from error
        entry = None if args.server else _entry(args, public_key)
        say(out, f"# {secret_file}: secret, for its owner alone\n# {public_file}: public")
        say(out, _for_server(secret_file, public_file) if entry is None else entry)
        result: dict[str, Any] = {
            "name": args.key,
            "public_key": public_key,
            "public_file": str(public_file),
            "secret_file": str(secret_file),
            "entry": entry,
        }
        return Outcome(result)


def _of_a_client(args: argparse.Namespace) -> str | None:
    """An option that was given and says something of a client."""
    given = {
        "--role": args.role != "user",
        "--tenant": args.tenant,
        "--max-requests": args.max_requests,
        "--tokens-per-minute": args.tokens_per_minute,
    }
    return next((option for option, is_given in given.items() if is_given), None)


def _for_server(secret_file: Path, public_file: Path) -> str:
    hint = f"# give clients {public_file}, for --server-key"
    # Wherever the daemon is started.
    return f'{hint}\n[ipc]\nserver_key_file = "{secret_file.absolute()}"'


def _entry(args: argparse.Namespace, public_key: str) -> str:
    """The table of the list of keys; no value needs an escape in TOML."""
    lines = ["[[keys]]", f'name = "{args.key}"', f'public_key = "{public_key}"']
    lines.append(f'role = "{args.role}"')
    if args.tenant:
        lines.append(f'tenant = "{args.tenant}"')
    quota = {"max_requests": args.max_requests, "tokens_per_minute": args.tokens_per_minute}
    if given := [f"{name} = {number}" for name, number in quota.items() if number]:
        lines.append(f"quota = {{ {', '.join(given)} }}")
    return "\n".join(lines)


def _name(text: str) -> str:
    if not _NAME.match(text) or text.startswith("."):
        raise argparse.ArgumentTypeError("expected 1 to 64 letters, digits, '_', '.' and '-'")
    return text


def _tenant(text: str) -> str:
    return _name(text) if text else ""


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text}")
    return int(text)
