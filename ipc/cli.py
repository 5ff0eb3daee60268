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
    arguments = _parser().parse_args(argv)
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


def _generate(client: Client, arguments: argparse.Namespace) -> None:
    prompt = _prompt(arguments)
    greet(client, arguments)
    sampling = _sampling(arguments)
    _show_answer(
        client,
        lambda: client.generate(prompt, prefix_id=arguments.prefix_id, **sampling),
        arguments,
    )


def _chat(client: Client, arguments: argparse.Namespace) -> None:
    history: list[dict[str, str]] = []
    sampling = _sampling(arguments)
    if arguments.system is not None:
        history.append({"role": "system", "content": arguments.system})
    greet(client, arguments)
    if arguments.message is not None:
        history.append({"role": "user", "content": arguments.message})
        _show_answer(client, lambda: client.chat(history, **sampling), arguments)
        return
    _converse(client, history, arguments)


def _converse(client: Client, history: list[dict[str, str]], arguments: argparse.Namespace) -> None:
    """Ask and answer until the end of input; Ctrl-C ends one answer, not the conversation."""
    sampling = _sampling(arguments)
    while (line := _read_line(sys.stdin)) is not None:
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            text = _show_answer(client, lambda: client.chat(history, **sampling), arguments)
        except KeyboardInterrupt:
            history.pop()
            print("\n(stopped; the last question is forgotten)", file=sys.stderr)
        except ServerError as error:
            history.pop()
            _PROGRAM.complain(error)
        else:
            history.append({"role": "assistant", "content": text})


def _read_line(source: TextIO) -> str | None:
    """One line of input, with a prompt if a person types; None at the end."""
    if source.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = source.readline()
    return line.rstrip("\n") if line else None


def _show_answer(
    client: Client, ask: Callable[[], AnswerStream], arguments: argparse.Namespace
) -> str:
    """Ask, and print the answer as it grows or as one JSON object; returns its text."""
    try:
        stream = ask()
        if not arguments.json:
            for piece in stream:
                print(piece.text, end="", flush=True)
        result = stream.result()
    except KeyboardInterrupt:
        # Wherever it struck, nothing stays open; the answer to the ping shows that the cancels
        # before it have left, which closing the socket would drop.
        client.cancel_all()
        with contextlib.suppress(IpcError):
            client.ping(timeout_s=_CANCEL_S)
        raise
    if arguments.json:
        print_json(msgspec.to_builtins(result))
    else:
        print()
        if arguments.usage:
            print(_usage_text(result), file=sys.stderr)
    return result.text


def _usage_text(result: Result) -> str:
    """Counts and times, and what the cache did, a line each."""
    usage, timing = result.usage, result.timing
    ttft = "-" if timing.ttft_ms is None else f"{timing.ttft_ms:.0f} ms"
    rate = "-" if timing.tokens_per_s is None else f"{timing.tokens_per_s:.1f}"
    line = (
        f"[{result.finish_reason}; prompt {usage.prompt_tokens} tokens, cached "
        f"{usage.cached_tokens}, prefilled {usage.prefilled_tokens}; answer "
        f"{usage.completion_tokens}; first token {ttft}, {rate} tokens/s]"
    )
    if result.cache is None:
        return line
    why = reasons.sentence(
        result.cache, cached_tokens=usage.cached_tokens, prompt_tokens=usage.prompt_tokens
    )
    return f"{line}\n[{why}]"


def _prompt(arguments: argparse.Namespace) -> str:
    if (arguments.prompt is None) == (arguments.prompt_file is None):
        raise ValueError("give either a prompt or --prompt-file")
    if arguments.prompt_file is not None:
        return read_text(arguments.prompt_file)
    return str(arguments.prompt)


def _sampling(arguments: argparse.Namespace) -> SamplingOptions:
    """The sampling options that were given; the daemon has the defaults of the rest."""
    options: SamplingOptions = {}
    for name in SamplingOptions.__annotations__:
        value = getattr(arguments, name, None)
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    return options


def _parser() -> argparse.ArgumentParser:
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


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the answer is chosen")
    add = group.add_argument
    add("--max-tokens", type=int, metavar="N", help="default: as many as the context allows")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 1.0)")
    add("--top-k", type=int, metavar="K", help="0 is off (default)")
    add("--top-p", type=float, metavar="P", help="1 is off (default)")
    add("--min-p", type=float, metavar="P", help="0 is off (default)")
    add("--seed", type=int, metavar="N", help="makes the random choices repeatable")
    add("--repetition-penalty", type=float, metavar="X", help="1 is off (default)")
    add("--presence-penalty", type=float, metavar="X", help="0 is off (default)")
    add("--frequency-penalty", type=float, metavar="X", help="0 is off (default)")
    add("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    add("--ignore-eos", action="store_true", default=None, help="go on after the model's end token")
    add("--logprobs", type=int, metavar="N", help="report the N best per token (with --json)")
    add("--deadline-ms", type=int, metavar="MS", help="end the answer after this long")
    cache = parser.add_argument_group("what the cache does")
    cache.add_argument(
        "--no-cache",
        dest="use_cache",
        action="store_false",
        default=None,
        help="neither reuse cached KV nor leave any behind",
    )
    cache.add_argument(
        "--cache-priority",
        type=int,
        metavar="N",
        help="0 to 100: what has less is evicted first (default: 50)",
    )
    cache.add_argument(
        "--usage",
        action="store_true",
        help="print token counts, timings and what the cache did to stderr",
    )


if __name__ == "__main__":
    sys.exit(main())
