"""The admin tool's commands, in the order in which `--help` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import ClassVar

from rich.console import Console

from ipc.command_line import flatten
from ipc.sync_client import Client
from tools.admin.command import Command, LocalCommand, Outcome
from tools.admin.entries import Evict, Lease, List, Pin, Unpin
from tools.admin.prompts import Explain, Register, Release, Warm
from tools.admin.verify import Verify


class Stats:
    """Show the counters and gauges of the daemon.

    example: rtcache-admin stats --json
    """

    name: ClassVar = "stats"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """None."""

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        stats = client.stats()
        for section, values in stats.items():
            out.print(f"[bold]{section}[/]")
            for line in _lines(values):
                out.print(f"  {line}", markup=False)
        return Outcome(stats)


def _lines(values: object) -> Iterator[str]:
    """A section: names and values, or sentences."""
    if isinstance(values, dict):
        for path, value in flatten(values):
            yield f"{path:<28} {value}"
    elif isinstance(values, list):
        yield from map(str, values)
    else:
        yield str(values)


COMMANDS: tuple[Command | LocalCommand, ...] = (
    List(),
    Explain(),
    Evict(),
    Pin(),
    Lease(),
    Unpin(),
    Register(),
    Release(),
    Warm(),
    Verify(),
    Stats(),
)
