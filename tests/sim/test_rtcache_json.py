"""`rtcache … --json` for scripts: a line for each piece, errors as lines, small commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc import cli
from ipc.messages import MessageId, Register
from tests.support.ipc_daemon import DaemonThread

Output = pytest.CaptureFixture[str]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonThread]:
    with DaemonThread(f"ipc://{tmp_path}/s") as thread:
        monkeypatch.setenv("RTCACHE_ENDPOINT", thread.endpoint)
        yield thread


def lines(output: Output) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.readouterr().out.splitlines()]


@pytest.mark.usefixtures("daemon")
def test_a_line_for_each_piece_and_one_with_the_end(capsys: Output) -> None:
    assert cli.main(["generate", "count 3", "--json", "--stream"]) == 0
    *pieces, end = lines(capsys)
    assert pieces == [{"type": "tokens", "text": f"{n} ", "token_ids": [n]} for n in range(3)]
    assert (end["type"], end["text"], end["token_ids"]) == ("done", "", [])
    assert end["finish_reason"] == "length"
    assert end["usage"]["cached_tokens"] == 500
    assert end["cache"]["reason"] == "diverged"


@pytest.mark.usefixtures("daemon")
def test_what_the_daemon_held_back_is_a_line_too(capsys: Output) -> None:
    assert cli.main(["chat", "--message", "echo", "--json", "--stream"]) == 0
    assert [line["text"] for line in lines(capsys)] == ["echo", ""]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        (["refuse"], 75, {"code": "queue_full", "retryable": True, "retry_after_ms": 5}),
        (["x", "--top-p", "2"], 1, {"code": "invalid_request", "retryable": False}),
    ],
)
def test_a_refusal_is_a_line_and_an_exit_code(
    line: list[str], code: int, error: dict[str, object], capsys: Output
) -> None:
    assert cli.main(["generate", *line, "--json"]) == code
    (said,) = lines(capsys)
    assert said["type"] == "error"
    assert said.items() >= error.items()


def test_no_daemon_is_a_line_too(tmp_path: Path, capsys: Output) -> None:
    nowhere = ["--endpoint", f"ipc://{tmp_path}/s", "--timeout", "0.01"]
    assert cli.main([*nowhere, "ping", "--json"]) == 3
    (said,) = lines(capsys)
    assert (said["type"], said["code"], said["retryable"]) == ("error", "Timeout", False)


def test_a_prefix_is_registered_from_a_text_or_a_file(
    daemon: DaemonThread, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "prefix"
    file.write_text("from a file", encoding="utf-8")
    assert cli.main(["register", "as a text"]) == 0
    assert capsys.readouterr() == ("p-1\n", "[3 tokens, 0 of them were cached]\n")
    assert cli.main(["register", "--file", str(file), "--json"]) == 0
    assert lines(capsys) == [
        {"prefix_id": "p-1", "num_tokens": 3, "cached_tokens": 0, "num_bytes": 9}
    ]
    seen = [request for request in daemon.daemon.requests if isinstance(request, Register)]
    assert seen == [
        Register(MessageId("2"), text="as a text"),
        Register(MessageId("2"), text="from a file"),
    ]
    assert cli.main(["register"]) == 2
    assert "give either a text or --file" in capsys.readouterr().err


@pytest.mark.usefixtures("daemon")
def test_token_ids(capsys: Output) -> None:
    assert cli.main(["tokenize", "x"]) == 0
    assert capsys.readouterr().out == "1 2\n"
    assert cli.main(["tokenize", "x", "--json"]) == 0
    assert lines(capsys) == [{"token_ids": [1, 2]}]
