"""`rtcache-doctor`: says in words what is wrong with a host and how to mend it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ipc.version import __version__, add_version
from runtime_cache.errors import BundleError, ConfigError
from tools.doctor.examine import Request, examine
from tools.doctor.host import Host, Ran, run, this_host
from tools.doctor.om_file import read_om_file
from tools.doctor.report import as_json, encode, printable, render, shorten, wrap
from tools.doctor.service_env import service_environment, write_whole

EXIT_OK = 0
EXIT_PROBLEMS = 1
EXIT_USAGE = 2

_EPILOG = """\
examples:
  rtcache-doctor                                   is this host fit for a card?
  rtcache-doctor --config rtcached.toml            and for this daemon?
  rtcache-doctor --bundle bundles/llama --device npu:0
  rtcache-doctor om bundles/llama/model.om         what an .om was made for
  rtcache-doctor env --output /etc/rtcached/cann.env
                                                   CANN's environment for a unit

run it as the user, and with the environment, that the daemon will have.

exit codes:
  0 no problem (there may be warnings)   1 a problem   2 wrong command line
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # texts of other programs, in any language
            stream.reconfigure(errors="backslashreplace")
    if words[:1] == ["om"]:
        args, command = _om_parser().parse_args(words[1:]), _om
    elif words[:1] == ["env"]:
        args, command = _env_parser().parse_args(words[1:]), _env
    else:
        args, command = new_parser().parse_args(words), _examine
    try:
        return command(args)
    except BrokenPipeError:  # `rtcache-doctor | head`
        _give_up_output()
        return EXIT_OK
    except OSError as error:  # mostly of the output: the disk is full
        _give_up_output()
        print(f"rtcache-doctor: {error.strerror or error}", file=sys.stderr)
        return EXIT_PROBLEMS


def _give_up_output() -> None:
    """Python would complain once more when it flushes at exit: there must be something to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _examine(args: argparse.Namespace) -> int:
    request = Request(
        device=args.device,
        bundle=args.bundle,
        config=args.config,
        has_checksums=args.checksums,
        may_probe=args.probe,
    )
    try:
        found = examine(_host(), request)
    except ConfigError as error:
        print(f"rtcache-doctor: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    result = as_json(found.device, found.findings)
    if args.json:
        print(encode(result), flush=True)
    else:
        title = f"rtcache-doctor {__version__}: this host, for {found.device}"
        print(render(title, found.findings, has_colours=_has_colours()), flush=True)
    return EXIT_PROBLEMS if result["has_problems"] else EXIT_OK


def _host() -> Host:
    """This host; somebody who sits before it is told what is being waited for."""
    host = this_host()
    if sys.stderr is None or not sys.stderr.isatty():
        return host
    return replace(host, runner=_announced)


def _announced(command: Sequence[str], limit_s: float, env: Mapping[str, str]) -> Ran:
    what = "npu-smi" if command[0].endswith("npu-smi") else "pyACL"
    print(f"waiting for {what}, at most {limit_s:g} s", end="", file=sys.stderr, flush=True)
    try:
        return run(command, limit_s, env)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _has_colours() -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _om(args: argparse.Namespace) -> int:
    try:
        report = read_om_file(args.file)
    except BundleError as error:
        return _no_om(args, error.message)
    except OSError as error:
        return _no_om(args, f"{args.file} cannot be read: {error.strerror}")
    if args.json:
        print(encode({"file": str(args.file), "kind": report.kind, **report.facts}), flush=True)
    else:
        lines = [f"{args.file}:", *_fitting(report.lines)]
        print("\n".join(part for line in lines for part in wrap(line)), flush=True)
    return EXIT_OK


def _fitting(lines: Sequence[str]) -> list[str]:
    """The lines without what fits no line of a terminal; if so, one more says where all is."""
    short = [shorten(line) for line in lines]
    if short == [printable(line) for line in lines]:
        return short
    return [*short, "What ends in ... is longer: --json has all of it."]


def _env(args: argparse.Namespace) -> int:
    try:
        found = service_environment(this_host(), args.cann)
    except ConfigError as error:
        print(f"rtcache-doctor: {printable(error.message)}", file=sys.stderr)
        return EXIT_PROBLEMS
    for note in found.notes:
        print(f"rtcache-doctor: {printable(note)}", file=sys.stderr)
    if args.output is None:
        text = found.text()
        print(encode(found.variables) if args.json else text.rstrip("\n"), flush=True)
    else:
        write_whole(args.output, found.text())
    return EXIT_OK


def _no_om(args: argparse.Namespace, why: str) -> int:
    if args.json:
        print(encode({"file": str(args.file), "error": why}), flush=True)
    print(f"rtcache-doctor: {printable(why)}", file=sys.stderr)
    return EXIT_PROBLEMS


def new_parser() -> argparse.ArgumentParser:
    """The command line of rtcache-doctor."""
    parser = argparse.ArgumentParser(
        prog="rtcache-doctor",
        usage="rtcache-doctor [options]\n       rtcache-doctor om FILE [--json]\n"
        "       rtcache-doctor env [--cann DIR] [--output FILE | --json]",
        description="Checks a host: says what is wrong with it and how to mend it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="made by rtcache-convert")
    parser.add_argument("--config", metavar="FILE", help="the daemon's rtcached.toml")
    parser.add_argument(
        "--device", metavar="NAME", help="npu:N or sim:0; else as the configuration says, or npu:0"
    )
    parser.add_argument(
        "--checksums", action="store_true", help="read the whole bundle and check every file"
    )
    parser.add_argument(
        "--no-probe",
        dest="probe",
        action="store_false",
        help="only look: do not use the device through pyACL",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _om_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcache-doctor om", description="Says what an .om file was made for, and by what."
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _env_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcache-doctor env",
        description="Prints what CANN's set_env.sh sets, for EnvironmentFile= of a systemd unit.",
    )
    parser.add_argument("--cann", metavar="DIR", help="its directory; else it is looked for")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--output", type=Path, metavar="FILE", help="write there, all of it or nothing"
    )
    what.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
