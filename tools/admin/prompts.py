"""Commands about prompts that keep nothing: warm, explain."""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

from rich.console import Console

from ipc import reasons
from ipc.command_line import EXIT_OK, read_text
from ipc.errors import ServerError
from ipc.fields import MAX_PRIORITY
from ipc.messages import CacheReport, Explained
from ipc.sync_client import Client
from tools.admin.command import EXIT_PARTLY, Outcome, add_tenant, plain, say, whole_number
from tools.admin.naming import whole_prefix_id
from tools.admin.prompt_files import add_prompt, read_prompt


class Warm:
    """Compute a prefix ahead of its first request, without keeping it.

    As if a request had begun with this text: it is cached now, and goes when
    its turn to be evicted comes. `register` and `pin` keep a prefix instead.
    Where less can be reused than was computed, as with cache.auto_detect off,
    the command says so (on the admin socket; other sockets do not tell), and
    ends with exit code 4.

    example: rtcache-admin warm manual.txt --priority 80
    """

    name: ClassVar = "warm"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", metavar="FILE", help="text file, or - for standard input")
        parser.add_argument(
            "--priority",
            type=whole_number(0, MAX_PRIORITY),
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
        is_whole = left is None or left.cache.reason == "hit"
        if left is not None and not is_whole:
            say(out, f"not all of it can be reused now: {_sentence(left)}")
        found = _found(usage.prompt_tokens, usage.cached_tokens, result.cache)
        reusable_tokens = None if left is None else left.cached_tokens
        return Outcome(
            found | {"reusable_tokens": reusable_tokens}, EXIT_OK if is_whole else EXIT_PARTLY
        )


class Explain:
    """Say what the cache would do for a prompt, and why not more; run nothing.

    The prompt is the text of a file (- for standard input), with --ids the
    token ids in it (a JSON list, or numbers with blanks or commas between
    them), with --messages a conversation (a JSON list of turns with "role" and
    "content"). Exit code 0 whatever the cache has.

    examples: rtcache-admin explain prompt.txt
              rtcache-admin explain rest.txt --prefix-id p-01234567
              rtcache-admin explain --ids ids.json --tenant team-a
              rtcache-admin explain --messages chat.json
    """

    name: ClassVar = "explain"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_prompt(parser)
        parser.add_argument(
            "--prefix-id", metavar="ID", help="a registered prefix that stands before the prompt"
        )
        add_tenant(parser, default="")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        prompt = read_prompt(args, "prompt")
        prefix_id = args.prefix_id and whole_prefix_id(client, args.prefix_id, args.tenant)
        reply = client.explain(**prompt, prefix_id=prefix_id, tenant=args.tenant)
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
