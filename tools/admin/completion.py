"""The command that prints what a shell needs to complete this project's commands."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, ClassVar

from rich.console import Console

from tools.admin.command import Outcome

#: Program → the module with its command line (`new_parser`).
PROGRAMS = {
    "rtcache": "ipc.cli",
    "rtcached": "runtime_cache.daemon",
    "rtcache-admin": "tools.admin.main",
    "rtcache-bench": "tools.bench.main",
    "rtcache-convert": "tools.convert_arguments",
    "rtcache-doctor": "tools.doctor.main",
}
SHELLS = ("bash", "zsh", "fish")
#: What stands for a path in a help text.
_FILES = ("FILE", "PATH", "SOURCE")
_DIRECTORIES = ("DIR", "DIRECTORY", "OUTPUT")


class Completion:
    """Print a script by which a shell completes this project's commands.

    Bash reads it from a file, or at once: eval "$(rtcache-admin completion
    bash)". For zsh put it into a file named _PROGRAM in a directory of $fpath,
    for fish into ~/.config/fish/completions/PROGRAM.fish, one file a program.

    examples: rtcache-admin completion bash
              rtcache-admin completion zsh rtcached
              rtcache-admin completion fish rtcache
    """

    name: ClassVar = "completion"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=SHELLS, help="which shell")
        parser.add_argument(
            "program",
            metavar="PROGRAM",
            choices=tuple(PROGRAMS),
            nargs="?",
            help=f"{', '.join(PROGRAMS)} (without, for bash: all of them)",
        )

    def run_here(self, args: argparse.Namespace, out: Console) -> Outcome:
        programs = [args.program or "rtcache-admin"]
        if args.program is None and args.shell == "bash":
            programs = list(PROGRAMS)
        scripts = {program: script(program, args.shell) for program in programs}
        if not args.json:
            print("\n".join(scripts.values()), end="")
        return Outcome(scripts)


def script(program: str, shell: str) -> str:
    """The completion of one program.

    Raises:
        ValueError: the library that makes it is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ValueError("completion needs shtab: pip install shtab") from error
    parser = importlib.import_module(PROGRAMS[program]).new_parser()
    files, directories = dict.fromkeys(_FILES, shtab.FILE), dict.fromkeys(_DIRECTORIES, shtab.DIR)
    _mark_paths(parser, files | directories)
    text: str = shtab.complete(parser, shell=shell)
    return text


def _mark_paths(parser: argparse.ArgumentParser, complete: dict[str, Any]) -> None:
    """Tell for which values files or directories are to be offered."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _mark_paths(sub, complete)
        elif action.metavar in complete:
            action.complete = complete[action.metavar]  # type: ignore[attr-defined]
