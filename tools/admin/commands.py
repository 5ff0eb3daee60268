"""The admin tool's commands: one class each, its docstring is the manual.

`add_flags` and `run` are the two halves: what is asked of the user, what is asked of the daemon and
how the reply is shown. A command returns its reply as plain data (what `--json` prints).
"""

from __future__ import annotations

import argparse
from typing import Any, ClassVar, Protocol

import msgspec
from rich.console import Console
from rich.table import Table

from ipc.command_line import flatten, read_text
from ipc.messages import Entry
from ipc.sync_client import Client


class Command(Protocol):
    """What `main` needs of a command."""

    name: ClassVar[str]

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, client: Client, args: argparse.Namespace, out: Console) -> dict[str, Any]: ...


class List:
    """Show the cached prefixes, most recently used first.

    A prefix is a chain of KV blocks from the first token on; chains that only
    lead to longer ones are not shown.

    example: rtcache-admin list --limit 20
    """

    name: ClassVar = "list"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--limit", type=int, default=100, metavar="N", help="entries at the most (100)"
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> dict[str, Any]:
        reply = client.list(args.limit)
        # No box: a prefix's whole id, to be copied, fits 80 columns with the rest.
        table = Table(box=None, pad_edge=False)
        table.add_column("prefix", no_wrap=True)
        table.add_column("state")
        for name in ("tokens", "MiB", "hits", "idle s"):
            table.add_column(name, justify="right")
        for entry in reply.entries:
            table.add_row(
                entry.prefix_id or entry.digest[:16],
                _state(entry),
                str(entry.num_tokens),
                f"{entry.num_bytes / 1024**2:.1f}",
                str(entry.hits),
                f"{entry.idle_s:.0f}",
            )
        out.print(table)
        out.print(
            f"{len(reply.entries)} of {reply.total} prefixes (a shared beginning counts in each)",
            soft_wrap=True,
        )
        return plain(reply)


def _state(entry: Entry) -> str:
    if not entry.num_blocks:
        return "below a block"
    state = "in use" if entry.in_use else "cached"
    return f"{state}, kept" if entry.prefix_id else state


class Evict:
    """Drop cached blocks that nobody uses, least recently used first.

    Blocks of running requests (in use) and of registered prefixes (kept) stay;
    the command says how many.

    examples: rtcache-admin evict --all
              rtcache-admin evict --blocks 100
    """

    name: ClassVar = "evict"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--blocks", type=int, metavar="N", help="blocks at the most")
        what.add_argument(
            "--all", action="store_true", help="everything that is neither in use nor kept"
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> dict[str, Any]:
        reply = client.evict(max_blocks=args.blocks, all=args.all)
        out.print(
            f"evicted {reply.num_blocks} blocks ({reply.num_bytes / 1024**2:.1f} MiB); "
            f"{reply.in_use_blocks} blocks are in use or kept, and stay",
            soft_wrap=True,
        )
        return plain(reply)


class Stats:
    """Show the counters and gauges of the daemon.

    example: rtcache-admin stats --json
    """

    name: ClassVar = "stats"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """None."""

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> dict[str, Any]:
        stats = client.stats()
        for section, values in stats.items():
            out.print(f"[bold]{section}[/]")
            for path, value in flatten(values):
                out.print(f"  {path:<28} {value}", markup=False)
        return stats


class Register:
    """Compute a prefix once and keep it until it is released.

    The text is taken from the file, or from standard input if the file is `-`.
    Prints the prefix's id, which `rtcache generate --prefix-id` and `release`
    take.

    example: rtcache-admin register system_prompt.txt
    """

    name: ClassVar = "register"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help="text file, or - for standard input")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> dict[str, Any]:
        reply = client.register(read_text(args.file))
        kept = f"{reply.num_bytes / 1024**2:.1f} MiB are kept"
        if not reply.num_bytes:
            kept = "that is less than a block, so nothing is kept"
        out.print(
            f"{reply.prefix_id}: {reply.num_tokens} tokens, {reply.cached_tokens} of them were "
            f"cached already; {kept}",
            soft_wrap=True,
        )
        return plain(reply)


class Release:
    """Give up a registered prefix; its blocks may be evicted from then on.

    example: rtcache-admin release p-0123456789abcdef0123456789abcdef
    """

    name: ClassVar = "release"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("prefix_id", help="as printed by register or list")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> dict[str, Any]:
        reply = client.release(args.prefix_id)
        out.print(f"released {reply.prefix_id}", soft_wrap=True)
        return plain(reply)


COMMANDS: tuple[Command, ...] = (List(), Evict(), Stats(), Register(), Release())


def plain(reply: msgspec.Struct) -> dict[str, Any]:
    """A reply's fields, all of them, without the wire's own `id`."""
    fields: dict[str, Any] = {
        name: _plain(getattr(reply, name)) for name in reply.__struct_fields__ if name != "id"
    }
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return plain(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
