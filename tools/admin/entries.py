"""Commands about what is cached: list, evict, pin, lease, unpin."""

from __future__ import annotations

import argparse
from typing import ClassVar

from rich.console import Console
from rich.table import Table

from ipc.messages import Entry, Pinned
from ipc.sync_client import Client
from tools.admin.command import Outcome, add_tenant, lifetime, plain, say, seconds, size

#: Digits of a digest that are shown; `pin` and `evict` take them.
_DIGEST_CHARS = 16


class List:
    """Show the cached prefixes, most recently used first.

    A prefix is a chain of KV blocks from the first token on; chains that only
    lead to longer ones are not shown. The first column is the id of a
    registered prefix (`release` takes it), else the beginning of the digest
    (`pin`, `lease`, `unpin` and `evict --digest` take it; --json has all of
    it). The state begins with the tenant's name if it is not the default one;
    a lease shows the seconds that are left. Of two prefixes that may be
    evicted, the one with less priority goes first.

    examples: rtcache-admin list --limit 20
              rtcache-admin list --tenant team-a --offset 100
    """

    name: ClassVar = "list"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--limit", type=int, default=100, metavar="N", help="entries at the most (100)"
        )
        parser.add_argument(
            "--offset", type=int, default=0, metavar="N", help="entries to skip (0)"
        )
        add_tenant(parser, default=None)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.list(args.limit, offset=args.offset, tenant=args.tenant)
        out.print(_table(reply.entries))
        after = f" from number {args.offset} on" if args.offset else ""
        say(
            out,
            f"{len(reply.entries)} of {reply.total} prefixes{after} "
            f"(a shared beginning counts in each)",
        )
        return Outcome(plain(reply))


def _table(entries: tuple[Entry, ...]) -> Table:
    # No box: a prefix's whole id, to be copied, fits 80 columns with the rest.
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("prefix", no_wrap=True)
    table.add_column("state", min_width=len("registered"), overflow="fold")
    for name in ("tokens", "MiB", "hits", "idle s", "prio"):
        table.add_column(name, justify="right")
    for entry in entries:
        table.add_row(
            entry.prefix_id or entry.digest[:_DIGEST_CHARS],
            f"{entry.tenant}: {_state(entry)}" if entry.tenant else _state(entry),
            str(entry.num_tokens),
            f"{entry.num_bytes / 1024**2:.1f}",
            str(entry.hits),
            f"{entry.idle_s:.0f}",
            str(entry.priority),
        )
    return table


def _state(entry: Entry) -> str:
    if not entry.num_blocks:
        return "nothing kept"
    kept = entry.kept
    if entry.expires_in_s is not None:
        kept = f"{kept} {entry.expires_in_s:.0f}s"
    if not kept:
        return "in use" if entry.in_use else "cached"
    return f"{kept}, in use" if entry.in_use else kept


class Evict:
    """Drop cached blocks that nobody uses.

    Blocks of running requests (in use) and of registered, pinned and leased
    prefixes (kept) stay; the command says how many.

    examples: rtcache-admin evict --all
              rtcache-admin evict --blocks 100
              rtcache-admin evict --digest 5e884898da280471
              rtcache-admin evict --idle 1h --tenant team-a
    """

    name: ClassVar = "evict"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument(
            "--blocks", type=int, metavar="N", help="blocks at the most, next to go first"
        )
        what.add_argument(
            "--all", action="store_true", help="everything that is neither in use nor kept"
        )
        what.add_argument(
            "--digest",
            metavar="D",
            help="this prefix and what goes on from it; the beginning of the digest is enough",
        )
        what.add_argument(
            "--idle",
            type=seconds,
            metavar="S",
            help="what was not used for so long; also as 90s, 10m, 2h, 1d",
        )
        add_tenant(parser, default=None)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.evict(
            max_blocks=args.blocks,
            all=args.all,
            digest=args.digest,
            idle_s=args.idle,
            tenant=args.tenant,
        )
        say(
            out,
            f"evicted {reply.num_blocks} blocks ({size(reply.num_bytes)}); "
            f"{reply.in_use_blocks} blocks are in use or kept, and stay",
        )
        return Outcome(plain(reply))


class Pin:
    """Keep a cached prefix until it is unpinned.

    A pinned prefix is never evicted. The beginning of its digest is enough if
    no other begins so; `list` shows it.

    example: rtcache-admin pin 5e884898da280471
    """

    name: ClassVar = "pin"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        _add_digest(parser)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.pin(args.digest, tenant=args.tenant)
        say(out, _kept(reply, "until it is unpinned"))
        return Outcome(plain(reply))


class Lease:
    """Keep a cached prefix for a time: a pin that ends by itself.

    Leasing it again replaces the former time; `unpin` ends it sooner.

    examples: rtcache-admin lease 5e884898da280471 --ttl 10m
              rtcache-admin lease 5e884898da280471 --ttl 600
    """

    name: ClassVar = "lease"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        _add_digest(parser)
        parser.add_argument(
            "--ttl",
            type=lifetime,
            required=True,
            metavar="SECONDS",
            help="for how long; also as 90s, 10m, 2h, 1d",
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.pin(args.digest, args.ttl, tenant=args.tenant)
        say(out, _kept(reply, f"for {args.ttl:g} s"))
        return Outcome(plain(reply))


class Unpin:
    """Give up a pin or a lease; the prefix may be evicted from then on.

    example: rtcache-admin unpin 5e884898da280471
    """

    name: ClassVar = "unpin"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        _add_digest(parser)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.unpin(args.digest, tenant=args.tenant)
        say(out, f"unpinned {reply.digest[:_DIGEST_CHARS]}")
        return Outcome(plain(reply))


def _add_digest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "digest", metavar="DIGEST", help="of the prefix; its beginning is enough (8 digits or more)"
    )
    add_tenant(parser, default="")


def _kept(reply: Pinned, how_long: str) -> str:
    return (
        f"{reply.digest[:_DIGEST_CHARS]}: {reply.num_tokens} tokens ({size(reply.num_bytes)}) are "
        f"kept {how_long}"
    )
