"""Commands about prompts: register, release, warm, explain."""

from __future__ import annotations

import argparse
import re
from typing import Any, ClassVar

import msgspec
from rich.console import Console

from ipc import reasons
from ipc.command_line import read_text
from ipc.errors import ServerError
from ipc.messages import CacheReport, Explained
from ipc.sync_client import Client
from tools.admin.command import Outcome, add_tenant, plain, say, size

#: Between two numbers: blanks, or one comma.
_SEPARATOR = re.compile(r"\s*,\s*|\s+")
_FILE_HELP = "text file, or - for standard input"


class Register:
    """Compute a prefix once and keep it until it is released.

    The text is taken from the file, or from standard input if the file is `-`.
    Prints the prefix's id, which `rtcache generate --prefix-id` and `release`
    take. For a tenant's prefix, ask at the tenant's own socket (--endpoint).

    example: rtcache-admin register system_prompt.txt
    """

    name: ClassVar = "register"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help=_FILE_HELP)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.register(read_text(args.file))
        kept = f"{size(reply.num_bytes)} are kept"
        if not reply.num_bytes:
            kept = "nothing of so short a prefix is kept"
        say(
            out,
            f"{reply.prefix_id}: {reply.num_tokens} tokens, {reply.cached_tokens} of them were "
            f"cached already; {kept}",
        )
        return Outcome(plain(reply))


class Release:
    """Give up a registered prefix; its blocks may be evicted from then on.

    example: rtcache-admin release p-0123456789abcdef0123456789abcdef
    """

    name: ClassVar = "release"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("prefix_id", help="as printed by register or list")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.release(args.prefix_id)
        say(out, f"released {reply.prefix_id}")
        return Outcome(plain(reply))


class Warm:
    """Compute a prefix ahead of its first request, without keeping it.

    As if a request had begun with this text: it is cached now, and goes when
    its turn to be evicted comes. `register` and `pin` keep a prefix instead.
    Where less can be reused than was computed, as with cache.auto_detect off,
    the command says so (on the admin socket; other sockets do not tell).

    example: rtcache-admin warm manual.txt --priority 80
    """

    name: ClassVar = "warm"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help=_FILE_HELP)
        parser.add_argument(
            "--priority",
            type=int,
            default=50,
            metavar="N",
            help="0 to 100: what has less is evicted first (50)",
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        text = read_text(args.file)
        answer = client.generate(
            text,
            max_tokens=1,
            temperature=0,
            stream=False,
            cache_priority=args.priority,
        )
        result = answer.result()
        usage = result.usage
        say(
            out,
            f"{usage.prompt_tokens} tokens, {usage.cached_tokens} of them were cached already, "
            f"{usage.prompt_tokens - usage.cached_tokens} computed",
        )
        left = _left(client, text)
        if left is not None and left.cache.reason != "hit":
            say(out, f"not all of it can be reused now: {_sentence(left)}")
        found = _found(usage.prompt_tokens, usage.cached_tokens, result.cache)
        return Outcome({**found, "reusable_tokens": None if left is None else left.cached_tokens})


class Explain:
    """Say what the cache would do for a prompt, and why not more; run nothing.

    The prompt is the text of a file (- for standard input), with --ids the
    token ids in it (a JSON list, or numbers with blanks or commas between
    them), with --messages a conversation (a JSON list of turns with "role" and
    "content"). Exit code 0 whatever the cache has.

    examples: rtcache-admin explain prompt.txt
              rtcache-admin explain rest.txt --prefix-id p-0123...
              rtcache-admin explain --ids ids.json --tenant team-a
              rtcache-admin explain --messages chat.json
    """

    name: ClassVar = "explain"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", nargs="?", help=_FILE_HELP)
        parser.add_argument("--ids", action="store_true", help="the file holds token ids")
        parser.add_argument("--messages", metavar="FILE", help="JSON file with a conversation")
        parser.add_argument(
            "--prefix-id", metavar="ID", help="a registered prefix that stands before the prompt"
        )
        add_tenant(parser, default="")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        prompt = _prompt(args)
        reply = client.explain(**prompt, prefix_id=args.prefix_id, tenant=args.tenant)
        say(out, _sentence(reply))
        return Outcome(_found(reply.prompt_tokens, reply.cached_tokens, reply.cache))


def _left(client: Client, text: str) -> Explained | None:
    """What the cache has of a text now; None on a socket that does not tell."""
    try:
        return client.explain(text)
    except ServerError as error:
        if error.code == "forbidden":
            return None
        raise


def _sentence(reply: Explained) -> str:
    return reasons.sentence(
        reply.cache, cached_tokens=reply.cached_tokens, prompt_tokens=reply.prompt_tokens
    )


def _found(prompt_tokens: int, cached_tokens: int, report: CacheReport | None) -> dict[str, Any]:
    cache = None if report is None else plain(report)
    return {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "cache": cache}


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    """The prompt that the command line names, as `Client.explain` takes it.

    Raises:
        ValueError: none or several, or a file's content is not what it should be.
        OSError: the file cannot be read.
    """
    if (args.file is None) == (args.messages is None):
        raise ValueError("give either a file or --messages")
    if args.messages is not None:
        if args.ids:
            raise ValueError("--ids is about a file, not about --messages")
        return {"messages": _turns(args.messages)}
    text = read_text(args.file)
    return {"prompt_ids": _ids(args.file, text)} if args.ids else {"prompt": text}


def _turns(file: str) -> list[dict[str, str]]:
    try:
        return msgspec.json.decode(read_text(file), type=list[dict[str, str]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is not a JSON list of turns: {error}") from error


def _ids(file: str, text: str) -> list[int]:
    """A whole JSON list, or plain numbers."""
    try:
        if text.lstrip().startswith("["):
            return msgspec.json.decode(text, type=list[int])
        return [int(word) for word in _SEPARATOR.split(text.strip())] if text.strip() else []
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{file} holds something else than token ids") from error
