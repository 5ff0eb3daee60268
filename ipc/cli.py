"""`rtcache`: talk to a running daemon from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec

from ipc import standard_streams
from ipc.cli_answers import add_answer_options, chat, generate
from ipc.command_line import Program, flatten, greet, print_json, read_text
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import IpcError
from ipc.sync_client import Client

_PROGRAM = Program("rtcache", "RTCACHE_ENDPOINT", DEFAULT_ENDPOINT)

_EXAMPLES = """\
examples:
  rtcache ping
  rtcache generate "Once upon a time" --max-tokens 64 --temperature 0
  rtcache generate --prompt-file - --stop $'\\n\\n' < prompt.txt
  rtcache generate "Go on" --json --stream | jq -j --unbuffered .text
  rtcache register --file system_prompt.txt
  rtcache generate "And then" --prefix-id p-0123456789abcdef0123456789abcdef
  rtcache chat --system "Answer in one sentence."
  rtcache chat --message "What is a prefix cache?" --temperature 0
  rtcache --endpoint tcp://127.0.0.1:5555 info --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see `ipc.command_line`)."""
    standard_streams.ensure()
    arguments = new_parser().parse_args(argv)
    return _PROGRAM.run(arguments, lambda client: _run(client, arguments))


def _run(client: Client, arguments: argparse.Namespace) -> int | None:
    try:
        return _COMMANDS[arguments.command](client, arguments)
    except IpcError as error:
        if arguments.json:
            print_json(_failure(error))
        raise


def _failure(error: IpcError) -> dict[str, object]:
    """An error as a line of JSON; what is not the daemon's has a word of our own."""
    return {
        "type": "error",
        "code": getattr(error, "code", type(error).__name__),
        "message": error.message,
        "retryable": getattr(error, "retryable", False),
        "retry_after_ms": getattr(error, "retry_after_ms", None),
    }


def _generate(client: Client, arguments: argparse.Namespace) -> int:
    return generate(client, arguments, _PROGRAM)


def _chat(client: Client, arguments: argparse.Namespace) -> int:
    return chat(client, arguments, _PROGRAM)


def _ping(client: Client, arguments: argparse.Namespace) -> None:
    pong = greet(client, arguments)
    if arguments.json:
        print_json(_without_envelope(pong))
    else:
        print(f"rtcached {pong.version}, up for {pong.uptime_s:.0f} s, {pong.state}")


def _info(client: Client, arguments: argparse.Namespace) -> None:
    greet(client, arguments)
    fields = _without_envelope(client.info())
    if arguments.json:
        print_json(fields)
        return
    for name, value in flatten(fields):
        print(f"{name:24} {value}")


def _tokenize(client: Client, arguments: argparse.Namespace) -> None:
    text = _text(arguments)
    greet(client, arguments)
    ids = client.tokenize(text)
    if arguments.json:
        print_json({"token_ids": ids})
    else:
        print(*ids)


def _register(client: Client, arguments: argparse.Namespace) -> None:
    text = _text(arguments)
    greet(client, arguments)
    registered = client.register(text)
    if arguments.json:
        print_json(_without_envelope(registered))
        return
    print(registered.prefix_id)
    print(
        f"[{registered.num_tokens} tokens, {registered.cached_tokens} of them were cached]",
        file=sys.stderr,
    )


def _release(client: Client, arguments: argparse.Namespace) -> None:
    greet(client, arguments)
    released = client.release(arguments.prefix_id)
    if arguments.json:
        print_json(_without_envelope(released))


_COMMANDS: dict[str, Callable[[Client, argparse.Namespace], int | None]] = {
    "generate": _generate,
    "chat": _chat,
    "ping": _ping,
    "info": _info,
    "tokenize": _tokenize,
    "register": _register,
    "release": _release,
}


def _without_envelope(reply: msgspec.Struct) -> dict[str, object]:
    fields: dict[str, object] = {
        name: msgspec.to_builtins(getattr(reply, name)) for name in reply.__struct_fields__
    }
    del fields["id"]
    return fields


def _text(arguments: argparse.Namespace) -> str:
    if (arguments.text is None) == (arguments.file is None):
        raise ValueError("give either a text or --file")
    return read_text(arguments.file) if arguments.text is None else str(arguments.text)


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
    for command in (generate, chat):
        add_answer_options(command)
    commands.add_parser("ping", help="is the daemon there?")
    commands.add_parser("info", help="which model, limits and versions?")
    tokenize = commands.add_parser("tokenize", help="print the token ids of a text")
    register = commands.add_parser("register", help="keep a prefix in the cache; prints its id")
    for command in (tokenize, register):
        command.add_argument("text", nargs="?", metavar="TEXT", help="the text")
        command.add_argument("--file", metavar="FILE", help="read the text here; - is stdin")
    release = commands.add_parser("release", help="give a registered prefix up")
    release.add_argument("prefix_id", metavar="ID", help="what register printed")
    for command in commands.choices.values():
        _PROGRAM.add_common(command, is_command=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
