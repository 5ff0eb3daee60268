"""What is said of an endpoint that does not answer, and how long it is asked."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from ipc import command_line, unreachable
from ipc.command_line import greet
from ipc.errors import Timeout
from ipc.messages import MessageId, Pong
from ipc.sync_client import Client
from ipc.unreachable import Sight, look

#: Of a user and of a group that no system has.
NOBODY = 54321


@contextmanager
def listening(path: Path, backlog: int = 1) -> Iterator[str]:
    """A socket file with somebody who takes no connection; its endpoint."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(backlog)
        yield f"ipc://{path}"


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who may not everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may look into."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path
        path.chmod(0o755)


def failing(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """No connection is made any more."""

    def refuse(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(unreachable, "_connect", refuse)


def test_no_such_socket(tmp_path: Path) -> None:
    assert look(f"ipc://{tmp_path}/s") == Sight(
        f"there is no {tmp_path}/s; is rtcached running, and with this endpoint?"
    )


def test_no_such_directory(tmp_path: Path) -> None:
    assert look(f"ipc://{tmp_path}/run/s") == Sight(
        f"there is no directory {tmp_path}/run; is rtcached running, and with this endpoint?"
    )


def test_a_path_is_said_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    why = look("ipc://./s").why
    assert why is not None
    assert why.startswith(f"there is no {tmp_path}/s; ")


def test_no_socket(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    for endpoint in (f"ipc://{tmp_path}/s", f"ipc://{tmp_path}"):
        path = endpoint.removeprefix("ipc://")
        assert look(endpoint) == Sight(f"{path} is no socket; is this the endpoint of rtcached?")


def test_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    with listening(tmp_path / "s") as endpoint:
        pass
    assert look(endpoint) == Sight(
        f"nobody listens at {tmp_path}/s: a daemon has ended without removing it; start rtcached, "
        f"which replaces it"
    )


def test_a_silent_socket(tmp_path: Path) -> None:
    with listening(tmp_path / "s") as endpoint:
        assert look(endpoint) == Sight(
            "something listens there and says nothing: rtcached is busy for longer than that "
            "(raise the timeout), or it is another program",
            may_answer=True,
        )


def test_a_socket_where_no_more_connections_have_room(tmp_path: Path) -> None:
    with listening(tmp_path / "s", backlog=0) as endpoint, socket.socket(socket.AF_UNIX) as first:
        first.connect(f"{tmp_path}/s")
        assert look(endpoint).may_answer


def test_a_socket_of_a_group(open_directory: Path) -> None:
    path = open_directory / "s"
    with listening(path) as endpoint:
        owner = path.stat().st_uid
        group = NOBODY if owner == 0 else path.stat().st_gid
        os.chown(path, owner, group)
        path.chmod(0o060)
        with without_rights():
            seen = look(endpoint)
    assert seen == Sight(
        f"you may not open {path}, which takes write permission: it belongs to user "
        f"{unreachable._user_name(owner)} and group {unreachable._group_name(group)}, mode 0060; "
        f"be in that group (it counts from your next login on), or use sudo"
    )


def test_a_socket_of_the_administrators(
    open_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = open_directory / "s.admin"
    with listening(path) as endpoint:
        path.chmod(0o600)
        failing(monkeypatch, PermissionError(errno.EACCES, "Permission denied"))
        why = look(endpoint).why
    user_id = os.geteuid()
    who = "root" if user_id == 0 else f"{unreachable._user_name(user_id)} and root"
    assert why is not None
    assert why.endswith(f", mode 0600; only {who} may, so use sudo")


def test_a_directory_that_is_closed(open_directory: Path) -> None:
    path = open_directory / "run" / "s"
    path.parent.mkdir()
    with listening(path) as endpoint:
        path.parent.chmod(0)
        with without_rights():
            seen = look(endpoint)
        path.parent.chmod(0o700)
    assert not seen.may_answer
    assert seen.why is not None
    assert seen.why.startswith(f"you may not look into {path.parent}: it belongs to user ")
    assert ", mode 0000; only " in seen.why


def test_names_of_those_who_have_none() -> None:
    assert unreachable._user_name(0) == "root"
    assert (unreachable._user_name(NOBODY), unreachable._group_name(NOBODY)) == (
        str(NOBODY),
        str(NOBODY),
    )


def test_whatever_else_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(tmp_path / "s") as endpoint:
        failing(monkeypatch, OSError(errno.EMFILE, "Too many open files"))
        assert look(endpoint) == Sight(f"{tmp_path}/s cannot be opened: Too many open files")


@pytest.mark.parametrize("endpoint", ["ipc://@name", "ipc://", "inproc://x", "tcp://host", "x"])
def test_what_cannot_be_told(endpoint: str) -> None:
    assert look(endpoint) == Sight(None, may_answer=True)


def test_a_port_that_refuses_and_one_that_is_silent() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert look(f"tcp://127.0.0.1:{port}") == Sight(
            f"nobody listens at port {port} of 127.0.0.1; is rtcached running, and with this "
            f"endpoint?"
        )
        listener.listen()
        for endpoint in (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:0;localhost:{port}"):
            seen = look(endpoint)
            assert seen.may_answer
            assert seen.why is not None
            assert seen.why.endswith("another program, or only one side uses CURVE keys")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            TimeoutError("timed out"),
            "::1 lets no connection to port 5555 come about: the host is down, or a firewall "
            "stands before it",
        ),
        (
            OSError(errno.ENETUNREACH, "Network is unreachable"),
            "port 5555 of ::1 cannot be reached: Network is unreachable",
        ),
    ],
)
def test_a_host_that_is_out_of_reach(
    error: OSError, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error)
    assert look("tcp://[::1]:5555") == Sight(why)


def test_a_name_that_is_none() -> None:
    for host in ("rtcached.invalid", "a" * 70):
        why = look(f"tcp://{host}:5555").why
        assert why is not None
        assert why.startswith(f"the host name {host} cannot be resolved (")


class Waits:
    """A client that notes how long it is to wait; the ping of number `answered` is answered."""

    endpoint = "ipc:///s"

    def __init__(self, answered: int | None) -> None:
        self.seconds: list[float] = []
        self._answered = answered

    def ping(self, *, timeout_s: float) -> Pong:
        self.seconds.append(timeout_s)
        if len(self.seconds) == self._answered:
            return Pong(MessageId("1"), version="0", uptime_s=0.0, incarnation="")
        raise Timeout(self.endpoint, timeout_s)


@pytest.mark.parametrize(
    ("timeout_s", "may_answer", "answered", "waits", "message"),
    [
        (60.0, True, 1, [5.0], None),
        (60.0, False, None, [5.0], "no answer from ipc:///s within 5 s: because"),
        (60.0, True, 2, [5.0, 55.0], None),
        (60.0, True, None, [5.0, 55.0], "no answer from ipc:///s within 60 s: because"),
        (5.0, True, None, [5.0], "no answer from ipc:///s within 5 s: because"),
        (2.0, True, None, [2.0], "no answer from ipc:///s within 2 s: because"),
    ],
)
def test_how_long_a_daemon_is_waited_for(
    timeout_s: float,
    may_answer: bool,
    answered: int | None,
    waits: list[float],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_line, "look", lambda _: Sight("because", may_answer=may_answer))
    client = Waits(answered)
    arguments = argparse.Namespace(timeout=timeout_s)
    if message is None:
        greet(client, arguments)  # type: ignore[arg-type]
    else:
        with pytest.raises(Timeout) as caught:
            greet(client, arguments)  # type: ignore[arg-type]
        assert caught.value.message == message
    assert client.seconds == waits


def test_without_a_reason_both_are_named() -> None:
    with Client("ipc://@nobody-of-this-name") as client:
        with pytest.raises(Timeout) as caught:
            greet(client, argparse.Namespace(timeout=0.01))
        assert "either no daemon listens there" in caught.value.message
