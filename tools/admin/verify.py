"""The command that has the cached KV read once more."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import ClassVar

from rich.console import Console
from rich.progress import Progress

from ipc.command_line import EXIT_OK, EXIT_REFUSED
from ipc.errors import ServerError
from ipc.messages import Verified
from ipc.sync_client import Client
from tools.admin.command import Outcome, add_tenant, say, size

_COUNTS = tuple(name for name in Verified.__struct_fields__ if name not in ("id", "next_block"))


class Verify:
    """Read cached KV from the device once more, and drop what has changed.

    A block whose KV differs from what it was when `verify` read it first, or
    holds something that is no finite number, leaves the cache with all that
    was computed from it. The daemon goes on serving meanwhile, and its log
    names each damaged block. Exit code 1: something was damaged.

    examples: rtcache-admin verify
              rtcache-admin verify 5e884898da280471
              rtcache-admin verify --tenant team-a --json
    """

    name: ClassVar = "verify"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "digest",
            metavar="DIGEST",
            nargs="?",
            help="only this prefix; the beginning of the digest is enough (8 digits or more)",
        )
        add_tenant(parser, default=None)

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        counts = dict.fromkeys(_COUNTS, 0)
        for part in _shown(client, out, _parts(client, args.digest, args.tenant)):
            for name in _COUNTS:
                counts[name] += getattr(part, name)
        for line in _lines(counts):
            say(out, line)
        is_damaged = counts["num_changed"] + counts["num_not_finite"] > 0
        return Outcome(counts, EXIT_REFUSED if is_damaged else EXIT_OK)


def _parts(client: Client, digest: str | None, tenant: str | None) -> Iterator[Verified]:
    """The replies, until everything is read."""
    first_block: int | None = 0
    while first_block is not None:
        try:
            part = client.verify(digest, first_block=first_block, tenant=tenant)
        except ServerError as error:
            if first_block and error.code == "unknown_entry":
                return  # the prefix has left the cache since its first blocks were read
            raise
        yield part
        first_block = part.next_block


def _shown(client: Client, out: Console, parts: Iterator[Verified]) -> Iterator[Verified]:
    """The same, with a bar on a terminal that shows how far it is."""
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("blocks", total=None)
        for part in parts:
            if part.next_block is not None and not progress.disable:
                num_blocks = client.stats()["pool"]["num_blocks"]
                progress.update(task, total=num_blocks, completed=part.next_block)
            yield part


def _lines(counts: dict[str, int]) -> Iterator[str]:
    new = counts["num_new"]
    yield (
        f"{counts['num_blocks']} blocks read ({size(counts['num_bytes'])}), {new} of them for the "
        f"first time: {counts['num_changed']} have changed, {counts['num_not_finite']} hold "
        f"something that is no finite number"
    )
    if counts["dropped_blocks"]:
        yield (
            f"{counts['dropped_blocks']} blocks have left the cache, the damaged ones and what may "
            f"have come of them (still in use or kept: {counts['in_use_blocks']})"
        )
