"""`rtcache`: talk to a running daemon from a shell.

Exit codes: 0 the answer came; 1 the daemon said no; 2 the command line is wrong; 3 no daemon
answers; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import msgspec

from ipc.dealer import DEFAULT_TIMEOUT_S
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.errors import EndpointError, IpcError, ServerError, Timeout
from ipc.session import Result, SamplingOptions
from ipc.sync_client import AnswerStream, Client

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

#: How long a daemon may take to say that it is there, before a long request is sent [seconds].
_GREETING_S = 5.0
#: How long to wait for the daemon to confirm a cancel after Ctrl-C [seconds].
_CANCEL_S = 1.0

_EXAMPLES = """\
examples:
  rtcache ping
  rtcache generate "Once upon a time" --max-tokens 64 --temperature 0
  rtcache generate --prompt-file - --stop $'\\n\\n' < prompt.txt
  rtcache generate "And then" --prefix-id 3f2a… --json
  rtcache chat --system "Answer in one sentence."
  rtcache chat --message "What is a prefix cache?" --temperature 0
  rtcache --endpoint tcp://127.0.0.1:5555 info --json

exit codes:
  0 the answer came    1 the daemon said no    2 wrong command line
  3 no daemon answers  130 interrupted
"""


class _UsageError(Exception):
    """The command line is wrong in a way that argparse does not see."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone (`rtcache … | head`): nothing is wrong. Python would
        # complain once more when it flushes at exit, so there must be something to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    """Run a command and turn its failure into a sentence and an exit code."""
    commands = {"generate": _generate, "chat": _chat, "ping": _ping, "info": _info}
    try:
        with Client(arguments.endpoint, timeout_s=arguments.timeout) as client:
            commands[arguments.command](client, arguments)
        return EXIT_OK
    except BrokenPipeError:
        raise
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}", EXIT_USAGE)
    except (_UsageError, EndpointError, ValueError) as error:
        return _complain(error, EXIT_USAGE)
    except Timeout as error:
        return _complain(error, EXIT_UNREACHABLE)
    except IpcError as error:
        return _complain(error, EXIT_REFUSED)


def _complain(error: Exception | str, code: int) -> int:
    print(f"rtcache: {error}", file=sys.stderr)
    if isinstance(error, ServerError) and error.retryable:
        after = f" after {error.retry_after_ms} ms" if error.retry_after_ms is not None else ""
        print(f"rtcache: the same request can succeed later; try again{after}", file=sys.stderr)
    return code


def _ping(client: Client, arguments: argparse.Namespace) -> None:
    pong = client.ping(timeout_s=min(_GREETING_S, arguments.timeout))
    if arguments.json:
        _print_json({"version": pong.version, "uptime_s": pong.uptime_s})
    else:
        print(f"rtcached {pong.version}, up for {pong.uptime_s:.0f} s")


def _info(client: Client, arguments: argparse.Namespace) -> None:
    _greet(client, arguments)
    fields = msgspec.to_builtins(client.info())
    fields.pop("id")
    fields.pop("type")
    if arguments.json:
        _print_json(fields)
        return
    for name, value in _flatten("", fields):
        print(f"{name:24} {value}")


def _generate(client: Client, arguments: argparse.Namespace) -> None:
    prompt = _prompt(arguments)
    _greet(client, arguments)
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
    _greet(client, arguments)
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
            _complain(error, EXIT_REFUSED)
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
        _print_json(msgspec.to_builtins(result))
    else:
        print()
        if arguments.usage:
            print(_usage_line(result), file=sys.stderr)
    return result.text


def _usage_line(result: Result) -> str:
    usage, timing = result.usage, result.timing
    ttft = "-" if timing.ttft_ms is None else f"{timing.ttft_ms:.0f} ms"
    rate = "-" if timing.tokens_per_s is None else f"{timing.tokens_per_s:.1f}"
    return (
        f"[{result.finish_reason}; prompt {usage.prompt_tokens} tokens, cached "
        f"{usage.cached_tokens}, prefilled {usage.prefilled_tokens}; answer "
        f"{usage.completion_tokens}; first token {ttft}, {rate} tokens/s]"
    )


def _greet(client: Client, arguments: argparse.Namespace) -> None:
    """Fail soon, and not after the whole timeout, if no daemon is there."""
    client.ping(timeout_s=min(_GREETING_S, arguments.timeout))


def _prompt(arguments: argparse.Namespace) -> str:
    if (arguments.prompt is None) == (arguments.prompt_file is None):
        raise _UsageError("give either a prompt or --prompt-file")
    if arguments.prompt_file is None:
        return str(arguments.prompt)
    try:
        if arguments.prompt_file == "-":
            return sys.stdin.read()
        with open(arguments.prompt_file, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise _UsageError(f"{arguments.prompt_file} is not UTF-8 text: {error.reason}") from error


def _sampling(arguments: argparse.Namespace) -> SamplingOptions:
    """The sampling options that were given; the daemon has the defaults of the rest."""
    options: SamplingOptions = {}
    for name in SamplingOptions.__annotations__:
        value = getattr(arguments, name, None)
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    return options


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode("utf-8"))


def _flatten(prefix: str, fields: dict[str, Any]) -> Iterable[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcache",
        description="Talk to a running rtcached.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser, is_command=False)
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
        _add_common(command, is_command=True)
    for command in (generate, chat):
        _add_sampling(command)
    return parser


def _add_common(parser: argparse.ArgumentParser, *, is_command: bool) -> None:
    """Options that may stand before or after the command; only the former have defaults."""
    endpoint = os.environ.get("RTCACHE_ENDPOINT", DEFAULT_ENDPOINT)
    suppress = argparse.SUPPRESS
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        default=suppress if is_command else endpoint,
        help=f"where the daemon listens (default: $RTCACHE_ENDPOINT, or {DEFAULT_ENDPOINT})",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        default=suppress if is_command else DEFAULT_TIMEOUT_S,
        help=f"longest silence of the daemon, in seconds (default: {DEFAULT_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=suppress if is_command else False,
        help="print one JSON object instead of text",
    )


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
    add("--usage", action="store_true", help="print token counts and timings to stderr")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")


if __name__ == "__main__":
    sys.exit(main())
