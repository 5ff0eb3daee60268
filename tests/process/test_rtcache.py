"""`rtcache` as a process: Ctrl-C, a broken pipe, output as it grows."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from ipc.messages import Cancel, MessageId
from tests.support.ipc_daemon import PATIENCE_S, CountingDaemon, DaemonThread
from tests.support.rtcached import background, run


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(f"ipc://{tmp_path}/s") as thread:
        yield thread


def rtcache(daemon: DaemonThread, *line: str) -> AbstractContextManager[Popen[str]]:
    pipes = {"stdin": PIPE, "stdout": PIPE}
    return background("ipc.cli", "--endpoint", daemon.endpoint, *line, **pipes)


def num_requests(seen: CountingDaemon) -> int:
    return len(seen.requests)


@pytest.mark.parametrize("line", [["generate", "hold"], ["generate", "hold", "--json"]])
def test_ctrl_c_cancels_the_answer(daemon: DaemonThread, line: list[str]) -> None:
    with rtcache(daemon, *line) as process:
        daemon.wait_for(lambda seen: num_requests(seen) == 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "\n")
    daemon.wait_for(lambda seen: num_requests(seen) >= 3)
    assert daemon.daemon.requests[2] == Cancel(MessageId("3"), target=MessageId("2"))


@pytest.mark.parametrize("line", [["generate", "hold"], ["chat", "--message", "hold"], ["chat"]])
def test_being_terminated_cancels_too(daemon: DaemonThread, line: list[str]) -> None:
    with rtcache(daemon, *line) as process:
        if line == ["chat"]:
            assert process.stdin is not None
            process.stdin.write("hold\n")
            process.stdin.flush()
        daemon.wait_for(lambda seen: num_requests(seen) == 2)
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (143, "", "")
    daemon.wait_for(lambda seen: num_requests(seen) >= 3)
    assert daemon.daemon.requests[2] == Cancel(MessageId("3"), target=MessageId("2"))


def test_ctrl_c_in_a_conversation_ends_the_answer_only(daemon: DaemonThread) -> None:
    with rtcache(daemon, "chat") as process:
        assert process.stdin is not None
        process.stdin.write("hold\n")
        process.stdin.flush()
        daemon.wait_for(lambda seen: num_requests(seen) == 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("echo\n", timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (
        0,
        "echo\n",
        "\n(stopped; the last question is forgotten)\n",
    )


def test_a_reader_that_goes_away_is_no_error(daemon: DaemonThread) -> None:
    with rtcache(daemon, "generate", "count 50000") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "0 1 "
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["--endpoint", "nonsense", "ping"], "expected ipc://PATH or tcp://HOST:PORT"),
        (["--timeout", "soon", "ping"], "expected a number of seconds above 0, got soon"),
        (["generate", "--prompt-file", "/nowhere"], "/nowhere: No such file or directory"),
        (["generate", "--prompt-file", "noise"], "noise is not UTF-8 text: invalid start byte"),
    ],
)
def test_wrong_command_lines(tmp_path: Path, line: list[str], complaint: str) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    words = [str(tmp_path / word) if word == "noise" else word for word in line]
    ended = run("ipc.cli", *words)
    assert (ended.code, ended.out) == (2, "")
    assert complaint in ended.complaint
