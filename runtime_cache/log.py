"""Structured logging to standard error: one event name and its fields a line.

Prompts and answers are never logged.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO, cast

import structlog

from runtime_cache.config import LogConfig


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Set up structlog for the process.

    Args:
        config: level and format.
        stream: where lines go; standard error by default.
    """
    stream = stream or sys.stderr
    as_json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=stream.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Unbreakable(stream))),
        cache_logger_on_first_use=False,
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
        try:
            yield
        except BrokenPipeError:
            # Nobody will ever read there. What is still buffered goes nowhere, or Python would fail
            # once more when it flushes at exit, and change the exit code.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            pass  # a full disk, where later lines may fit again; a stream that was closed
