"""`rtcache` says that an answer is incomplete, on stderr and by its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from ipc import cli
from ipc.fields import FinishReason
from tests.support.ipc_daemon import DaemonThread

Output = pytest.CaptureFixture[str]

#: What the daemon says of an answer that is not whole, and the exit code.
CUT = {"cancelled": 75, "deadline": 1, "lease_expired": 75, "shutdown": 75, "slow_reader": 75}
WHOLE = {"stop", "length"}


@pytest.fixture(autouse=True)
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonThread]:
    with DaemonThread(f"ipc://{tmp_path}/s") as thread:
        monkeypatch.setenv("RTCACHE_ENDPOINT", thread.endpoint)
        yield thread


def test_every_end_is_one_or_the_other() -> None:
    assert set(get_args(FinishReason)) == CUT.keys() | WHOLE


@pytest.mark.parametrize("reason", CUT)
@pytest.mark.parametrize("line", [["generate"], ["chat", "--message"]], ids=lambda line: line[0])
def test_an_incomplete_answer_is_printed_and_called_so(
    line: list[str], reason: str, capsys: Output
) -> None:
    assert cli.main([*line, f"end {reason}"]) == CUT[reason]
    out, err = capsys.readouterr()
    assert out == "x\n"
    assert err.startswith(f"rtcache: the answer is incomplete ({reason}): ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("reason", [*sorted(WHOLE), "a_word_of_a_newer_daemon"])
def test_other_ends_are_no_news(reason: str, capsys: Output) -> None:
    assert cli.main(["generate", f"end {reason}"]) == 0
    assert capsys.readouterr() == ("x\n", "")


@pytest.mark.parametrize("options", [["--json"], ["--json", "--stream"]], ids=len)
def test_json_stays_as_it_is(options: list[str], capsys: Output) -> None:
    assert cli.main(["generate", "end shutdown", *options]) == 75
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["finish_reason"] == "shutdown"
    assert err.startswith("rtcache: the answer is incomplete (shutdown): ")


def test_a_conversation_goes_on(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("end deadline\necho", encoding="utf-8")
    with lines.open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "x\necho\n"
    assert err.startswith("rtcache: the answer is incomplete (deadline): --deadline-ms was over; ")
