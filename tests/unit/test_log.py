"""What a line of the log looks like, and where."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from runtime_cache import log
from runtime_cache.config import LogConfig


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[tuple[TextIO, dict[str, str]]]:
    """A stream and the environment of a service whose standard error it is."""
    with (tmp_path / "journal").open("w+") as stream:
        status = os.fstat(stream.fileno())
        yield stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}


def lines_of(stream: TextIO) -> list[str]:
    stream.seek(0)
    return stream.read().splitlines()


def test_a_line_of_json_has_event_level_time_and_what_applies() -> None:
    stream = io.StringIO()
    log.configure(LogConfig(), stream, {})
    structlog.get_logger().info("served", tenant="", tokens=3, cache=None)
    (line,) = lines_of(stream)
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {"event": "served", "level": "info", "tenant": "", "tokens": 3}


def test_less_than_the_level_is_not_written() -> None:
    stream = io.StringIO()
    log.configure(LogConfig(level="warning"), stream, {})
    structlog.get_logger().info("served")
    assert lines_of(stream) == []


def test_the_journal_gets_the_priority_and_nothing_that_it_adds(
    journal: tuple[TextIO, dict[str, str]],
) -> None:
    log.configure(LogConfig(level="debug"), *journal)
    logger = structlog.get_logger()
    for method in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, method)("event", path="/a b", n=1, word="x", text="")
    fields = 'event path="/a b" n=1 word=x text=""'
    expected = [f"<{priority}>{fields}" for priority in (7, 6, 4, 3, 2)]
    assert lines_of(journal[0]) == expected


def test_a_traceback_is_one_line_of_the_journal(journal: tuple[TextIO, dict[str, str]]) -> None:
    log.configure(LogConfig(), *journal)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        structlog.get_logger().exception("failed", request=7)
    (line,) = lines_of(journal[0])
    assert line.startswith("<3>failed request=7 exception=")
    assert r"ValueError: two\nlines" in line


def test_json_in_the_journal_has_the_priority_too(
    journal: tuple[TextIO, dict[str, str]],
) -> None:
    log.configure(LogConfig(format="json"), *journal)
    structlog.get_logger().warning("odd", n=1)
    (line,) = lines_of(journal[0])
    assert line[:3] == "<4>"
    assert json.loads(line[3:]) == {"event": "odd", "n": 1}


@pytest.mark.parametrize("named", ["", "1:2", "nonsense"])
def test_a_stream_that_is_not_the_named_one_is_no_journal(tmp_path: Path, named: str) -> None:
    with (tmp_path / "log").open("w+") as stream:
        log.configure(LogConfig(), stream, {"JOURNAL_STREAM": named})
        structlog.get_logger().info("served")
        assert lines_of(stream)[0].startswith("{")


def test_a_client_cannot_forge_a_line(journal: tuple[TextIO, dict[str, str]]) -> None:
    log.configure(LogConfig(), *journal)
    structlog.get_logger().info("served", message_id='x\n<2>ready "a" \x1b[31m\udc80')
    (line,) = lines_of(journal[0])
    assert line == r'<6>served message_id="x\n<2>ready \"a\" \u001b[31m\udc80"'


def test_what_libraries_log_is_an_event() -> None:
    stream = io.StringIO()
    log.configure(LogConfig(), stream, {})
    log.forward_libraries()
    logging.getLogger("asyncio").info("not this")
    logging.getLogger("asyncio").error("task %s failed", 3)
    (line,) = lines_of(stream)
    fields = json.loads(line)
    assert (fields["event"], fields["level"]) == ("library_log", "error")
    assert (fields["library"], fields["text"]) == ("asyncio", "task 3 failed")


@pytest.mark.parametrize(
    ("level", "text", "expected"),
    [
        (logging.WARNING, "%d", ("warning", "'%d' cannot be written: ")),
        (logging.ERROR - 5, "%s", ("warning", "x")),
        (logging.CRITICAL + 5, "%s", ("critical", "x")),
    ],
)
def test_a_library_that_logs_wrongly_goes_on(
    level: int, text: str, expected: tuple[str, str]
) -> None:
    stream = io.StringIO()
    log.configure(LogConfig(), stream, {})
    log.forward_libraries()
    logging.getLogger("asyncio").log(level, text, "x")
    (line,) = lines_of(stream)
    fields = json.loads(line)
    assert fields["level"] == expected[0]
    assert fields["text"].startswith(expected[1])


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("\udc80", "\udc80"),
        (float("nan"), None),
        (Path("/x"), "PosixPath('/x')"),
        ({1: 2}, {"1": 2}),
    ],
)
def test_whatever_is_logged_is_json(value: object, written: object) -> None:
    stream = io.StringIO()
    log.configure(LogConfig(), stream, {})
    structlog.get_logger().info("odd", value=value)
    (line,) = lines_of(stream)
    assert json.loads(line)["value"] == written


def test_a_complaint_is_an_error_of_the_journal(journal: tuple[TextIO, dict[str, str]]) -> None:
    log.complain("rtcached: wrong:\n  - this", *journal)
    log.complain("rtcached: no", journal[0], {})
    assert lines_of(journal[0]) == ["<3>rtcached: wrong:", "<3>  - this", "rtcached: no"]


class Flood:
    """Two sockets' hooks with one limit, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        log.configure(LogConfig(level="debug"), self.stream, {})
        self.limit = log.LineLimit(clock=lambda: self.now_s)
        self.hooks = [log.SocketLog(self.limit), log.SocketLog(self.limit)]

    def refuse(self, number: int, event: str = "message_refused") -> None:
        for count in range(number):
            self.hooks[count % 2](event, {"code": "bad_frames"})

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in lines_of(self.stream)]

    def count(self, event: str) -> int:
        return [line["event"] for line in self.lines()].count(event)

    def left_out(self) -> list[tuple[object, object]]:
        return [(n["of"], n["count"]) for n in self.lines() if n["event"] == "events_left_out"]


def test_clients_cannot_flood_the_log() -> None:
    flood = Flood()
    flood.refuse(1000)
    flood.refuse(60, "key_refused")
    assert (flood.count("message_refused"), flood.count("key_refused")) == (50, 50)
    flood.now_s = 9.9
    flood.refuse(1)
    assert flood.left_out() == []
    flood.now_s = 10.0
    flood.refuse(1)
    assert flood.left_out() == [("message_refused", 951), ("key_refused", 10)]
    assert (flood.count("message_refused"), flood.count("key_refused")) == (51, 50)


def test_the_end_of_a_flood_is_told_with_the_next_event_or_at_the_end() -> None:
    flood = Flood()
    flood.refuse(51)
    flood.now_s = 10.0
    flood.hooks[0]("client_gone", {})
    assert flood.left_out() == [("message_refused", 1)]
    flood.refuse(53)
    flood.limit.end()
    flood.limit.end()
    assert flood.left_out() == [("message_refused", 1), ("message_refused", 3)]


def test_that_a_client_has_gone_is_usual() -> None:
    flood = Flood()
    flood.refuse(60, "client_gone")
    assert {(line["event"], line["level"]) for line in flood.lines()} == {("client_gone", "debug")}
    assert flood.count("client_gone") == 60
