"""Serves /metrics, /health and /ready over HTTP, in a thread of its own.

The thread reads nothing of the engine: it asks the daemon's event loop and waits, not for ever. So
a loop that is stuck is seen as such, and a client of this server, however slow or hostile, costs
the loop nothing but short questions. Connections are few, short, and closed after one answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import NamedTuple, Protocol, TypeVar

import structlog

from runtime_cache.errors import ConfigError
from runtime_cache.metrics.address import Address, parse_listen
from runtime_cache.metrics.exposition import CONTENT_TYPE, metrics_text
from runtime_cache.metrics.health import Health, HealthPage, health_page, ready_page
from runtime_cache.metrics.samples import Sample, samples
from runtime_cache.metrics.snapshot import MetricsSnapshot

log = structlog.get_logger(__name__)

#: How long the event loop may take to answer [seconds].
LOOP_PATIENCE_S = 2.0
#: How long a connection may take in all [seconds].
CONNECTION_S = 10.0
#: How many connections there may be at a time; for one more the oldest is closed, so that whoever
#: holds them open does not keep others out.
MAX_CONNECTIONS = 32
#: Request line and headers [bytes].
MAX_HEAD_BYTES = 8192

_PATHS = ("/metrics", "/health", "/ready")
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_TEXT = "text/plain; charset=utf-8"
Answer = TypeVar("Answer")


class Source(Protocol):
    """Whose figures are served; called on the event loop."""

    def health(self) -> Health: ...
    def snapshot(self) -> MetricsSnapshot: ...


class Response(NamedTuple):
    """What a client gets."""

    status: int
    body: bytes
    content_type: str = _TEXT


class Request(NamedTuple):
    """What a client wants."""

    method: str
    path: str


_NO_REQUEST = Request("", "")


class MetricsServer:
    """Listens on one address.

    Attributes:
        address: where it listens, with the port that the system chose if it was to.
    """

    def __init__(self, address: Address) -> None:
        """Listens from now on; answers when started.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._socket = _listen(address)
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._source: Source | None = None
        self._daemon = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        #: Oldest first.
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Answer from now on; until there is a source, that the daemon is loading."""
        self._thread.start()

    def attach(self, source: Source) -> None:
        """Whose figures to serve from now on."""
        self._source = source

    async def close(self) -> None:
        """Answer no more; on return the thread has ended, whatever ended it. To be called once."""
        if self._thread.ident is None:
            self._socket.close()
            self._loop.close()
            return
        with suppress(RuntimeError):  # the thread has ended already, and closed its loop
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        with self._socket, closing(self._loop):
            asyncio.set_event_loop(self._loop)
            try:
                self._loop.run_until_complete(self._serve())
            except Exception:  # the daemon serves on
                log.exception("metrics_broken")

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=MAX_HEAD_BYTES)
        await self._stop.wait()
        server.close()
        for task in list(self._connections):
            self._drop(task)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # the last of them are told that they are closed

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._connections)))
        task = asyncio.ensure_future(self._serve_one(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._forget)

    def _drop(self, task: asyncio.Task[None]) -> None:
        """Close a connection, also one that was not looked at yet."""
        task.cancel()
        self._connections.pop(task).transport.abort()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer; whatever goes wrong ends this connection only."""
        try:
            await asyncio.wait_for(self._converse(reader, writer), CONNECTION_S)
        except (asyncio.TimeoutError, OSError, EOFError):
            pass  # too slow, or gone
        except Exception:
            log.exception("metrics_failed")
        finally:
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = parse_head(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            request = _NO_REQUEST
            response = _plain(431, f"more than {MAX_HEAD_BYTES} bytes of request and headers\n")
        else:
            response = await self._respond(request)
        writer.write(_encoded(response, is_head=request.method == "HEAD"))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _respond(self, request: Request) -> Response:
        if not request.path:
            return _plain(400, "this is not an HTTP request\n")
        if request.path not in _PATHS:
            return _plain(404, f"there are {', '.join(_PATHS)}\n")
        if request.method not in ("GET", "HEAD"):
            return _plain(405, "GET and HEAD are answered\n")
        if request.path == "/metrics":
            return await self._metrics()
        page = health_page if request.path == "/health" else ready_page
        return _page(page(await self._health()))

    async def _health(self) -> Health:
        source = self._source
        if source is None:
            return Health("loading")
        try:
            return await self._ask(source.health)
        except asyncio.TimeoutError:
            return Health("unresponsive")

    async def _metrics(self) -> Response:
        source = self._source
        if source is None:
            return _page(ready_page(Health("loading")))
        begun_s = time.monotonic()
        try:
            snapshot = await self._ask(source.snapshot)
        except asyncio.TimeoutError:
            return _page(health_page(Health("unresponsive")))
        waited = Sample("rtcache_scrape_wait_seconds", (), time.monotonic() - begun_s)
        return Response(200, metrics_text([*samples(snapshot), waited]), CONTENT_TYPE)

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        """What the daemon's event loop answers.

        Raises:
            TimeoutError: it did not, in time.
        """
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

        def on_loop() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits any more
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._daemon.call_soon_threadsafe(on_loop)
        return await asyncio.wait_for(asyncio.wrap_future(answer), LOOP_PATIENCE_S)


@asynccontextmanager
async def metrics_server(listen: str) -> AsyncIterator[MetricsServer | None]:
    """Serves as the option `metrics.listen` says, until the block ends; None if it is empty.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if not listen:
        yield None
        return
    server = MetricsServer(parse_listen(listen))
    server.start()
    log.info("metrics_listening", address=str(server.address))
    if not server.address.is_loopback:
        log.warning(
            "metrics_exposed",
            address=str(server.address),
            text="whoever reaches this address reads the figures, the model's name and the "
            "tenants'; there is no password",
        )
    try:
        yield server
    finally:
        await server.close()


def parse_head(head: bytes) -> Request:
    """What the request line says; of what is not HTTP both are empty. Headers do not matter."""
    words = head.decode("latin-1").partition("\r\n")[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return _NO_REQUEST
    return Request(words[0], words[1].partition("?")[0])


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"metrics.listen: cannot listen on {address}: {reason}") from error


def _plain(status: int, text: str) -> Response:
    return Response(status, text.encode())


def _page(page: HealthPage) -> Response:
    return _plain(page.status, page.text)


def _encoded(response: Response, *, is_head: bool) -> bytes:
    head = (
        f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else response.body)
