"""Endpoints: what is accepted, the lock beside the socket, stale and foreign files."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from ipc.endpoint import IpcAddress, SocketClaim, TcpAddress, parse_endpoint
from ipc.errors import EndpointBusy, EndpointError


def exists(path: Path) -> bool:
    return os.path.lexists(path)


def leave_stale_socket(path: Path) -> None:
    """A socket file as a killed daemon leaves it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipc:///run/x.sock", IpcAddress("/run/x.sock")),
        ("ipc://x.sock", IpcAddress("x.sock")),
        ("ipc:///" + "x" * 106, IpcAddress("/" + "x" * 106)),
        ("tcp://127.0.0.1:5555", TcpAddress("127.0.0.1", "5555")),
        ("tcp://127.9.9.9:0", TcpAddress("127.9.9.9", "0")),
        ("tcp://localhost:*", TcpAddress("localhost", "*")),
        ("tcp://[::1]:65535", TcpAddress("[::1]", "65535")),
        ("tcp://*:5555", TcpAddress("*", "5555")),
    ],
)
def test_good_endpoints(text: str, address: IpcAddress | TcpAddress) -> None:
    assert parse_endpoint(text) == address


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected ipc://PATH or tcp://HOST:PORT"),
        ("/run/x.sock", "expected ipc://PATH or tcp://HOST:PORT"),
        ("inproc://x", "expected ipc://PATH or tcp://HOST:PORT"),
        ("ipc://", "expected the path of a socket file"),
        ("ipc://@abstract", "abstract sockets have no permissions"),
        ("ipc://a\0b", "expected the path of a socket file"),
        ("ipc:///" + "x" * 107, "the path has 108 bytes, the system allows 107"),
        ("ipc:///" + "é" * 54, "the path has 109 bytes, the system allows 107"),
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://:5555", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:http", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:²", "expected tcp://HOST:PORT"),
    ],
)
def test_bad_endpoints(text: str, sentence: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(text)
    assert sentence in caught.value.message


def test_a_claim_makes_and_removes_the_socket_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claim = SocketClaim(str(path))
    assert not exists(path)
    os.close(claim.listen(0o620))
    assert stat.S_IMODE(path.stat().st_mode) == 0o620
    claim.release()
    claim.release()
    assert not exists(path)


def test_one_path_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = SocketClaim(str(path))
    os.close(first.listen(0o600))
    with pytest.raises(EndpointBusy, match=rf"another daemon \(process {os.getpid()}\) already"):
        SocketClaim(str(path))
    assert exists(path)
    first.release()
    SocketClaim(str(path)).release()


def test_a_stale_socket_is_removed_by_the_next_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_stale_socket(path)
    claim = SocketClaim(str(path))
    assert not exists(path)
    claim.release()


def test_a_socket_that_is_served_stays_though_its_lock_file_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = SocketClaim(str(path))
    listener = first.listen(0o600)
    (tmp_path / "s.lock").unlink()
    with pytest.raises(EndpointBusy, match=r"a process serves at .* does not hold .*lock"):
        SocketClaim(str(path))
    assert exists(path)
    os.close(listener)
    first.release()
    SocketClaim(str(path)).release()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_not_a_socket_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        leave_stale_socket(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    for _ in range(2):
        with pytest.raises(EndpointError, match="exists and is not a socket; it is left as it is"):
            SocketClaim(str(path))
    assert exists(path)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_missing_directory_is_made_for_owner_and_group(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "run" / "s"
    before = os.umask(umask)
    try:
        SocketClaim(str(path)).release()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


def test_the_directory_above_must_exist(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"there is no directory .*/no/a, and it cannot be "):
        SocketClaim(str(tmp_path / "no" / "a" / "s"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_a_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    with pytest.raises(EndpointError, match=r"/run is no directory$"):
        SocketClaim(str(tmp_path / "run" / "s"))
    assert (tmp_path / "run").read_text() == "precious"


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(EndpointError, match="cannot open the lock file"):
        SocketClaim(str(tmp_path / "s"))
    assert not exists(tmp_path / "victim")


def test_a_path_that_cannot_be_bound_is_a_sentence(tmp_path: Path) -> None:
    claim = SocketClaim(str(tmp_path / "s"))
    (tmp_path / "s").write_text("came in between")
    with pytest.raises(EndpointError, match=r"cannot listen on .*: Address already in use"):
        claim.listen(0o600)
    claim.release()


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_without_room_for_a_socket_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    claim = SocketClaim(str(path))
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(EndpointError, match=r"cannot make a socket for .*: Too many open files"):
        claim.listen(0o600)
    claim.release()
    monkeypatch.undo()
    leave_stale_socket(path)
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(EndpointError, match=r"cannot serve at .*: Too many open files"):
        SocketClaim(str(path))
    monkeypatch.undo()
    SocketClaim(str(path)).release()


def test_a_socket_file_that_cannot_be_removed_stops_a_start_but_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    claim = SocketClaim(str(path))
    os.close(claim.listen(0o600))
    monkeypatch.setattr(os, "unlink", refuse)
    claim.release()
    assert exists(path)
    with pytest.raises(EndpointError, match="cannot serve at"):
        SocketClaim(str(path))
    monkeypatch.undo()
    SocketClaim(str(path)).release()
    assert not exists(path)
