"""Too many connections: which are cut, how many, and what is none of ours."""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import pytest

from ipc.crowd import LOOK_S, Crowd
from ipc.endpoint import IpcAddress, TcpAddress

NUM = 60


class Hall:
    """A listening socket, and connections to it; both ends are in this process.

    Attributes:
        cuts: what the crowd told: how many were cut, how many files were open.
    """

    def __init__(self, stack: ExitStack, listener: socket.socket) -> None:
        self._listener = stack.enter_context(listener)
        listener.listen(NUM)
        name = listener.getsockname()
        is_path = isinstance(name, str)
        self.address = IpcAddress(name) if is_path else TcpAddress(name[0], str(name[1]))
        self.clients = [stack.enter_context(socket.socket(listener.family)) for _ in range(NUM)]
        self.ends = []
        for client in self.clients:
            client.connect(name)
            self.ends.append(stack.enter_context(listener.accept()[0]))
        self.cuts: list[tuple[int, int]] = []

    def crowd(self, limit: int, look_takes_s: float = 0.0) -> Crowd:
        clock = count(100.0, look_takes_s)
        return Crowd(self.address, lambda *told: self.cuts.append(told), limit, lambda: next(clock))

    def cut(self) -> list[int]:
        """Which connections were: their places."""
        for client in self.clients:
            client.setblocking(False)
        return [place for place, client in enumerate(self.clients) if is_over(client)]


def is_over(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture(params=["ipc", "tcp"])
def hall(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hall]:
    gc.collect()  # files of earlier tests are not to be closed while ours are counted
    is_path = request.param == "ipc"
    listener = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    listener.bind(f"{tmp_path}/s" if is_path else ("127.0.0.1", 0))
    with ExitStack() as stack:
        yield Hall(stack, listener)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # that of the directory


def test_the_newest_that_are_silent_go_first(hall: Hall) -> None:
    files = num_open()
    limit = 2 * files
    spoken = {end.fileno() for end in hall.ends[-10:]}
    again_s = hall.crowd(limit).look(lambda: spoken)
    ((num_cut, told_files),) = hall.cuts
    assert abs(told_files - files) <= 1
    assert num_cut == int(told_files - limit * 3 / 8)
    silent = range(NUM - 10)
    assert hall.cut() == list(silent)[-num_cut:]
    assert again_s < LOOK_S


def test_those_that_spoke_go_when_there_are_no_others(hall: Hall) -> None:
    hall.crowd(num_open()).look(lambda: {end.fileno() for end in hall.ends})
    assert hall.cut() == list(range(NUM))  # and neither the listener nor the clients' ends
    hall._listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        hall._listener.accept()


def test_nothing_is_cut_while_there_is_room(hall: Hall) -> None:
    limit = 2 * num_open() + 10
    hall.crowd(limit).look(set)
    assert hall.crowd(1 << 20).look(set) == LOOK_S
    assert (hall.cut(), hall.cuts) == ([], [])


def test_looks_that_take_long_leave_time_for_others(hall: Hall) -> None:
    limit = 2 * num_open() + 10
    assert hall.crowd(limit, look_takes_s=0.0).look(set) == 0.005
    assert hall.crowd(limit, look_takes_s=0.03).look(set) == pytest.approx(0.21)
    assert hall.crowd(num_open(), look_takes_s=0.03).look(set) == 0.005


def test_what_is_looked_at_is_left_open(hall: Hall) -> None:
    files = num_open()
    hall.crowd(files).look(set)
    assert num_open() == files


def test_when_none_is_left_it_is_looked_again(hall: Hall) -> None:
    crowd = hall.crowd(num_open())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open(), hard))
    try:
        with ExitStack() as stack:
            with suppress(OSError):
                while True:
                    stack.enter_context(open(os.devnull, "rb"))
            again_s = crowd.look(set)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert again_s < LOOK_S
    assert hall.cuts == []
