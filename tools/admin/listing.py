"""Commands that show what is cached: list, show."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, ClassVar, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from ipc.fields import MAX_LIST_LIMIT, MAX_SAFE_INTEGER, MAX_TOKEN_ID, KeptFilter, SortKey
from ipc.messages import Entry, Listed, Shown
from ipc.sync_client import Client
from tools.admin.command import (
    DIGEST_CHARS,
    PREFIX_ID_CHARS,
    Outcome,
    add_tenant,
    counted,
    num_bytes,
    plain,
    say,
    seconds,
    short_count,
    short_size,
    short_time,
    size,
    whole_number,
)
from tools.admin.naming import show


class List:
    """Show the cached prefixes, most recently used first.

    A prefix is a chain of KV blocks from the first token on; chains that only
    lead to longer ones are not shown. The first column is the beginning of a
    registered prefix's id (`release` and `show` take it), else of the digest
    (`show`, `pin`, `lease`, `unpin` and `evict` take it); --json has all of it.
    What is kept for several reasons is shown once for each. Of two prefixes
    that may be evicted, the one with less priority goes first.

    examples: rtcache-admin list --limit 20
              rtcache-admin list --sort size --min-size 64MiB
              rtcache-admin list --idle 1h --max-hits 0 --kept none
              rtcache-admin list --tenant team-a --offset 100
              rtcache-admin list --all --json
    """

    name: ClassVar = "list"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--limit",
            type=whole_number(1, MAX_LIST_LIMIT),
            default=100,
            metavar="N",
            help="entries at the most (100)",
        )
        add(
            "--offset",
            type=whole_number(0, MAX_TOKEN_ID),
            default=0,
            metavar="N",
            help="entries to skip (0)",
        )
        add("--all", action="store_true", help="every entry, however many pages that takes")
        add(
            "--sort",
            choices=get_args(SortKey),
            help="used: last used first (default); age: oldest first; size, hits, tokens: most",
        )
        add("--reverse", action="store_true", help="the other way round")
        add_tenant(parser, default=None)
        choice = parser.add_argument_group("only what").add_argument
        choice("--older-than", type=seconds, metavar="S", help="was cached so long ago (as 1h)")
        choice("--idle", type=seconds, metavar="S", help="was not used for so long")
        choice("--min-size", type=num_bytes, metavar="SIZE", help="takes so much (as 64MiB)")
        choice(
            "--min-hits",
            type=whole_number(0, MAX_SAFE_INTEGER),
            metavar="N",
            help="was reused so often",
        )
        choice(
            "--max-hits",
            type=whole_number(0, MAX_SAFE_INTEGER),
            metavar="N",
            help="was not reused more often",
        )
        choice("--kept", choices=get_args(KeptFilter), help="is kept for this reason, or is not")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = _every(client, args) if args.all else _page(client, args, args.limit, args.offset)
        out.print(_table(reply.entries))
        after = f" from number {args.offset} on" if args.offset else ""
        say(
            out,
            f"{len(reply.entries)} of {counted(reply.total, 'prefix', 'prefixes')}{after} "
            f"(a shared beginning counts in each)",
        )
        return Outcome(plain(reply))


def _page(client: Client, args: argparse.Namespace, limit: int, offset: int) -> Listed:
    chosen = {
        "sort": args.sort,
        "min_age_s": args.older_than,
        "min_idle_s": args.idle,
        "min_bytes": args.min_size,
        "min_hits": args.min_hits,
        "max_hits": args.max_hits,
        "kept": args.kept,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if args.reverse:
        given["reverse"] = True
    return client.list(limit, offset=offset, tenant=args.tenant, **given)


def _every(client: Client, args: argparse.Namespace) -> Listed:
    """All pages as one; what comes or goes meanwhile may be missing or come twice."""
    entries: tuple[Entry, ...] = ()
    while True:
        reply = _page(client, args, MAX_LIST_LIMIT, args.offset + len(entries))
        entries += reply.entries
        if not reply.entries or args.offset + len(entries) >= reply.total:
            return msgspec.structs.replace(reply, entries=entries)


def _table(entries: tuple[Entry, ...]) -> Table:
    # No box, and short words for large numbers: the widest values fit 80 columns.
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("prefix", no_wrap=True)
    has_tenants = any(entry.tenant for entry in entries)
    if has_tenants:
        table.add_column("tenant", overflow="fold", min_width=8)
    table.add_column("state", min_width=len("registered,"), overflow="fold")
    for name in ("tokens", "size", "hits", "age", "idle", "prio"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(
            name_of(entry),
            *([entry.tenant] if has_tenants else []),
            _state(entry),
            str(entry.num_tokens),
            short_size(entry.num_bytes),
            short_count(entry.hits),
            short_time(entry.age_s),
            short_time(entry.idle_s),
            str(entry.priority),
        )
    return table


def name_of(entry: Entry) -> str:
    """What commands call an entry."""
    if entry.prefix_id is not None:
        return entry.prefix_id[:PREFIX_ID_CHARS]
    return entry.digest[:DIGEST_CHARS]


def _state(entry: Entry) -> str:
    if not entry.num_blocks:
        return "nothing kept"
    kept = entry.kept
    if entry.expires_in_s is not None:
        kept = f"{kept} {short_time(entry.expires_in_s)}"
    if not kept:
        return "in use" if entry.in_use else "cached"
    return f"{kept}, in use" if entry.in_use else kept


class Show:
    """Show one cached prefix: what holds it, and its blocks.

    The prefix is named by its digest, by the id it is registered by, or by the
    beginning of either (8 digits or more).

    examples: rtcache-admin show 5e884898da280471
              rtcache-admin show p-0123456789abcdef --text
              rtcache-admin show 5e884898da280471 --tenant team-a --json
    """

    name: ClassVar = "show"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("prefix", metavar="ID", help="digest or prefix id, or its beginning")
        parser.add_argument("--text", action="store_true", help="show its text as well")
        add_tenant(parser, default="")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = show(client, args.prefix, args.tenant, with_text=args.text)
        for line in _lines(reply):
            say(out, line)
        out.print(_blocks(reply))
        if reply.text is not None:
            say(out, reply.text)
        return Outcome(plain(reply))


def _lines(reply: Shown) -> Iterator[str]:
    entry = reply.entry
    yield f"digest   {entry.digest}"
    if entry.prefix_id is not None:
        yield f"id       {entry.prefix_id}"
    if entry.tenant:
        yield f"tenant   {entry.tenant}"
    state = _state(msgspec.structs.replace(entry, in_use=False))
    yield f"state    {state}, in use by {counted(reply.num_requests, 'request')}"
    yield (
        f"length   {counted(entry.num_tokens, 'token')} in {counted(entry.num_blocks, 'block')} "
        f"({size(entry.num_bytes)}), continued by {counted(reply.num_continued_by, 'block')}"
    )
    yield (
        f"use      {short_count(entry.hits)} hits, cached {short_time(entry.age_s)} ago, last used "
        f"{short_time(entry.idle_s)} ago, priority {entry.priority}"
    )


def _blocks(reply: Shown) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("block", justify="right")
    table.add_column("digest", no_wrap=True)
    for name in ("tokens", "hits", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("held by")
    for number, block in enumerate(reply.blocks, 1):
        holders = [counted(block.num_requests, "request")] if block.num_requests else []
        holders += ["kept"] if block.is_kept else []
        table.add_row(
            str(number),
            block.digest[:DIGEST_CHARS],
            str(block.num_tokens),
            short_count(block.hits),
            short_time(block.idle_s),
            ", ".join(holders),
        )
    return table
