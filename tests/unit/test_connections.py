"""Which connections are there, by their descriptors; no ZeroMQ."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from ipc.connections import Connection, Connections


class FakeFrame:
    """A frame that came over a descriptor."""

    def __init__(self, fd: int | None, user_id: str | None = None) -> None:
        self._properties = {"__fd": fd, "User-Id": user_id}

    def get(self, name: str) -> str:
        value = self._properties[name]
        if value is None:
            raise zmq.ZMQError(zmq.EINVAL)
        return str(value)


def frame(fd: int | None, user_id: str | None = None) -> zmq.Frame:
    return cast("zmq.Frame", FakeFrame(fd, user_id))


class Rig:
    """Connections of sockets that a test can close.

    Attributes:
        ended: identities that were said to have ended, in order.
    """

    def __init__(self) -> None:
        self.ended: list[bytes] = []
        self.connections = Connections(lambda connection: self.ended.append(connection.identity))
        self._sockets: list[socket.socket] = []

    def socket(self) -> socket.socket:
        return self.pair()[0]

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Our end and the peer's."""
        ours, peers = socket.socketpair()
        self._sockets += [ours, peers]
        return ours, peers

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_a_connection_is_looked_at_once_and_there_until_it_is_closed(rig: Rig) -> None:
    peer, connections = rig.socket(), rig.connections
    assert connections.wants(b"a")
    connections.look(b"a", frame(peer.fileno(), "key"))
    assert not connections.wants(b"a")
    assert [connection.user_id for connection in connections] == ["key"]
    connections.sweep()
    assert rig.ended == []
    peer.close()
    connections.sweep()
    assert (rig.ended, len(connections)) == ([b"a"], 0)
    assert connections.find(b"a") is None


def test_a_descriptor_that_is_used_again_is_another_connection(rig: Rig) -> None:
    peer = rig.socket()
    number = peer.fileno()
    rig.connections.look(b"a", frame(number))
    other = rig.socket()
    os.dup2(other.fileno(), number)  # closes what it was
    assert rig.connections.wants(b"a")
    rig.connections.sweep()
    assert rig.ended == [b"a"]


def test_the_one_of_the_same_name_before_it_has_ended(rig: Rig) -> None:
    first, second = rig.socket(), rig.socket()
    rig.connections.look(b"me", frame(first.fileno(), "one"))
    first.close()
    assert rig.connections.wants(b"me")
    rig.connections.look(b"me", frame(second.fileno(), "other"))
    assert rig.ended == [b"me"]
    assert [connection.user_id for connection in rig.connections] == ["other"]


def test_a_message_of_a_connection_that_has_been_closed_already(rig: Rig) -> None:
    peer = rig.socket()
    number = peer.fileno()
    peer.close()
    rig.connections.look(b"a", frame(number))
    assert rig.connections.wants(b"a")
    rig.connections.look(b"a", frame(number))
    assert rig.ended == []
    rig.connections.sweep()
    assert rig.ended == [b"a"]


def test_another_key_is_another_connection_even_if_both_are_closed(rig: Rig) -> None:
    """What is left unread of one must not count as the other's."""
    peer = rig.socket()
    number = peer.fileno()
    peer.close()
    rig.connections.look(b"me", frame(number, "one"))
    rig.connections.look(b"me", frame(number, "other"))
    assert rig.ended == [b"me"]
    assert [connection.user_id for connection in rig.connections] == ["other"]


def test_a_name_that_comes_back_over_the_same_number(rig: Rig) -> None:
    peer = rig.socket()
    number = peer.fileno()
    rig.connections.look(b"me", frame(number, "key"))
    other = rig.socket()
    os.dup2(other.fileno(), number)
    rig.connections.look(b"me", frame(number, "key"))
    rig.connections.sweep()
    assert rig.ended == [b"me"]
    assert not rig.connections.wants(b"me")


def test_a_name_that_a_client_has_chosen_may_be_anothers(rig: Rig) -> None:
    connections = rig.connections
    given, chosen = b"\0" * 5, b"me"
    assert connections.is_there(given)
    assert not connections.is_there(chosen)
    peer = rig.socket()
    connections.look(chosen, frame(peer.fileno()))
    assert connections.is_there(chosen)
    peer.close()
    assert not connections.is_there(chosen)


def test_a_cut_ends_the_connection_and_nothing_that_has_its_number(rig: Rig) -> None:
    (ours, peer), (other, others_peer) = rig.pair(), rig.pair()
    rig.connections.look(b"a", frame(ours.fileno()))
    (connection,) = rig.connections
    connection.cut()
    assert peer.recv(1) == b""
    os.dup2(other.fileno(), ours.fileno())
    connection.cut()
    others_peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        others_peer.recv(1)


def test_a_cut_of_what_is_no_socket_any_more_leaves_nothing_open(rig: Rig, tmp_path: Path) -> None:
    ours = rig.socket()
    rig.connections.look(b"a", frame(ours.fileno()))
    (connection,) = rig.connections
    with (tmp_path / "file").open("w") as file:
        os.dup2(file.fileno(), ours.fileno())
    before = set(os.listdir("/proc/self/fd"))
    connection.cut()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_transport_without_descriptors_is_taken_to_be_there(rig: Rig) -> None:
    rig.connections.look(b"a", frame(None))
    rig.connections.sweep()
    assert not rig.connections.wants(b"a")
    rig.connections.end(b"a")
    rig.connections.end(b"a")
    assert rig.ended == [b"a"]


def test_one_that_ends_another_while_it_is_told(rig: Rig) -> None:
    ended: list[bytes] = []

    def on_end(connection: Connection) -> Any:
        ended.append(connection.identity)
        connections.end(b"b")

    connections = Connections(on_end)
    for name in (b"a", b"b"):
        peer = rig.socket()
        connections.look(name, frame(peer.fileno()))
        peer.close()
    connections.sweep()
    assert ended == [b"a", b"b"]
