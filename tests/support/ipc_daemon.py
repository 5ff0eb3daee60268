"""A daemon without a model, for tests of clients and sockets.

What it answers depends on the request only:

- a prompt "count N" gets the tokens 0…N−1, each with its number and a blank as text;
- a prompt "hold" gets nothing at all, "begin" one token and then nothing;
- a prompt "end WORD" gets "x", and ends with that `finish_reason`;
- a prompt "refuse" gets `queue_full`, retryable after 5 ms;
- `chat` is answered with the last turn's text;
- `release` makes the handler fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

import uvloop
from msgspec import structs

from ipc.messages import (
    AnyRequest,
    CacheReport,
    Cancel,
    Chat,
    Credit,
    Done,
    Error,
    Evict,
    Evicted,
    Explain,
    Explained,
    Generate,
    GetInfo,
    GetStats,
    Info,
    Listed,
    ListEntries,
    Ok,
    Opened,
    OpenSession,
    Pin,
    Ping,
    Pinned,
    Pong,
    PrefixName,
    Register,
    Registered,
    Stats,
    Timing,
    Tokenize,
    Tokenized,
    Tokens,
    Unpin,
    Unpinned,
    Usage,
    Verified,
    Verify,
)
from ipc.server import ClientRef, Server
from tests.support.admin_answers import of_the_daemon

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
#: Longer than anything here takes; only a hanging test reaches it [seconds].
PATIENCE_S = 20.0


def run_on(loop_name: str, scene: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine to its end on a fresh loop, in debug mode."""
    loop = LOOPS[loop_name]()
    loop.set_debug(True)
    # On a loaded machine a slow callback is no finding.
    loop.slow_callback_duration = PATIENCE_S
    try:
        loop.run_until_complete(asyncio.wait_for(scene, PATIENCE_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


class CountingDaemon:
    """The handler; `server` is set by whoever makes the server.

    Attributes:
        incarnation: what it calls itself.
        seen: every request, in order, with its client.
        gone, slow: clients the server reported.
        log: what the server logged.
    """

    def __init__(self) -> None:
        self.server: Server
        self.incarnation = ""
        self.seen: list[tuple[ClientRef, AnyRequest]] = []
        self.gone: list[ClientRef] = []
        self.slow: list[ClientRef] = []
        self.log: list[tuple[str, dict[str, object]]] = []
        self._changed: asyncio.Event | None = None

    def serve(self, endpoint: str, **options: Any) -> Server:
        """The server that this handler answers for."""
        self.server = Server(
            endpoint, self, log=lambda event, fields: self._note(event, dict(fields)), **options
        )
        return self.server

    @property
    def requests(self) -> list[AnyRequest]:
        """Every request, in order."""
        return [request for _, request in self.seen]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something the server told makes `condition` true."""
        self._changed = asyncio.Event()
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def on_message(self, client: ClientRef, message: AnyRequest) -> None:
        self.seen.append((client, message))
        self._notify()
        self._answer(client, message)

    def on_client_gone(self, client: ClientRef) -> None:
        self.gone.append(client)
        self._notify()

    def on_slow_reader(self, client: ClientRef) -> None:
        self.slow.append(client)
        self._notify()

    def _note(self, event: str, fields: dict[str, object]) -> None:
        self.log.append((event, fields))
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _answer(self, client: ClientRef, message: AnyRequest) -> None:
        send = self.server.send
        if isinstance(message, (Generate, Chat)):
            self._generate(client, message)
        elif isinstance(message, Cancel):
            send(client, Ok(message.id))
        elif isinstance(message, Ping):
            send(client, self._pong(message))
        elif isinstance(message, OpenSession):
            lease_ms, incarnation = message.lease_ms, self.incarnation
            send(client, Opened(message.id, lease_ms=lease_ms, incarnation=incarnation))
        elif isinstance(message, Credit):
            pass  # is not answered
        elif isinstance(message, GetInfo):
            send(client, info(message))
        elif isinstance(message, Tokenize):
            send(client, Tokenized(message.id, token_ids=(1, 2)))
        elif isinstance(message, Register):
            name = PrefixName("p-1")
            send(
                client,
                Registered(message.id, prefix_id=name, num_tokens=3, cached_tokens=0, num_bytes=9),
            )
        elif isinstance(message, ListEntries):
            send(client, Listed(message.id, entries=(), total=message.offset + message.limit))
        elif isinstance(message, Evict):
            num_blocks = message.max_blocks or 99
            send(client, Evicted(message.id, num_blocks=num_blocks, num_bytes=0, in_use_blocks=0))
        elif isinstance(message, (Pin, Unpin, Explain)):
            send(client, _kept_or_explained(message))
        elif isinstance(message, Verify):
            send(client, _verified(message))
        elif (reply := of_the_daemon(message)) is not None:
            send(client, reply)
        elif isinstance(message, GetStats):
            send(client, Stats(message.id, stats={"pool": {"num_blocks": 3}}))
        else:
            raise RuntimeError("a secret of the daemon")

    def _pong(self, message: Ping) -> Pong:
        return Pong(message.id, version="0.1.0", uptime_s=12.5, incarnation=self.incarnation)

    def _generate(self, client: ClientRef, message: Generate | Chat) -> None:
        send = self.server.send
        prompt = message.prompt if isinstance(message, Generate) else message.messages[-1].content
        word, _, number = (prompt or "count 0").partition(" ")
        if word == "refuse":
            text = "256 requests are waiting already"
            send(
                client,
                Error(
                    id=message.id,
                    code="queue_full",
                    message=text,
                    retryable=True,
                    retry_after_ms=5,
                ),
            )
        elif word == "count":
            count = int(number or 0)
            if message.stream:
                for index in range(count):
                    send(
                        client,
                        Tokens(message.id, index=index, text=f"{index} ", token_ids=(index,)),
                    )
            send(client, _done(message, count))
        elif word == "begin":
            send(client, Tokens(message.id, index=0, text="x", token_ids=(1,)))
        elif word == "end":
            send(client, structs.replace(_done(message, 0, "x"), finish_reason=number))
        elif word != "hold":
            send(client, _done(message, 0, prompt or ""))


class DaemonThread:
    """A `CountingDaemon` on a loop of its own, for blocking clients.

    Use its attributes from the test's thread only through `wait_for` and after `with` has ended.
    """

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.daemon = CountingDaemon()
        self.endpoint = endpoint
        self._options = options
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> DaemonThread:
        self._thread.start()
        if not self._is_up.wait(PATIENCE_S):
            raise RuntimeError("the daemon did not start")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the daemon does not end"

    def wait_for(self, condition: Callable[[CountingDaemon], object]) -> None:
        """Block until what the daemon has seen makes `condition` true."""
        waiting = self.daemon.until(lambda: condition(self.daemon))
        asyncio.run_coroutine_threadsafe(waiting, self._loop).result(PATIENCE_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self.daemon.serve(self.endpoint, **self._options) as server:
            self.endpoint = server.endpoint
            self._is_up.set()
            await self._stop.wait()


def info(message: GetInfo) -> Info:
    """What the counting daemon says of itself."""
    return Info(
        message.id,
        model="counting",
        digest="00",
        device="none",
        vocab_size=10,
        max_model_len=100,
        block_size=4,
        chat=True,
        limits={"max_message_bytes": 4194304},
        versions={"protocol": "1"},
    )


def _kept_or_explained(message: Pin | Unpin | Explain) -> Pinned | Unpinned | Explained:
    """Every digest is that of 500 tokens; every prompt is cold."""
    if isinstance(message, Unpin):
        return Unpinned(message.id, digest=message.digest)
    if isinstance(message, Explain):
        return Explained(message.id, prompt_tokens=9, cached_tokens=0, cache=CacheReport("cold"))
    return Pinned(
        message.id,
        digest=message.digest,
        num_tokens=500,
        num_blocks=8,
        num_bytes=800,
        expires_in_s=message.ttl_s,
    )


def _verified(message: Verify) -> Verified:
    """Three blocks from number 1 on, one at a time; the last of them is damaged."""
    number = max(1, message.first_block)
    is_damaged = number == 3
    return Verified(
        message.id,
        num_blocks=1,
        num_bytes=1024,
        num_new=int(number == 1),
        num_changed=int(is_damaged),
        num_not_finite=0,
        dropped_blocks=2 * is_damaged,
        in_use_blocks=int(is_damaged),
        next_block=None if is_damaged else number + 1,
    )


def _done(message: Generate | Chat, count: int, text: str = "") -> Done:
    """The last message of an answer of `count` numbers, or of `text`."""
    index = count
    token_ids: tuple[int, ...] = ()
    if not message.stream:
        index = 0
        token_ids = tuple(range(count))
        text = text or "".join(f"{number} " for number in range(count))
    return Done(
        message.id,
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason="length",
        usage=Usage(550, 500, 50, count),
        timing=Timing(0.5, 25.0, 75.0, 20.0),
        cache=CacheReport("diverged", 500, 812),
    )
