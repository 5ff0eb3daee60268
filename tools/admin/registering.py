"""Commands about registered prefixes: register, release."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import Progress

from ipc.command_line import EXIT_OK, EXIT_REFUSED, print_json
from ipc.errors import ServerError
from ipc.messages import Registered
from ipc.sync_client import Client
from tools.admin.command import EXIT_PARTLY, Outcome, add_tenant, plain, say, size
from tools.admin.naming import whole_prefix_id
from tools.admin.prompt_files import Line, add_prompt, read_lines, read_prompt


class Register:
    """Compute prefixes once and keep them until they are released.

    The prefix is the text of a file (- for standard input), with --ids the
    token ids in it, with --messages the beginning of a conversation. Prints
    the prefix's id, which `rtcache generate --prefix-id` and `release` take.
    With --jsonl many are registered: each line of the file is an object with
    "text", "prompt_ids" or "messages", and with "name" if the answer is to
    call it so. All lines are read before the first is sent; one that the
    daemon refuses does not stop the others. With --json there is one object a
    line, with its "line" and "name", and with "error" where it was refused.
    Exit code 4: some were refused; 1: all were. For a tenant's prefix, ask at
    the tenant's own socket (--endpoint).

    examples: rtcache-admin register system_prompt.txt
              cat system_prompt.txt | rtcache-admin register -
              rtcache-admin register --messages turns.json
              rtcache-admin register --jsonl prompts.jsonl --json
    """

    name: ClassVar = "register"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_prompt(parser)
        parser.add_argument("--jsonl", metavar="FILE", help="file of many prefixes, one a line")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        if args.jsonl is not None:
            if args.file is not None or args.messages is not None or args.ids:
                raise ValueError("--jsonl stands alone: its lines say what they are")
            return _register_many(client, args, out)
        reply = client.register(**read_prompt(args))
        say(out, _sentence(reply))
        return Outcome(plain(reply))


class Release:
    """Give up a registered prefix; its blocks may be evicted from then on.

    On the admin socket the beginning of the id is enough (8 digits or more),
    and --tenant names whose it is; elsewhere the whole id must be given.

    examples: rtcache-admin release p-0123456789abcdef0123456789abcdef
              rtcache-admin release p-01234567 --tenant team-a
    """

    name: ClassVar = "release"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("prefix_id", metavar="ID", help="as printed by register or list")
        add_tenant(parser, default="")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        prefix_id = whole_prefix_id(client, args.prefix_id, args.tenant)
        reply = client.release(prefix_id, tenant=args.tenant or None)
        say(out, f"released {reply.prefix_id}")
        return Outcome(plain(reply))


def _register_many(client: Client, args: argparse.Namespace, out: Console) -> Outcome:
    lines = read_lines(args.jsonl)
    num_done = 0
    for number, line in _shown(lines):
        answer = _register(client, number, line)
        num_done += "error" not in answer
        if args.json:
            print_json(answer)
        else:
            say(out, _line_sentence(answer))
    say(out, f"registered {num_done} of {len(lines)} prefixes")
    if num_done == len(lines):
        return Outcome(None, EXIT_OK)
    return Outcome(None, EXIT_PARTLY if num_done else EXIT_REFUSED)


def _shown(lines: Sequence[tuple[int, Line]]) -> Iterator[tuple[int, Line]]:
    """The same, with a bar on a terminal that shows how far it is."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(lines, description="prefixes")


def _register(client: Client, number: int, line: Line) -> dict[str, Any]:
    """What came of one line."""
    found: dict[str, Any] = {"line": number, "name": line.name}
    try:
        return found | plain(client.register(**line.prompt))
    except ServerError as error:
        message = str(error).removesuffix(f" ({error.code})")
        what = {"code": error.code, "message": message, "retryable": error.retryable}
    except ValueError as error:  # what the client itself refuses
        what = {"code": "invalid_request", "message": str(error), "retryable": False}
    return found | {"error": what}


def _line_sentence(answer: dict[str, Any]) -> str:
    name = f"line {answer['line']}" if answer["name"] is None else answer["name"]
    if "error" in answer:
        return f"{name}: refused: {answer['error']['message']} ({answer['error']['code']})"
    return (
        f"{name}: {answer['prefix_id']}: {answer['num_tokens']} tokens, "
        f"{answer['cached_tokens']} cached already; {_kept(answer['num_bytes'])}"
    )


def _sentence(reply: Registered) -> str:
    return (
        f"{reply.prefix_id}: {reply.num_tokens} tokens, {reply.cached_tokens} of them were "
        f"cached already; {_kept(reply.num_bytes)}"
    )


def _kept(num_bytes: int) -> str:
    return f"{size(num_bytes)} are kept" if num_bytes else "nothing of so short a prefix is kept"
