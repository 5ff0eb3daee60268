"""`rtcache generate` and `rtcache chat`: asks, and prints the answer as text, as one JSON object,
or as JSON lines while it grows.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

import msgspec

from ipc import reasons
from ipc.answers import Piece, Result
from ipc.arguments import SamplingOptions
from ipc.command_line import (
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_RETRY,
    Program,
    Terminated,
    greet,
    print_json,
    read_text,
)
from ipc.errors import ConnectionLost, IpcError, ServerError
from ipc.sync_client import AnswerStream, Client

#: How long to wait for the daemon to confirm a cancel after Ctrl-C [seconds].
_CANCEL_S = 1.0

#: Why an answer can end before it is complete, what to do then, and the exit code. A word that is
#: not here is no news of a loss: a newer daemon may have others.
_CUT_SHORT: dict[str, tuple[str, int]] = {
    "cancelled": ("it was cancelled in the daemon; ask again", EXIT_RETRY),
    "deadline": (
        "--deadline-ms was over; allow more, or ask for less (--max-tokens)",
        EXIT_REFUSED,
    ),
    "lease_expired": (
        "the daemon had not heard of this program for as long as its lease lasts; ask again",
        EXIT_RETRY,
    ),
    "shutdown": ("the daemon was stopped; ask again when it is back", EXIT_RETRY),
    "slow_reader": (
        "its reader took too long, so the daemon gave it up; read faster, and ask again",
        EXIT_RETRY,
    ),
}


def generate(client: Client, arguments: argparse.Namespace, program: Program) -> int:
    """Continue a prompt; returns the exit code."""
    prompt = _prompt(arguments)
    greet(client, arguments)
    sampling = _sampling(arguments)
    result = _show_answer(
        client,
        lambda: client.generate(prompt, prefix_id=arguments.prefix_id, **sampling),
        arguments,
    )
    return _note_cut(result, program)


def chat(client: Client, arguments: argparse.Namespace, program: Program) -> int:
    """Answer one message, or hold a conversation with standard input; returns the exit code."""
    history: list[dict[str, str]] = []
    if arguments.system is not None:
        history.append({"role": "system", "content": arguments.system})
    greet(client, arguments)
    if arguments.message is None:
        _converse(client, history, arguments, program)
        return EXIT_OK
    history.append({"role": "user", "content": arguments.message})
    sampling = _sampling(arguments)
    result = _show_answer(client, lambda: client.chat(history, **sampling), arguments)
    return _note_cut(result, program)


def _converse(
    client: Client,
    history: list[dict[str, str]],
    arguments: argparse.Namespace,
    program: Program,
) -> None:
    """Ask and answer until the end of input; Ctrl-C ends one answer, not the conversation."""
    sampling = _sampling(arguments)
    while (line := _read_line(sys.stdin)) is not None:
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            result = _show_answer(client, lambda: client.chat(history, **sampling), arguments)
        except Terminated:
            raise
        except KeyboardInterrupt:
            history.pop()
            print("\n(stopped; the last question is forgotten)", file=sys.stderr)
        except (ServerError, ConnectionLost) as error:
            history.pop()
            program.complain(error)
        else:
            history.append({"role": "assistant", "content": result.text})
            _note_cut(result, program)


def _read_line(source: TextIO) -> str | None:
    """One line of input, with a prompt if a person types; None at the end."""
    if source.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = source.readline()
    return line.rstrip("\n") if line else None


def _show_answer(
    client: Client, ask: Callable[[], AnswerStream], arguments: argparse.Namespace
) -> Result:
    """Ask, and print the answer as it grows or as one JSON object."""
    try:
        stream = ask()
        if not arguments.json:
            for piece in stream:
                print(piece.text, end="", flush=True)
        elif arguments.as_lines:
            for piece in stream:
                _print_piece(piece)
        result = stream.result()
    except KeyboardInterrupt:
        # Wherever it struck, nothing stays open; the answer to the ping shows that the cancels
        # before it have left, which closing the socket would drop.
        client.cancel_all()
        with contextlib.suppress(IpcError):
            client.ping(timeout_s=_CANCEL_S)
        raise
    _print_end(result, arguments)
    return result


def _note_cut(result: Result, program: Program) -> int:
    """Say so if an answer is incomplete; returns the exit code."""
    why, code = _CUT_SHORT.get(result.finish_reason, ("", EXIT_OK))
    if why:
        program.say(f"the answer is incomplete ({result.finish_reason}): {why}")
    return code


def _print_piece(piece: Piece) -> None:
    """A line for whoever reads along: `text` of all lines together is the answer."""
    line = {"type": "tokens", "text": piece.text, "token_ids": piece.token_ids}
    print_json(line | ({"logprobs": piece.logprobs} if piece.logprobs else {}))


def _print_end(result: Result, arguments: argparse.Namespace) -> None:
    if arguments.json and arguments.as_lines:
        rest = {"type": "done", "text": "", "token_ids": (), "logprobs": ()}
        print_json(msgspec.to_builtins(result) | rest)
    elif arguments.json:
        print_json(msgspec.to_builtins(result))
    else:
        print(flush=True)
        if arguments.usage:
            print(_usage_text(result), file=sys.stderr)


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


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Options of both commands."""
    parser.add_argument(
        "--stream",
        dest="as_lines",
        action="store_true",
        help="with --json: a line for each piece as it comes, then one with the end",
    )
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
