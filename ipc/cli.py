"""`rtcache`: talk to a running daemon from a shell."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import msgspec

from ipc import reasons
from ipc.answers import Result
from ipc.arguments import SamplingOptions
from ipc.command_line import Program, flatten, greet, print_json, read_text
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import IpcError, ServerError
from ipc.sync_client import AnswerStream, Client

_PROGRAM = Program("rtcache", "RTCACHE_ENDPOINT", DEFAULT_ENDPOINT)

#: How long to wait for the daemon to confirm a cancel after Ctrl-C [seconds].
_CANCEL_S = 1.0

_EXAMPLES = """\
examples:
  rtcache ping
  rtcache generate "Once upon a time" --max-tokens 64 --temperature 0
  rtcache generate --prompt-file - --stop $'\\n\\n' < prompt.txt
  rtcache generate "And then" --prefix-id p-0123456789abcdef0123456789abcdef
  rtcache chat --system "Answer in one sentence."
  rtcache chat --message "What is a prefix cache?" --temperature 0
  rtcache --endpoint tcp://127.0.0.1:5555 info --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see `ipc.command_line`)."""
    arguments = new_parser().parse_args(argv)
    commands = {"generate": _generate, "chat": _chat, "ping": _ping, "info": _info}
    command = commands[arguments.command]
    return _PROGRAM.run(arguments, lambda client: command(client, arguments))


def _ping(client: Client, arguments: argparse.Namespace) -> None:
    pong = greet(client, arguments)
    if arguments.json:
        print_json({"version": pong.version, "uptime_s": pong.uptime_s, "state": pong.state})
    else:
        print(f"rtcached {pong.version}, up for {pong.uptime_s:.0f} s, {pong.state}")


def _info(client: Client, arguments: argparse.Namespace) -> None:
    greet(client, arguments)
    fields = msgspec.to_builtins(client.info())
    fields.pop("id")
    fields.pop("type")
    if arguments.json:
        print_json(fields)
        return
    for name, value in flatten(fields):
        print(f"{name:24} {value}")


def new_parser() -> argparse.ArgumentParser:
    """The command line of rtcache."""
    parser = _PROGRAM.parser("Talk to a running rtcached.", _EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="continue a prompt and print the answer")
    generate.add_argument("prompt", nargs="?", metavar="TEXT", help="the prompt")
    generate.add_argument("--prompt-file", metavar="FILE", help="read the prompt here; - is stdin")
    generate.add_argument("--prefix-id", metavar="ID", help="a registered prefix before the prompt")
    chat = commands.add_parser("chat", help="hold a conversation, one line a turn")
    chat.add_argument("--system", metavar="TEXT", help="how the assistant should behave")
    chat.add_argument("--message", metavar="TEXT", help="ask this one question and exit")
    ping = commands.add_parser("ping", help="is the daemon there?")
    info = commands.add_parser("info", help="which model, limits and versions?")
    for command in (generate, chat, ping, info):
        _PROGRAM.add_common(command, is_command=True)
    for command in (generate, chat):
        _add_sampling(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
