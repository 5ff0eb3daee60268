"""What the command lines of this project's clients share: common options, exit codes, complaints.

Exit codes: 0 the answer came; 1 the request was refused or failed; 2 the command line is wrong;
3 no daemon answers, or it went away; 75 refused for now, or the answer was cut short, so that the
same can succeed later; 130 interrupted (Ctrl-C); 143 terminated (SIGTERM). The last two cancel what
is unfinished.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import msgspec

from ipc.curve_keys import CurveKeys
from ipc.dealer import DEFAULT_TIMEOUT_S
from ipc.errors import (
    ConnectionLost,
    EndpointError,
    IpcError,
    KeyFileError,
    NotWelcome,
    ServerError,
    Timeout,
)
from ipc.messages import Pong
from ipc.sync_client import Client
from ipc.unreachable import look
from ipc.version import add_version

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
#: What sendmail's friends take for "try again".
EXIT_RETRY = 75
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

#: For the end of `--help`.
EXIT_CODES = """\
exit codes:
  0 the answer came         1 refused or failed, or the answer ran into its deadline
  2 wrong command line      3 no daemon answers
  75 refused for now, or the answer was cut short: try again later
  130 interrupted (Ctrl-C)  143 terminated (SIGTERM)
"""

#: How long an endpoint is asked where nobody listens: a daemon may be about to start [seconds].
GREETING_S = 5.0


class Terminated(KeyboardInterrupt):
    """SIGTERM came: as Ctrl-C, but to be heard where Ctrl-C ends one answer only."""


@dataclass(frozen=True)
class Program:
    """A command that asks a running daemon.

    Attributes:
        name: as it is called.
        endpoint_variable: environment variable with the daemon's endpoint.
        default_endpoint: where the daemon listens if nothing else is said.
        exit_codes: for the end of `--help`.
    """

    name: str
    endpoint_variable: str
    default_endpoint: str
    exit_codes: str = EXIT_CODES

    def parser(self, description: str, examples: str) -> argparse.ArgumentParser:
        """The parser of the whole command line; it has the common options."""
        parser = argparse.ArgumentParser(
            prog=self.name,
            description=description,
            epilog=f"{examples}\n{self.exit_codes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_version(parser)
        self.add_common(parser, is_command=False)
        return parser

    def add_common(self, parser: argparse.ArgumentParser, *, is_command: bool) -> None:
        """Options that may stand before or after the command; only the former have defaults."""

        def default(value: object) -> object:
            return argparse.SUPPRESS if is_command else value

        parser.add_argument(
            "--endpoint",
            metavar="URL",
            default=default(os.environ.get(self.endpoint_variable, self.default_endpoint)),
            help=f"where the daemon listens (default: ${self.endpoint_variable}, or "
            f"{self.default_endpoint})",
        )
        parser.add_argument(
            "--server-key",
            metavar="KEY",
            default=default(os.environ.get("RTCACHE_SERVER_KEY", "")),
            help="the daemon's public key, or a file with it: over TCP; --server-key=KEY if it "
            "begins with - (default: $RTCACHE_SERVER_KEY)",
        )
        parser.add_argument(
            "--key-file",
            metavar="FILE",
            default=default(os.environ.get("RTCACHE_KEY_FILE", "")),
            help="your secret key file, made by rtcache-admin keygen (default: $RTCACHE_KEY_FILE)",
        )
        parser.add_argument(
            "--timeout",
            type=_seconds,
            metavar="S",
            default=default(DEFAULT_TIMEOUT_S),
            help=f"longest silence of the daemon, in seconds (default: {DEFAULT_TIMEOUT_S:g}); "
            f"where none listens, {GREETING_S:g} at the most",
        )
        parser.add_argument(
            "--json",
            action="store_true",
            default=default(False),
            help="print one JSON object instead of text",
        )

    def run(self, arguments: argparse.Namespace, command: Callable[[Client], int | None]) -> int:
        """Connect and carry out one command; its failure becomes a sentence and an exit code.

        Args:
            command: may return an exit code of its own.
        """
        code = None
        try:
            with (
                _terminable(),
                Client(
                    arguments.endpoint, timeout_s=arguments.timeout, curve=_curve(arguments)
                ) as client,
            ):
                code = command(client)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output has gone (`rtcache … | head`): nothing is wrong. Python would
            # complain once more when it flushes at exit, so there must be something to flush to.
            _lead_nowhere(sys.stdout)
        except Terminated:
            return EXIT_TERMINATED
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return EXIT_INTERRUPTED
        except (IpcError, OSError, ValueError) as error:
            self.complain(error)
            return exit_code(error)
        return code or EXIT_OK

    def complain(self, error: Exception) -> None:
        """Say on stderr what went wrong, and whether to try again."""
        lines = [_sentence(error)]
        if isinstance(error, ServerError) and error.retryable:
            after = f" after {error.retry_after_ms} ms" if error.retry_after_ms is not None else ""
            lines.append(f"the same request can succeed later; try again{after}")
        self.say(*lines)

    def say(self, *lines: str) -> None:
        """Lines on stderr. Where nothing can be written, the exit code says it alone."""
        try:
            for line in lines:
                print(f"{self.name}: {line}", file=sys.stderr)
        except OSError:
            _lead_nowhere(sys.stderr)


def _curve(arguments: argparse.Namespace) -> CurveKeys | None:
    """The keys that the command line names.

    Raises:
        KeyFileError, ValueError: they cannot be used.
    """
    if not arguments.server_key and not arguments.key_file:
        return None
    if not (arguments.server_key and arguments.key_file):
        raise ValueError("--server-key and --key-file are given together, or neither")
    return CurveKeys.read(arguments.server_key, arguments.key_file)


def exit_code(error: Exception) -> int:
    """What a command that failed with `error` ends with."""
    if isinstance(error, (Timeout, ConnectionLost, NotWelcome)):
        return EXIT_UNREACHABLE
    if isinstance(error, ServerError) and error.retryable:
        return EXIT_RETRY
    if isinstance(error, IpcError) and not isinstance(error, EndpointError | KeyFileError):
        return EXIT_REFUSED
    return EXIT_USAGE


def greet(client: Client, arguments: argparse.Namespace) -> Pong:
    """Wait for the daemon; where none listens, not for the whole timeout.

    Raises:
        Timeout: it does not answer; says what is seen at the endpoint.
    """
    first_s = min(GREETING_S, arguments.timeout)
    try:
        return client.ping(timeout_s=first_s)
    except Timeout as error:
        seen = look(client.endpoint)
        if not seen.may_answer or first_s == arguments.timeout:
            raise Timeout(client.endpoint, first_s, seen.why) from error
    try:
        return client.ping(timeout_s=arguments.timeout - first_s)
    except Timeout as error:
        why = look(client.endpoint).why
        raise Timeout(client.endpoint, arguments.timeout, why) from error


def read_text(file: str) -> str:
    """The text of a file, or of standard input if it is `-`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason}") from error


def print_json(value: object) -> None:
    """One line of JSON on stdout."""
    print(msgspec.json.encode(value).decode("utf-8"))


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested dicts as (dotted path, value) pairs, in order."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated`, so that what is unfinished is cancelled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _lead_nowhere(stream: TextIO) -> None:
    """What is still buffered, and what follows, is dropped without a complaint."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
