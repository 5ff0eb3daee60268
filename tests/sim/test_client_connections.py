"""The clients' connections: lost, never there, kept by heartbeats, held up by readers."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from ipc import dealer
from ipc.client import Client as AsyncClient
from ipc.errors import Closed, ConnectionLost, EndpointError, Timeout
from ipc.messages import Credit, Generate, OpenSession, Ping
from ipc.sync_client import Client
from tests.support.ipc_daemon import CountingDaemon, DaemonThread


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def num_opened(daemon: CountingDaemon) -> int:
    return sum(isinstance(request, OpenSession) for request in daemon.requests)


def test_a_blocking_call_ends_when_its_daemon_does(endpoint: str) -> None:
    with Client(endpoint) as client:
        for _ in range(2):
            with DaemonThread(endpoint):
                pieces = iter(client.generate("begin"))
                assert next(pieces).text == "x"
                prefix = client.generate("hold")
            with pytest.raises(ConnectionLost, match="ask again"):
                next(pieces)
            with pytest.raises(ConnectionLost):
                prefix.result()
        with DaemonThread(endpoint):
            assert client.generate("count 2").result().text == "0 1 "


def test_a_client_whom_libzmq_has_given_up_finds_the_daemon_that_comes(endpoint: str) -> None:
    """To a socket of a kind that does not fit libzmq connects once, and says nothing of it."""
    with Client(endpoint) as client:
        # The listener is gone when the context is.
        with zmq.Context() as context, context.socket(zmq.PUB) as other:
            other.bind(endpoint)
            while client._link._dealer.socket.poll(0, zmq.POLLOUT):
                pass
        with DaemonThread(endpoint):
            assert client.tokenize("x", timeout_s=5) == (1, 2)


async def test_a_harmless_call_outlives_a_restart(endpoint: str) -> None:
    class Silent(CountingDaemon):
        def _answer(self, *_: object) -> None:
            pass

    async with AsyncClient(endpoint) as client:
        silent = Silent()
        async with silent.serve(endpoint):
            waiting = asyncio.ensure_future(client.tokenize("x"))
            await silent.until(lambda: silent.requests)
        async with CountingDaemon().serve(endpoint):
            assert await waiting == (1, 2)


async def test_a_call_made_while_the_daemon_is_away_is_answered_by_the_next(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        async with CountingDaemon().serve(endpoint):
            await client.ping()
            lost = client.generate("hold")
        with pytest.raises(ConnectionLost):
            await lost.result()
        waiting = asyncio.ensure_future(client.generate("count 2").result())
        await asyncio.sleep(0)
        async with CountingDaemon().serve(endpoint):
            assert (await waiting).text == "0 1 "


async def test_a_client_that_is_opened_twice_has_one_connection(endpoint: str) -> None:
    async with CountingDaemon().serve(endpoint):
        client = AsyncClient(endpoint)
        client.open()
        held = client.generate("hold", timeout_s=5)
        async with client:
            await client.ping()
        with pytest.raises(Closed):
            await held.result()


async def test_who_gives_up_before_a_daemon_is_there_leaves_little_behind(endpoint: str) -> None:
    daemon = CountingDaemon()
    async with AsyncClient(endpoint, timeout_s=0.001) as client:
        kept = client.generate("count 2", timeout_s=20)
        for _ in range(50):
            with pytest.raises(Timeout):
                await client.generate("x" * 10_000).result()
        async with daemon.serve(endpoint):
            assert (await kept.result()).text == "0 1 "
    asked = [request for request in daemon.requests if isinstance(request, Generate)]
    assert len(asked) < 10


async def test_an_async_client_with_a_lease_is_heard_of_by_itself(endpoint: str) -> None:
    daemon = CountingDaemon()
    async with AsyncClient(endpoint, lease_s=1.0) as client:
        async with daemon.serve(endpoint):
            await daemon.until(lambda: num_opened(daemon) >= 3)
        daemon = CountingDaemon()
        async with daemon.serve(endpoint):
            assert (await client.ping()).version == "0.1.0"
            assert isinstance(daemon.requests[0], OpenSession)


def test_a_blocking_client_with_a_lease_is_heard_of_while_it_does_nothing(endpoint: str) -> None:
    with DaemonThread(endpoint) as daemon, Client(endpoint, lease_s=1.0) as client:
        daemon.wait_for(lambda seen: num_opened(seen) >= 3)
        assert client.ping().version == "0.1.0"
    assert {request.lease_ms for request in sent(daemon, OpenSession)} == {1000}


def test_a_blocking_client_with_a_lease_is_heard_of_while_it_waits(endpoint: str) -> None:
    with (
        DaemonThread(endpoint) as daemon,
        Client(endpoint, lease_s=1.0) as client,
        pytest.raises(Timeout),
    ):
        client.generate("hold", timeout_s=1.0).result()
    assert num_opened(daemon.daemon) >= 2


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_client_that_nobody_closes_takes_its_thread_along(endpoint: str) -> None:
    client = Client(endpoint, lease_s=1.0)
    (heart,) = [thread for thread in threading.enumerate() if thread.name == "rtcache-lease"]
    client.generate("hold")
    del client
    gc.collect()
    heart.join(10)
    assert not heart.is_alive()


@pytest.mark.parametrize("lease_s", [0.5, 3601, float("nan")])
def test_a_lease_that_is_none(endpoint: str, lease_s: float) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match="lease_s must be from 1 to 3600 seconds"):
            client(endpoint, lease_s=lease_s)


@pytest.fixture
def daemon(endpoint: str) -> Iterator[DaemonThread]:
    with DaemonThread(endpoint) as thread:
        yield thread


def sent(daemon: DaemonThread, kind: type) -> list:
    return [request for request in daemon.daemon.requests if isinstance(request, kind)]


@pytest.mark.parametrize(
    ("window", "credit", "grants"), [(4, 4, [2] * 5), (1, 1, [1] * 10), (None, None, [])]
)
def test_a_reader_grants_what_it_has_read(
    endpoint: str,
    daemon: DaemonThread,
    window: int | None,
    credit: int | None,
    grants: list[int],
) -> None:
    with Client(endpoint, window=window) as client:
        pieces = iter(client.generate("count 10"))
        for number in range(10):
            assert next(pieces).text == f"{number} "
        list(pieces)
        client.ping()
    (asked,) = sent(daemon, Generate)
    assert asked.credit == credit
    # The counting daemon sends all at once, so the end of the answer may have come before.
    given = [request.credit for request in sent(daemon, Credit)]
    assert given == grants[: len(given)]


def test_many_clients_that_come_and_go_leave_nothing(endpoint: str, daemon: DaemonThread) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(endpoint, lease_s=5)) for _ in range(20)]
        assert [client.ping().version for client in clients] == ["0.1.0"] * 20
        assert threading.active_count() == before + 20
    assert len(sent(daemon, Ping)) == 20
    for thread in threading.enumerate():
        if thread.name == "rtcache-lease":
            thread.join(10)
    assert threading.active_count() == before


def test_hundreds_of_clients_fit_into_a_process(endpoint: str, daemon: DaemonThread) -> None:
    """libzmq's own limit of sockets would be reached by 341."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(endpoint)) for _ in range(400)]
        assert {client.ping().version for client in clients} == {"0.1.0"}
    assert len(sent(daemon, Ping)) == 400


class NoRoom:
    """Stands for a process that may open no more files, as long as it is told so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._make = dealer._unconnected

    def begin(self) -> None:
        def refuse(_: object) -> zmq.Socket[bytes]:
            raise zmq.ZMQError(errno.EMFILE)

        self._patch.setattr(dealer, "_unconnected", refuse)

    def end(self) -> None:
        self._patch.setattr(dealer, "_unconnected", self._make)


def test_without_room_for_a_new_socket_calls_end_and_later_ones_are_made(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room = NoRoom(monkeypatch)
    with Client(endpoint) as client:
        with DaemonThread(endpoint):
            stream = client.generate("hold")
            client.ping()
            no_room.begin()
        with pytest.raises(EndpointError, match="Too many open files"):
            client.tokenize("x")
        with pytest.raises((EndpointError, ConnectionLost)):
            stream.result()
        no_room.end()
        with DaemonThread(endpoint):
            assert client.ping().version == "0.1.0"


async def test_the_same_in_an_event_loop(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = NoRoom(monkeypatch)
    async with AsyncClient(endpoint) as client:
        async with CountingDaemon().serve(endpoint):
            stream = client.generate("hold")
            await client.ping()
            no_room.begin()
        with pytest.raises(ConnectionLost):
            await stream.result()
        with pytest.raises(EndpointError, match="Too many open files"):
            await client.tokenize("x")
        no_room.end()
        async with CountingDaemon().serve(endpoint):
            assert (await client.ping()).version == "0.1.0"


async def test_who_waits_hears_at_once_that_there_is_no_room(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room = NoRoom(monkeypatch)
    async with CountingDaemon().serve(endpoint), AsyncClient(endpoint) as client:
        reading = asyncio.ensure_future(client.generate("hold").result())
        await client.ping()
        no_room.begin()
        monkeypatch.setattr(dealer.Dealer, "has_broken", lambda sockets: sockets.has_socket)
        with pytest.raises(EndpointError):
            await client.tokenize("x")
        for _ in range(5):
            await asyncio.sleep(0)
        assert isinstance(reading.exception(), ConnectionLost)


def test_no_room_for_the_first_socket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    NoRoom(monkeypatch).begin()
    with pytest.raises(
        EndpointError, match=r"cannot make a socket for ipc://.*Too many open files"
    ):
        Client(endpoint)
