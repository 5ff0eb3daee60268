"""Commands that keep what is cached: pin, lease, unpin."""

from __future__ import annotations

import argparse
from typing import ClassVar

from rich.console import Console

from ipc.messages import Pinned
from ipc.sync_client import Client
from tools.admin.command import (
    DIGEST_CHARS,
    Outcome,
    add_tenant,
    counted,
    lifetime,
    plain,
    say,
    size,
)
from tools.admin.naming import digest_of


class Pin:
    """Keep a cached prefix until it is unpinned.

    A pinned prefix is never evicted. The beginning of its digest is enough if
    no other begins so; `list` shows it. Pinning what is leased makes the lease
    a pin.

    example: rtcache-admin pin 5e884898da280471
    """

    name: ClassVar = "pin"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        _add_prefix(parser)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        digest = digest_of(client, args.prefix, args.tenant)
        reply = client.pin(digest, tenant=args.tenant)
        say(out, _kept(reply, "until it is unpinned"))
        return Outcome(plain(reply))


class Lease:
    """Keep a cached prefix for a time: a pin that ends by itself.

    Leasing it again replaces the former time; `unpin` ends it sooner. What is
    pinned stays pinned: a lease over a pin changes nothing and says so.

    examples: rtcache-admin lease 5e884898da280471 --ttl 10m
              rtcache-admin lease 5e884898da280471 --ttl 600
    """

    name: ClassVar = "lease"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        _add_prefix(parser)
        parser.add_argument(
            "--ttl",
            type=lifetime,
            required=True,
            metavar="S",
            help="for how many seconds; also as 90s, 10m, 2h, 1d",
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        digest = digest_of(client, args.prefix, args.tenant)
        reply = client.pin(digest, args.ttl, tenant=args.tenant)
        if reply.expires_in_s is None:
            digest = reply.digest[:DIGEST_CHARS]
            say(out, f"{digest}: is pinned already; it stays until it is unpinned")
        else:
            say(out, _kept(reply, f"for {args.ttl:g} s"))
        return Outcome(plain(reply))


class Unpin:
    """Give up a pin or a lease; the prefix may be evicted from then on.

    A registration of the same prefix stays: `release` gives that up.

    example: rtcache-admin unpin 5e884898da280471
    """

    name: ClassVar = "unpin"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        _add_prefix(parser)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        digest = digest_of(client, args.prefix, args.tenant)
        reply = client.unpin(digest, tenant=args.tenant)
        say(out, f"unpinned {reply.digest[:DIGEST_CHARS]}")
        return Outcome(plain(reply))


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefix",
        metavar="ID",
        help="digest or prefix id; its beginning is enough (8 digits or more)",
    )
    add_tenant(parser, default="")


def _kept(reply: Pinned, how_long: str) -> str:
    what = f"{counted(reply.num_tokens, 'token')} ({size(reply.num_bytes)})"
    return f"{reply.digest[:DIGEST_CHARS]}: {what} are kept {how_long}"
