"""`rtcache-bench NAME`: the project's measurements.

Every benchmark says what the ceiling is, warms up, reports medians and spread, names device, bundle
and commit, and ends in one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from ipc.errors import IpcError
from ipc.version import __version__, add_version
from runtime_cache import log
from runtime_cache.config import LogConfig
from runtime_cache.errors import RuntimeCacheError
from tools.bench import (
    convert,
    deterministic,
    device,
    index,
    nohit,
    round_trips,
    step,
    ttft,
    workload,
)
from tools.daemon_process import DaemonFailed


class Benchmark(Protocol):
    """What a module of this package offers; its docstring is the help."""

    __doc__: str | None

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace, out: Console) -> dict[str, Any]: ...


BENCHMARKS: dict[str, Benchmark] = {
    "ttft": ttft,
    "step": step,
    "workload": workload,
    "index": index,
    "nohit": nohit,
    "deterministic": deterministic,
    "device": device,
    "convert": convert,
    "ipc": round_trips,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; exit code 0, or 1 if it could not be run."""
    args = new_parser().parse_args(argv)
    # `kill` acts like Ctrl-C: the daemon that was started does not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = Console(stderr=args.json)  # with --json, only the result goes to standard output
    log.configure(LogConfig(level="warning"))
    try:
        result = BENCHMARKS[args.name].run(args, out)
    except (RuntimeCacheError, DaemonFailed, IpcError) as error:
        print(f"rtcache-bench: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"rtcache-bench: {error}; install runtime-cache[sim,convert,bench]", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps({"benchmark": args.name, **result, **_provenance()}))
    return 0


def new_parser() -> argparse.ArgumentParser:
    """The command line of rtcache-bench."""
    parser = argparse.ArgumentParser(
        prog="rtcache-bench",
        description="The project's measurements, each against its ceiling. Prints a table and, as "
        "the last line, one JSON object.",
        epilog="example: rtcache-bench ttft --bundle .models/smollm2 --runs 5",
    )
    add_version(parser)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        doc = benchmark.__doc__ or ""
        sub = names.add_parser(
            name,
            help=doc.splitlines()[0],
            description=_filled(doc),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="the table goes to standard error")
        benchmark.add_flags(sub)
    return parser


def _filled(doc: str) -> str:
    """Paragraphs, in lines that fit a terminal of 80 columns."""
    return "\n\n".join(textwrap.fill(paragraph, 78) for paragraph in doc.strip().split("\n\n"))


def _provenance() -> dict[str, str]:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {"version": __version__, "commit": found.stdout.strip() or "unknown"}


if __name__ == "__main__":
    sys.exit(main())
