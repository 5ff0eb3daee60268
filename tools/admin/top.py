"""The command that shows the daemon at work, again and again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import ClassVar

from rich.console import Console
from rich.live import Live

from ipc.command_line import Terminated, print_json
from ipc.errors import IpcError, ServerError
from ipc.fields import MAX_LIST_LIMIT
from ipc.sync_client import Client
from tools.admin.command import Outcome, lifetime, whole_number
from tools.admin.top_figures import Figures, Look, figures
from tools.admin.top_view import view

Show = Callable[[Figures, str], None]

#: How long a daemon may be silent before the screen says so [seconds].
_PATIENCE_S = 5.0


class Top:
    """Show the daemon at work: pool, hits, tokens/s, latencies, hottest prefixes.

    Begins anew every two seconds, until Ctrl-C. "lately" and the rates are
    about the time between two frames, so the first one has none; latencies are
    those of the last minutes. Without a terminal each frame is printed below
    the last one; with --json each is an object on a line of its own. A daemon
    that does not answer is waited for, except with --once.

    examples: rtcache-admin top
              rtcache-admin top --interval 10 --rows 20
              rtcache-admin top --once
              rtcache-admin top --once --json
    """

    name: ClassVar = "top"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--once", action="store_true", help="one frame, after one interval")
        add("--interval", type=lifetime, default=2.0, metavar="S", help="between frames (2)")
        add(
            "--rows",
            type=whole_number(1, MAX_LIST_LIMIT),
            default=10,
            metavar="N",
            help="hottest prefixes to show (10)",
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        if args.once:
            before = _look(client, args)
            time.sleep(args.interval)
            with _shown(out, args) as show:
                show(figures(_look(client, args), before), "")
            return Outcome(None)
        try:
            with _shown(out, args) as show:
                _watch(client, args, show)
        except Terminated:
            raise
        except KeyboardInterrupt:
            pass  # the way to end it
        return Outcome(None)


def _watch(client: Client, args: argparse.Namespace, show: Show) -> None:
    """Frame after frame, until interrupted."""
    before: Look | None = None
    while True:
        try:
            now = _look(client, args)
        except ServerError:
            raise
        except IpcError as error:
            if before is not None:
                show(figures(before), f"trying again: {error}")
        else:
            show(figures(now, before), "")
            before = now
        time.sleep(args.interval)


def _look(client: Client, args: argparse.Namespace) -> Look:
    patience_s = min(args.timeout, _PATIENCE_S)
    stats = client.stats(timeout_s=patience_s)
    hottest = client.list(args.rows, sort="hits", timeout_s=patience_s).entries
    return Look(time.monotonic(), stats, hottest)


@contextmanager
def _shown(out: Console, args: argparse.Namespace) -> Iterator[Show]:
    """Where frames go: JSON lines, a live screen, or one below the other."""
    if args.json:
        yield lambda frame, note: print_json(asdict(frame) | {"note": note})
    elif args.once or not out.is_terminal:
        yield lambda frame, note: out.print(view(frame, note), "")
    else:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            yield lambda frame, note: live.update(view(frame, note), refresh=True)
