"""The command that drops what is cached."""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

from rich.console import Console

from ipc.arguments import EvictChoice
from ipc.command_line import EXIT_OK
from ipc.fields import MAX_TOKEN_ID
from ipc.messages import Evicted
from ipc.sync_client import Client
from tools.admin.command import (
    EXIT_PARTLY,
    Outcome,
    add_tenant,
    counted,
    plain,
    say,
    seconds,
    size,
    some_bytes,
    whole_number,
)
from tools.admin.naming import digest_of


class Evict:
    """Drop cached blocks that nobody uses.

    Blocks of running requests (in use) and of registered, pinned and leased
    prefixes (kept) stay; the command says how many. A prefix is named by its
    digest or the beginning of it, and goes with all that goes on from it; what
    it shares with other prefixes stays. --lru and --bytes take all tenants for
    one cache, unless --tenant names one; with --tenant alone all of that
    tenant's blocks go. With --dry-run nothing goes, and the figures and the
    exit code are those of the real run. Exit code 4: something that was asked
    for stayed, or nothing was there to go.

    examples: rtcache-admin evict 5e884898da280471
              rtcache-admin evict --lru 100
              rtcache-admin evict --bytes 2GiB --dry-run
              rtcache-admin evict --idle 1h --tenant team-a
              rtcache-admin evict --older-than 1d
              rtcache-admin evict --all
    """

    name: ClassVar = "evict"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "prefix", metavar="ID", nargs="?", help="this prefix and what goes on from it"
        )
        what.add_argument(
            "--lru",
            type=whole_number(1, MAX_TOKEN_ID),
            metavar="N",
            help="so many blocks, next to go first",
        )
        what.add_argument(
            "--bytes",
            type=some_bytes,
            metavar="SIZE",
            help="so much at the least, in whole blocks, next to go first (as 512MB, 2GiB)",
        )
        what.add_argument(
            "--older-than",
            type=seconds,
            metavar="S",
            help="what was cached so long ago; also as 90s, 10m, 2h, 1d",
        )
        what.add_argument("--idle", type=seconds, metavar="S", help="what was not used for so long")
        what.add_argument(
            "--all", action="store_true", help="everything that is neither in use nor kept"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="say what would go, and change nothing"
        )
        add_tenant(parser, default=None)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.evict(tenant=args.tenant, dry_run=args.dry_run, **_choice(client, args))
        say(out, _sentence(reply))
        return Outcome(plain(reply), EXIT_OK if _is_done(reply, args) else EXIT_PARTLY)


def _choice(client: Client, args: argparse.Namespace) -> EvictChoice:
    """The one field of the message that says what is to go.

    Raises:
        ValueError: the command line says nothing.
    """
    if args.prefix is not None:
        return {"digest": digest_of(client, args.prefix, args.tenant or "")}
    fields: dict[str, Any] = {
        "max_blocks": args.lru,
        "min_bytes": args.bytes,
        "age_s": args.older_than,
        "idle_s": args.idle,
        "all": args.all or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if not given and args.tenant is None:
        raise ValueError(
            "say what is to go: ID, --lru, --bytes, --older-than, --idle, --all, or whose: --tenant"
        )
    choice: EvictChoice = given or {"all": True}  # type: ignore[assignment]
    return choice


def _is_done(reply: Evicted, args: argparse.Namespace) -> bool:
    """Whether something went, and nothing that was asked for stayed."""
    if not reply.num_blocks:
        return False
    if args.lru is not None:
        return reply.num_blocks == int(args.lru)
    if args.bytes is not None:
        return reply.num_bytes >= int(args.bytes)
    return not reply.in_use_blocks + reply.kept_blocks


def _sentence(reply: Evicted) -> str:
    did, stay = ("would evict", "would stay") if reply.dry_run else ("evicted", "stay")
    gone = f"{did} {counted(reply.num_blocks, 'block')} ({size(reply.num_bytes)})"
    held = [
        f"{number} {why}"
        for number, why in (
            (reply.in_use_blocks, "in use"),
            (reply.kept_blocks, "registered, pinned or leased"),
        )
        if number
    ]
    if held:
        return f"{gone}; {stay}: {', '.join(held)}"
    if reply.num_blocks:
        return gone
    return f"{gone}: there are none of that kind"
