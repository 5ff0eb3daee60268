"""What `rtcache` and `rtcache-admin` share: the same mistake gets the same answer from both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ipc import cli
from ipc.command_line import exit_code, flatten
from ipc.errors import (
    Closed,
    ConnectionLost,
    EndpointError,
    MessageTooLarge,
    NotWelcome,
    ProtocolError,
    ServerError,
    Timeout,
)
from ipc.messages import Error, MessageId
from tests.support.ipc_daemon import DaemonThread
from tools.admin import main as admin

Output = pytest.CaptureFixture[str]


class Tool(NamedTuple):
    """A program.

    Attributes:
        short: a command that needs nothing more.
        send_file: a command that sends the text of the file named next.
    """

    name: str
    main: Callable[[Sequence[str]], int]
    short: tuple[str, ...]
    send_file: tuple[str, ...]


TOOLS = (
    Tool("rtcache", cli.main, ("ping",), ("generate", "--prompt-file")),
    Tool("rtcache-admin", admin.main, ("stats",), ("register",)),
)


@pytest.fixture(params=TOOLS, ids=lambda tool: tool.name)
def tool(request: pytest.FixtureRequest) -> Tool:
    found: Tool = request.param
    return found


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("command_line") / "s"
    with DaemonThread(f"ipc://{path}", role="admin") as thread:
        yield thread.endpoint


def refusal(*, retry_after_ms: int | None = None) -> ServerError:
    return ServerError(
        Error(
            id=MessageId("1"),
            code="capacity",
            message="no room",
            retryable=True,
            retry_after_ms=retry_after_ms,
        )
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (refusal(), 75),
        (ConnectionLost("ipc://x", "ping"), 3),
        (NotWelcome("ipc://x", "no"), 3),
        (MessageTooLarge("x"), 1),
        (ProtocolError("x"), 1),
        (Closed("x"), 1),
        (EndpointError("x"), 2),
        (ValueError("x"), 2),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (Timeout("ipc://x", 1.0), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_a_text_that_no_wire_carries(
    tool: Tool,
    endpoint: str,
    tmp_path: Path,
    capsys: Output,
) -> None:
    file = tmp_path / "big"
    with file.open("wb") as big:
        big.truncate(65 * 1024**2)
    assert tool.main([*tool.send_file, str(file), "--endpoint", endpoint]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{tool.name}: the request has 6815")
    assert err.endswith(" bytes, the wire carries 67108864\n")


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "soon"])
def test_a_timeout_that_is_none(tool: Tool, seconds: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main([*tool.short, "--timeout", seconds])
    assert caught.value.code == 2
    complaint = f"--timeout: expected a number of seconds above 0, got {seconds}\n"
    assert capsys.readouterr().err.endswith(complaint)


def test_a_refusal_says_its_code_once_and_when_to_try_again(
    tool: Tool,
    endpoint: str,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise refusal(retry_after_ms=5)

    monkeypatch.setattr("ipc.sync_client.Client._ask", refuse)
    assert tool.main([*tool.short, "--endpoint", endpoint]) == 75
    assert capsys.readouterr().err == (
        f"{tool.name}: no room (capacity)\n"
        f"{tool.name}: the same request can succeed later; try again after 5 ms\n"
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "No such file or directory"), (b"\xff", "is not UTF-8 text: invalid start byte")],
)
def test_a_file_that_is_no_text(
    tool: Tool,
    content: bytes | None,
    complaint: str,
    endpoint: str,
    tmp_path: Path,
    capsys: Output,
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    assert tool.main([*tool.send_file, str(file), "--endpoint", endpoint]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{tool.name}: {file}")
    assert err.endswith(f"{complaint}\n")


def test_an_endpoint_that_is_none_and_one_where_nobody_listens(
    tool: Tool, tmp_path: Path, capsys: Output
) -> None:
    assert tool.main([*tool.short, "--endpoint", "nonsense"]) == 2
    assert tool.main([*tool.short, "--endpoint", f"ipc://{tmp_path}/s", "--timeout", "0.01"]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{tool.name}: cannot connect to 'nonsense'")
    assert second.startswith(f"{tool.name}: no answer from ipc://{tmp_path}/s within 0.01 s")


def test_ctrl_c(
    tool: Tool,
    endpoint: str,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ipc.sync_client.Client._ask", interrupt)
    assert tool.main([*tool.short, "--endpoint", endpoint]) == 130
    assert capsys.readouterr() == ("", "\n")


def test_nested_names_are_joined_by_dots() -> None:
    assert list(flatten({"a": 1, "b": {"c": {"d": 2}, "e": 3}, "f": {}})) == [
        ("a", 1),
        ("b.c.d", 2),
        ("b.e", 3),
    ]
