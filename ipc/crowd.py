"""Keeps a daemon from running out of file descriptors, whoever connects to it how often.

libzmq accepts every connection, and when the system has no descriptor left for the next one it ends
the process (on ipc; on TCP it tries again without a pause). It cannot be told to stop accepting
without losing the connections there are. So when descriptors get scarce, connections are cut: first
those that have never sent a message, then any; the newest first.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import time
from collections.abc import Callable, Container
from contextlib import suppress

from ipc.connections import own_socket
from ipc.endpoint import IpcAddress, TcpAddress

#: How often to look, and how often if a quarter of all descriptors is in use: libzmq accepts thirty
#: connections in a millisecond [seconds].
LOOK_S = 0.05
_URGENT_S = 0.005
#: With many thousands open a look takes tens of milliseconds. If nothing had to be cut it is then
#: left for so many times as long, so that the event loop has time for others; libzmq accepts half
#: as many again meanwhile, no more.
_REST = 7
#: Parts of the limit: from the first on connections are cut, until the second.
_CUT_FROM, _CUT_TO = 1 / 2, 3 / 8
_OPEN_FILES = "/proc/self/fd"


class Crowd:
    """Watches the descriptors of the process on behalf of one listening socket.

    Args:
        address: where it listens; only connections to it are cut.
        on_cut: told how many were cut, and how many files are open.
        limit: of open files; by default that of the process.
        clock: seconds.
    """

    def __init__(
        self,
        address: IpcAddress | TcpAddress,
        on_cut: Callable[[int, int], None],
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._on_cut = on_cut
        self._clock = clock
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit

    def look(self, known: Callable[[], Container[int]]) -> float:
        """Cut connections if it has to be; returns when to look again [seconds].

        Args:
            known: tells the descriptors of connections that have sent a message.
        """
        if self._limit == resource.RLIM_INFINITY or _lowest_free() < self._limit / 4:
            return LOOK_S
        begun_s = self._clock()
        files = _open_files()
        if len(files) >= _CUT_FROM * self._limit:
            self._shrink(files, known())
            return _URGENT_S
        return max(_URGENT_S, _REST * (self._clock() - begun_s))

    def _shrink(self, files: list[int], have_spoken: Container[int]) -> None:
        newest = sorted(files, key=lambda fd: (fd in have_spoken, -fd))
        wanted = int(len(files) - _CUT_TO * self._limit)
        num_cut = 0
        for fd in newest:
            num_cut += num_cut < wanted and self._cut(fd)
        if num_cut:
            self._on_cut(num_cut, len(files))

    def _cut(self, fd: int) -> bool:
        """Shut a connection down, if it is one of ours; libzmq then closes it."""
        with suppress(OSError), own_socket(fd) as own:
            if self._is_ours(own):
                own.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _is_ours(self, own: socket.socket) -> bool:
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        name = own.getsockname()
        if isinstance(self._address, IpcAddress):
            return own.family == socket.AF_UNIX and name == self._address.path
        is_tcp = own.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and str(name[1]) == self._address.port


def _lowest_free() -> float:
    """The next descriptor there will be: at least so many files are open; infinite if none will."""
    try:
        with open(os.devnull, "rb") as file:
            return file.fileno()
    except OSError:
        return math.inf


def _open_files() -> list[int]:
    """Descriptors of this process; none where the system does not tell, or has none to look."""
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:
        return []
