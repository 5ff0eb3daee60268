"""Commands about the daemon itself: drain, resume, reload, config, stats."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from ipc.command_line import EXIT_OK, flatten
from ipc.messages import ConfigOption, Reloaded
from ipc.sync_client import Client
from tools.admin.command import EXIT_PARTLY, Outcome, counted, lifetime, plain, say

#: Between two looks at what is unfinished [seconds].
_LOOK_S = 0.2


class Drain:
    """Let the daemon take no new requests, while it stays up.

    Requests that have arrived run to their end; new ones are refused with the
    retryable error `draining`, until `resume`. With --wait the command returns
    when nothing is unfinished, or after the given time with exit code 4; so it
    does if somebody resumes meanwhile.

    examples: rtcache-admin drain
              rtcache-admin drain --wait && systemctl restart rtcached
              rtcache-admin drain --wait 5m
    """

    name: ClassVar = "drain"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--wait",
            type=lifetime,
            nargs="?",
            const=math.inf,
            metavar="S",
            help="until nothing is unfinished, so long at the most (as 90s, 5m; without: always)",
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        num_left, is_draining = client.drain().num_unfinished, True
        say(out, f"no new requests are taken; {counted(num_left, 'request')} unfinished")
        if args.wait is None:
            return Outcome({"num_unfinished": num_left})
        end_s = time.monotonic() + args.wait
        while num_left and is_draining and time.monotonic() < end_s:
            time.sleep(min(_LOOK_S, args.wait))
            engine = client.stats()["engine"]
            num_left = engine["num_waiting"] + engine["num_running"]
            is_draining = engine["is_draining"]
        say(out, _drained(num_left, is_draining=is_draining))
        is_done = not num_left and is_draining
        return Outcome({"num_unfinished": num_left}, EXIT_OK if is_done else EXIT_PARTLY)


def _drained(num_left: int, *, is_draining: bool) -> str:
    if not is_draining:
        return "somebody has resumed: new requests are taken again"
    if num_left:
        return f"{counted(num_left, 'request')} still unfinished; no new ones are taken"
    return "nothing is unfinished"


class Resume:
    """Let the daemon take new requests again, after `drain`.

    example: rtcache-admin resume
    """

    name: ClassVar = "resume"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """None."""

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.resume()
        say(out, "new requests are taken")
        return Outcome(plain(reply))


class Reload:
    """Let the daemon read its configuration and keys again, as on SIGHUP.

    If anything in them is wrong, nothing changes, and the command says what it
    is (exit code 1). Exit code 4: some changes count from the next start on.

    example: rtcache-admin reload
    """

    name: ClassVar = "reload"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """None."""

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        reply = client.reload()
        for line in _reloaded(reply):
            say(out, line)
        return Outcome(plain(reply), EXIT_PARTLY if reply.needs_restart else EXIT_OK)


def _reloaded(reply: Reloaded) -> Iterator[str]:
    yield f"changed: {', '.join(reply.changed)}" if reply.changed else "no option has changed"
    if reply.needs_restart:
        yield f"counts from the next start on: {', '.join(reply.needs_restart)}"
    if reply.num_keys is not None:
        yield f"{counted(reply.num_keys, 'key')} may connect"


class Config:
    """Show the options in force, and where each came from.

    Names of options, or the beginnings of them, choose what is shown. What is
    marked with * `reload` can change. No option is a secret:
    keys lie in files, whose paths are shown.

    examples: rtcache-admin config
              rtcache-admin config cache log.level
              rtcache-admin config --changed --json
    """

    name: ClassVar = "config"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "paths", metavar="NAME", nargs="*", help="only these, such as cache or log.level"
        )
        parser.add_argument(
            "--changed", action="store_true", help="only those that are not the default"
        )

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        known = client.config().options
        options = [option for option in known if _is_meant(option, args)]
        if options:
            out.print(_config_table(options))
        unknown = [
            path for path in args.paths if not any(option.path.startswith(path) for option in known)
        ]
        if unknown:
            say(out, f"there is no option {', '.join(unknown)}")
        elif not options:
            say(out, "all of that is as by default")
        result = {"options": [plain(option) for option in options]}
        return Outcome(result, EXIT_OK if options else EXIT_PARTLY)


def _is_meant(option: ConfigOption, args: argparse.Namespace) -> bool:
    if args.changed and option.origin == "default":
        return False
    return not args.paths or any(option.path.startswith(path) for path in args.paths)


def _config_table(options: list[ConfigOption]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("option", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for option in options:
        mark = "*" if option.is_reloadable else ""
        table.add_row(option.path, mark, option.value, option.origin)
    return table


class Stats:
    """Show the counters and gauges of the daemon.

    Sections, such as pool or cache, choose what is shown. Names may be added
    in newer versions; those that are there keep their meaning.

    examples: rtcache-admin stats
              rtcache-admin stats pool cache
              rtcache-admin stats --json
    """

    name: ClassVar = "stats"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("sections", metavar="SECTION", nargs="*", help="only these")

    def run(self, client: Client, args: argparse.Namespace, out: Console) -> Outcome:
        stats = client.stats()
        unknown = [name for name in args.sections if name not in stats]
        if unknown:
            raise ValueError(f"no section {', '.join(unknown)}; there are: {', '.join(stats)}")
        chosen = {name: stats[name] for name in args.sections or list(stats)}
        for section, values in chosen.items():
            out.print(section, style="bold")
            for line in _lines(values):
                out.print(f"  {line}")
        return Outcome(chosen)


def _lines(values: Any) -> Iterator[str]:
    """A section: names and values, or sentences."""
    if isinstance(values, dict):
        for path, value in flatten(values):
            yield f"{path:<28} {value}"
    elif isinstance(values, list):
        yield from map(str, values)
    else:
        yield str(values)
