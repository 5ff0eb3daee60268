"""The server of /metrics, /health and /ready: states, hostile clients, a stuck event loop."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from runtime_cache.errors import ConfigError
from runtime_cache.metrics import http as metrics_http
from runtime_cache.metrics.address import Address
from runtime_cache.metrics.health import Health
from runtime_cache.metrics.http import MAX_CONNECTIONS, MetricsServer, metrics_server
from runtime_cache.metrics.snapshot import STATES, MetricsSnapshot

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])

PATIENCE_S = 60.0


class Reply(NamedTuple):
    status: int
    text: str
    kind: str | None


class FakeSource:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.state: Health | Exception = Health("serving")

    def health(self) -> Health:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def snapshot(self) -> MetricsSnapshot:
        raise ValueError("no figures here")


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    async with metrics_server("127.0.0.1:0") as server:
        assert server is not None
        yield server


def get_now(server: MetricsServer, path: str, method: str = "GET") -> Reply:
    """Ask and wait, whatever the event loop does meanwhile."""
    host, port = server.address
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return Reply(response.status, response.read().decode(), response.headers["Content-Type"])
    finally:
        connection.close()


async def get(server: MetricsServer, path: str, method: str = "GET") -> Reply:
    return await asyncio.to_thread(get_now, server, path, method)


def said(server: MetricsServer, content: bytes) -> bytes:
    """What comes back for these bytes until the server closes."""
    with socket.create_connection(server.address, PATIENCE_S) as raw:
        raw.sendall(content)
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := raw.recv(65536):
            received += chunk
        return received


async def test_before_there_is_anything_to_tell_it_is_loading(server: MetricsServer) -> None:
    reason = "loading\nreason: the bundle is being loaded, nothing is answered yet\n"
    assert await get(server, "/health") == (200, reason, "text/plain; charset=utf-8")
    assert (await get(server, "/ready"))[:2] == (503, reason)
    assert (await get(server, "/metrics"))[:2] == (503, reason)


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("serving", 200, 200),
        ("draining", 200, 503),
        ("recovering", 200, 503),
        ("hung", 503, 503),
        ("lost", 503, 503),
        ("broken", 503, 503),
    ],
)
async def test_states(server: MetricsServer, state: str, health: int, ready: int) -> None:
    assert state in STATES
    source = FakeSource()
    source.state = Health(state, 3, ("memory is low",))
    server.attach(source)
    reply = await get(server, "/health")
    lines = reply.text.splitlines()
    assert (reply.status, lines[0], lines[-1]) == (health, state, "warning: memory is low")
    assert len(lines) == (2 if state == "serving" else 3)
    assert (await get(server, "/ready?x=1")).status == ready


async def test_a_stuck_event_loop_is_told(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "LOOP_PATIENCE_S", 0.05)
    server.attach(FakeSource())
    for path in ("/health", "/ready", "/metrics"):
        reply = get_now(server, path)  # the loop's own thread waits, so the loop is stuck
        assert (reply.status, reply.text.splitlines()[0]) == (503, "unresponsive")
    monkeypatch.undo()
    assert (await get(server, "/health")).text == "serving\n"


async def test_a_bug_costs_one_page(server: MetricsServer) -> None:
    server.attach(FakeSource())
    with capture_logs() as logs:
        assert await asyncio.to_thread(said, server, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    assert [line["event"] for line in logs] == ["metrics_failed"]
    assert (await get(server, "/health")).text == "serving\n"


async def test_what_else_is_asked(server: MetricsServer) -> None:
    assert (await get(server, "/"))[:2] == (404, "there are /metrics, /health, /ready\n")
    assert (await get(server, "/health/../metrics")).status == 404
    assert (await get(server, "/health", "POST")).status == 405
    assert await get(server, "/health", "HEAD") == (200, "", "text/plain; charset=utf-8")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 8000 + b" HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /health\r\n\r\n", b"400"),
        (b"GET  /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET health HTTP/1.1\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\xff\xfe\x00\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /hea", None),
        (b"", None),
        (b"\x16\x03\x01\x02\x00\x01", None),
    ],
    ids=lambda content: repr(content[:12]) if content else "nothing",
)
async def test_hostile_requests(
    server: MetricsServer, content: bytes, status: bytes | None
) -> None:
    server.attach(FakeSource())
    try:
        received = await asyncio.to_thread(said, server, content)
    except ConnectionError:  # what it did not read was still on its way
        received = None
    if received is not None:
        assert received[9:12] == (status or b"")
    assert (await get(server, "/health")).text == "serving\n"


async def test_who_holds_connections_open_keeps_nobody_out(server: MetricsServer) -> None:
    server.attach(FakeSource())
    idle = [socket.create_connection(server.address) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        for connection in idle:
            connection.setblocking(True)
        idle[-1].sendall(b"GET /health HT")
        for _ in range(3):
            assert (await get(server, "/health")).text == "serving\n"
        # The oldest were closed, and hear of it.
        assert await asyncio.to_thread(hears_of_end, idle[0])
    finally:
        for connection in idle:
            connection.close()


def hears_of_end(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


async def test_a_slow_client_is_given_up(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "CONNECTION_S", 0.05)
    with socket.create_connection(server.address) as raw:
        raw.sendall(b"GET /health")
        assert await asyncio.to_thread(hears_of_end, raw)


async def test_closing_ends_what_is_open() -> None:
    async with metrics_server("127.0.0.1:0") as server:
        assert server is not None
        raw = socket.create_connection(server.address)
        await get(server, "/health")  # it has been taken
    with raw:
        assert hears_of_end(raw)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)


async def test_a_thread_that_died_does_not_disturb_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(server: MetricsServer) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(MetricsServer, "_serve", die)
    with capture_logs() as logs:
        async with metrics_server("127.0.0.1:0") as server:
            assert server is not None
            await asyncio.to_thread(server._thread.join)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(server.address, PATIENCE_S)
    assert sorted(line["event"] for line in logs) == ["metrics_broken", "metrics_listening"]


async def test_an_address_in_use_stops_the_start(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen: cannot listen on 127\.0\.0\.1:\d+: "):
        MetricsServer(Address("127.0.0.1", server.address.port))


async def test_not_started_it_leaves_nothing() -> None:
    server = MetricsServer(Address("127.0.0.1", 0))
    await server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)


async def test_an_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    async with metrics_server("[::1]:0") as server:
        assert server is not None
        assert (await get(server, "/health")).text.startswith("loading\n")
        assert str(server.address).startswith("[::1]:")


async def test_off_by_default_and_loud_when_exposed() -> None:
    with capture_logs() as logs:
        async with metrics_server("") as server:
            assert server is None
        assert logs == []
        async with metrics_server("0.0.0.0:0") as server:
            assert server is not None
    found = [(line["event"], line["log_level"]) for line in logs]
    assert found == [("metrics_listening", "info"), ("metrics_exposed", "warning")]
