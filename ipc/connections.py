"""Which connections there are, and whether each is still there although nothing is sent to it.

ZeroMQ tells nobody that a peer has gone. But every frame that came over a connection carries the
file descriptor of it, which libzmq closes as soon as the peer has closed its end. So a connection
is there as long as its descriptor is the socket it was: the number may be given to another file,
whose inode number differs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import zmq

from ipc.handler import ClientRef

#: Of a transport without descriptors; such a connection is taken to be there.
_NO_FD = -1
#: How the identities begin that no client has chosen.
_GIVEN_BY_LIBZMQ = b"\0"


@dataclass(slots=True)
class Connection:
    """One connection, as the first of its messages showed it.

    Attributes:
        identity: libzmq's name of it.
        fd: its file descriptor in this process, which belongs to libzmq.
        inode: of that socket; 0 if it had been closed already.
        user_id: what the ZAP handler said of the client's key; empty without one.
        ref: the client as the server's handler knows it; None before its first message is handled.
    """

    identity: bytes
    fd: int
    inode: int
    user_id: str = ""
    ref: ClientRef | None = None

    @property
    def is_open(self) -> bool:
        if self.fd == _NO_FD:
            return True
        return self.inode != 0 and _inode(self.fd) == self.inode

    def is_closed_like(self, other: Connection) -> bool:
        """Whether both are, as far as can be told, one connection that has been closed."""
        is_closed = other.fd != _NO_FD and other.inode == 0
        return is_closed and (self.fd, self.user_id) == (other.fd, other.user_id)

    def cut(self) -> None:
        """Shut the connection down; libzmq then notices its end, as if the peer had gone."""
        with suppress(OSError), own_socket(self.fd) as own:
            if _inode(own.fileno()) == self.inode:
                own.shutdown(socket.SHUT_RDWR)


class Connections:
    """All connections that have sent something, by identity.

    Used as the `inspector` of a `Pump`. A frame has to be received without copying it to be
    looked at, which costs some ten microseconds; so it is done for the first message of a
    connection only. Whether that one is still there is asked at every message: a client that has
    chosen its identity may reconnect under it, perhaps with another key.
    """

    def __init__(self, on_gone: Callable[[Connection], None]) -> None:
        """Args:
        on_gone: told of a connection that has ended, and is forgotten.
        """
        self._on_gone = on_gone
        self._by_identity: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._by_identity.values())

    def find(self, identity: bytes) -> Connection | None:
        """The connection of this name, if it has sent something."""
        return self._by_identity.get(identity)

    def is_there(self, identity: bytes) -> bool:
        """Whether what is sent to this name reaches the connection it is meant for.

        A name that libzmq has given has no other owner, ever. One that a client has chosen belongs,
        as soon as that has gone, to whoever connects next and chooses the same; he may have another
        key, and is not to read the rest of the other's answers.
        """
        if identity[:1] == _GIVEN_BY_LIBZMQ:
            return True
        connection = self._by_identity.get(identity)
        return connection is not None and connection.is_open

    def wants(self, identity: bytes) -> bool:
        """Whether the next frame of this peer is to be looked at."""
        connection = self._by_identity.get(identity)
        return connection is None or not connection.is_open

    def look(self, identity: bytes, frame: zmq.Frame) -> None:
        """Note where a frame came from; the connection before it of the same name has ended."""
        fd = int(_property(frame, "__fd") or _NO_FD)
        inode = 0 if fd == _NO_FD else _inode(fd)
        found = Connection(identity, fd, inode, _property(frame, "User-Id"))
        before = self._by_identity.get(identity)
        if before is not None and before.is_closed_like(found):
            return  # one more message of a connection that had ended before they were read
        self.end(identity)
        self._by_identity[identity] = found

    def end(self, identity: bytes) -> None:
        """Forget a connection, if it is known, and say so."""
        connection = self._by_identity.pop(identity, None)
        if connection is not None:
            self._on_gone(connection)

    def sweep(self) -> None:
        """Find the connections that have ended; a microsecond for each that there is."""
        for connection in [c for c in self._by_identity.values() if not c.is_open]:
            self.end(connection.identity)


def own_socket(fd: int) -> socket.socket:
    """A descriptor of our own, so that the number cannot become another file meanwhile.

    Raises:
        OSError: it is no socket, or not open any more.
    """
    own = os.dup(fd)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _inode(fd: int) -> int:
    """Of an open file; 0, which no socket has, if there is none."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def _property(frame: zmq.Frame, name: str) -> str:
    """What libzmq says of the connection a frame came over; empty if it says nothing."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
