"""Structured logging to standard error: one event name and its fields a line.

Every event is listed in docs/events.md. Prompts and answers are logged only with `log.prompts`. A
field that does not apply is left out. In the journal of systemd a line begins with its priority
(`<4>`), and has neither colours nor a time of its own, which the journal adds.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TextIO, cast

import msgspec
import structlog

from runtime_cache.config import LogConfig
from runtime_cache.throttle import Throttle

#: Of a line in the journal: those of syslog.
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
#: What needs no quotes there.
_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)
Fields = MutableMapping[str, Any]
#: Of one kind of event that clients can make happen, so many lines in so many seconds.
_MAX_LINES = 50
_PERIOD_S = 10.0


def configure(
    config: LogConfig, stream: TextIO | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Set up structlog for the process.

    Args:
        config: level and format.
        stream: where lines go; standard error by default.
        env: environment; None for the process's own.
    """
    stream = stream or sys.stderr
    is_journal = _is_journal(stream, os.environ if env is None else env)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _in_order,
            *_stamps(is_journal=is_journal),
            structlog.processors.format_exc_info,
            _renderer(config, stream, is_journal=is_journal),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Unbreakable(stream))),
        cache_logger_on_first_use=False,
    )


def complain(text: str, stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> None:
    """Say why the process ends, in plain words; in the journal each line is an error.

    Args:
        stream, env: as for `configure`.
    """
    stream = stream or sys.stderr
    is_journal = _is_journal(stream, os.environ if env is None else env)
    start = f"<{_PRIORITIES['error']}>" if is_journal else ""
    for line in text.splitlines():
        print(f"{start}{line}", file=stream, flush=True)


def forward_libraries() -> None:
    """What libraries log by Python's own means comes to this log, from warnings on.

    For a process that is all ours; nobody else's handlers stay.
    """
    logging.basicConfig(handlers=[_Forwarder(logging.WARNING)], force=True)


class LineLimit:
    """How many lines of each event that strangers can make happen; it says how many it left out.

    That is said when the next of any of these events comes behind the period, or at the end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._throttle = Throttle(_MAX_LINES, _PERIOD_S)

    def allows(self, event: str) -> bool:
        """Whether this one may have its line."""
        self.settle()
        return self._throttle.take(event, self._clock())

    def settle(self) -> None:
        """Say of periods that are over how many lines were left out."""
        _say_left_out(self._throttle.left_out(self._clock()))

    def end(self) -> None:
        """Say of all periods how many lines were left out."""
        _say_left_out(self._throttle.left_out())


def _say_left_out(counts: Mapping[str, int]) -> None:
    log = structlog.get_logger(__name__)
    for event, count in counts.items():
        log.warning("events_left_out", of=event, count=count)


class SocketLog:
    """The hook of `ipc.server`.

    That a client has gone is usual, all else is not, and has no more lines than the limit allows.
    """

    def __init__(self, limit: LineLimit) -> None:
        self._limit = limit

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        log = structlog.get_logger("ipc.server")
        if event == "client_gone":
            self._limit.settle()
            log.debug(event, **fields)
        elif self._limit.allows(event):
            log.warning(event, **fields)


def _renderer(config: LogConfig, stream: TextIO, *, is_journal: bool) -> structlog.typing.Processor:
    as_json = structlog.processors.JSONRenderer(serializer=_json)
    if is_journal:
        return _Prioritized(as_json if config.format == "json" else _as_line)
    if config.format == "json" or (config.format == "auto" and not stream.isatty()):
        return as_json
    return structlog.dev.ConsoleRenderer(colors=stream.isatty())


def _stamps(*, is_journal: bool) -> list[structlog.typing.Processor]:
    """Level and time, which the journal has of its own."""
    if is_journal:
        return []
    return [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso")]


def _is_journal(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether the stream is the one that systemd has named (systemd.exec, $JOURNAL_STREAM)."""
    named = env.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # no file, or closed
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


def _in_order(logger: object, method: str, fields: Fields) -> Fields:
    """The event first, then what applies."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"event": fields.get("event"), **given}


def _as_line(logger: object, method: str, fields: Fields) -> str:
    """`event name=value ...`, each value without a space or in quotes."""
    event = fields.pop("event", "")
    return " ".join([str(event), *(f"{name}={_quoted(v)}" for name, v in fields.items())])


def _quoted(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, default=repr)


def _json(fields: Fields, **options: object) -> str:
    """A line of JSON. Once a request, so by the faster library unless it cannot."""
    try:
        return msgspec.json.encode(fields, enc_hook=repr).decode()
    except (ValueError, TypeError):  # half a surrogate pair, or keys that are no text
        return json.dumps(fields, default=repr)


class _Prioritized:
    """A renderer whose lines begin with the priority, as the journal reads it."""

    def __init__(self, render: Callable[[Any, str, Fields], str | bytes]) -> None:
        self._render = render

    def __call__(self, logger: object, method: str, fields: Fields) -> str:
        line = self._render(logger, method, fields)
        return f"<{_PRIORITIES.get(method, 6)}>{line!s}"


class _Forwarder(logging.Handler):
    """What libraries log becomes an event of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        # A library's mistake in what it logs is not to become an error of what it does.
        try:
            text = record.getMessage()
        except Exception as error:
            text = f"{record.msg!r} cannot be written: {error}"
        log = structlog.get_logger(__name__)
        log.log(
            min(record.levelno // 10 * 10, logging.CRITICAL),  # structlog knows no level between
            "library_log",
            library=record.name,
            text=text,
            exc_info=record.exc_info,
        )


class _Unbreakable(io.TextIOBase):
    """A stream whose reader may go away (a closed pipe, a full disk): the daemon serves on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._surviving():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._surviving():
            self._stream.flush()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        # What is still buffered goes nowhere, or Python would fail once more when it flushes at
        # exit, and change the exit code.
        try:
            yield
        except BrokenPipeError:
            _lead_nowhere(self._stream.fileno())  # nobody will ever read there
        except OSError:  # a full disk, where later lines may fit again
            self._forget_buffered()
        except ValueError:
            pass  # a stream that was closed

    def _forget_buffered(self) -> None:
        with contextlib.suppress(OSError):
            number = self._stream.fileno()
            kept = os.dup(number)
            _lead_nowhere(number)
            try:
                self._stream.flush()
            finally:
                os.dup2(kept, number)
                os.close(kept)


def _lead_nowhere(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
