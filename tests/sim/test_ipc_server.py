"""Server and async client on real sockets, in one process, on asyncio and uvloop."""

from __future__ import annotations

import asyncio
import errno
import json
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ipc import attendance
from ipc.answers import Piece
from ipc.client import Client
from ipc.codec import Encoding, Limits, decode_reply, encode
from ipc.errors import (
    Closed,
    ConnectionLost,
    EndpointBusy,
    EndpointError,
    ProtocolError,
    ServerError,
    Timeout,
)
from ipc.link import DEFAULT_WINDOW
from ipc.messages import (
    ADMIN_REQUESTS,
    AnyReply,
    CacheReport,
    Cancel,
    Done,
    Error,
    Generate,
    MessageId,
    Ok,
    Ping,
    Pong,
    Stats,
    Tokens,
    type_name,
)
from ipc.outbox import ParkingLimits
from ipc.server import ClientRef, Server
from tests.support.ipc_daemon import LOOPS, CountingDaemon, run_on

Run = Callable[[Coroutine[Any, Any, None]], None]

GOLDEN = Path(__file__).parent.parent / "golden" / "wire"
PONG = Pong(MessageId("1"), version="0.1.0", uptime_s=12.5)


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Run:
    return partial(run_on, request.param)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


class RawClient:
    """A socket that sends whatever frames a test wants."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER, **options: int | bytes) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(kind)
        self.socket.set(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self) -> AnyReply:
        """The next reply, which must be one frame."""
        (payload,) = await self.socket.recv_multipart()
        return decode_reply(payload)

    async def ask(self, *frames: bytes) -> AnyReply:
        await self.send(*frames)
        return await self.receive()


@asynccontextmanager
async def raw_client(
    endpoint: str, kind: int = zmq.DEALER, **options: int | bytes
) -> AsyncIterator[RawClient]:
    client = RawClient(endpoint, kind, **options)
    try:
        yield client
    finally:
        client.socket.close()


async def send_until(server: Server, ref: ClientRef, reply: AnyReply, counter: str) -> None:
    """Send `reply` again and again until `counter` moves; libzmq works in its own thread."""
    while server.send(ref, reply) and not getattr(server.counters, counter):  # noqa: ASYNC110
        # A moment, so that on a busy machine libzmq hears of an end before its queue is full.
        await asyncio.sleep(0.001)


def ping_json() -> bytes:
    return b'{"type":"ping","id":"1"}'


# --- framing and encodings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "is_json"),
    [
        ([b""], False),
        ([b"abc"], False),
        ([b"{"], True),
        ([b"{", b"a"], False),
        ([b"a", b"{"], True),
    ],
)
def test_what_cannot_be_read_is_answered_in_the_encoding_it_seems_to_be_in(
    run: Run, endpoint: str, frames: list[bytes], is_json: bool
) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), raw_client(endpoint) as client:
            await client.socket.send_multipart(frames)
            (reply,) = await client.socket.recv_multipart()
            assert reply.startswith(b"{") is is_json
            decode = msgspec.json.decode if is_json else msgspec.msgpack.decode
            assert decode(reply)["code"] in ("bad_encoding", "bad_frames")

    run(scene())


@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_dealer_is_answered_in_one_frame_and_in_kind(
    run: Run, endpoint: str, encoding: Encoding
) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), raw_client(endpoint) as client:
            await client.send(encode(Ping(MessageId("1")), encoding))
            assert await client.socket.recv_multipart() == [encode(PONG, encoding)]

    run(scene())


def test_a_dealer_may_change_its_encoding_with_every_message(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with daemon.serve(endpoint), raw_client(endpoint) as client:
            for encoding in (Encoding.JSON, Encoding.MSGPACK, Encoding.JSON):
                await client.send(encode(Ping(MessageId("1")), encoding))
                assert await client.socket.recv_multipart() == [encode(PONG, encoding)]
        refs = [ref for ref, _ in daemon.seen]
        assert len(set(refs)) == 1
        assert [ref.encoding for ref in refs] == ["json", "msgpack", "json"]

    run(scene())


def test_a_req_client_gets_exactly_one_reply_even_if_it_asks_for_a_stream(
    run: Run, endpoint: str
) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with daemon.serve(endpoint), raw_client(endpoint, zmq.REQ) as client:
            request = {"type": "generate", "id": "g", "prompt": "count 3", "stream": True}
            reply = await client.ask(json.dumps(request).encode())
            assert isinstance(reply, Done)
            assert (reply.index, reply.text, reply.token_ids) == (0, "0 1 2 ", (0, 1, 2))
            assert await client.ask(ping_json()) == PONG
        assert daemon.requests[0] == Generate(MessageId("g"), prompt="count 3", stream=False)

    run(scene())


def test_a_dealer_that_sends_the_delimiter_gets_it_back(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), raw_client(endpoint) as client:
            await client.send(b"", ping_json())
            assert await client.socket.recv_multipart() == [b"", encode(PONG, Encoding.JSON)]
            await client.send(b"", b"")
            delimiter, payload = await client.socket.recv_multipart()
            assert delimiter == b""
            assert decode_reply(payload).code == "bad_encoding"  # type: ignore[union-attr]

    run(scene())


def test_a_req_that_correlates_gets_its_frame_back(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        options = {"REQ_CORRELATE": 1, "REQ_RELAXED": 1}
        async with CountingDaemon().serve(endpoint):
            async with raw_client(endpoint, zmq.REQ, **options) as client:
                await client.send(b'{"type":"generate","id":"g","prompt":"hold"}')
                for _ in range(2):
                    assert await client.ask(ping_json()) == PONG
            async with raw_client(endpoint) as client:
                await client.send(b"\0\1\2\3", b"", ping_json())
                frames = await client.socket.recv_multipart()
                assert frames == [b"\0\1\2\3", b"", encode(PONG, Encoding.JSON)]

    run(scene())


# --- messages that are refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "code", "message_id"),
    [
        ([b""], "bad_encoding", None),
        ([b"hello"], "bad_encoding", None),
        ([b"a", ping_json()], "bad_frames", None),
        ([ping_json(), b""], "bad_frames", None),
        ([b"a", b"b", ping_json()], "bad_frames", None),
        ([b"abc", b"", ping_json()], "bad_frames", None),
        ([b"x"] * 1000, "bad_frames", None),
        ([b'{"type":"ping"}'], "invalid_request", None),
        ([b'{"type":"ping","id":"1","x":1}'], "invalid_request", "1"),
        ([b'{"type":"pong","id":"1"}'], "unknown_type", "1"),
        ([b'{"type":"ping","id":"1","v":2}'], "unsupported_version", "1"),
        ([b'{"type":"ping","id":"1"'], "bad_encoding", "1"),
        ([b'{"type":"generate","id":"1","prompt":"' + b"x" * 1000 + b'"}'], "too_large", "1"),
        ([b"x" * 1001], "too_large", None),
        ([b'{"type":"stats","id":"1"}'], "forbidden", "1"),
        ([b'{"type":"list","id":"1"}'], "forbidden", "1"),
        ([b'{"type":"evict","id":"1","all":true}'], "forbidden", "1"),
        ([b'{"type":"release","id":"1","prefix_id":"p"}'], "internal", "1"),
    ],
)
def test_a_bad_message_is_answered_counted_and_costs_no_one_else_anything(
    run: Run, endpoint: str, frames: list[bytes], code: str, message_id: str | None
) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        server = daemon.serve(endpoint, limits=Limits(max_message_bytes=1000))
        async with server, raw_client(endpoint) as bad, raw_client(endpoint) as good:
            assert await good.ask(ping_json()) == PONG
            reply = await bad.ask(*frames)
            assert isinstance(reply, Error)
            assert (reply.code, reply.id, reply.retryable) == (code, message_id, False)
            assert "secret" not in reply.message
            assert await good.ask(ping_json()) == PONG
            assert await bad.ask(ping_json()) == PONG
        counters = server.counters
        is_ours = code == "internal"
        assert counters.refused == ({} if is_ours else {code: 1})
        assert counters.handler_errors == (1 if is_ours else 0)
        assert (counters.received, counters.sent, counters.dropped) == (4, 4, 0)
        (event,) = daemon.log
        assert event[0] == ("handler_failed" if is_ours else "message_refused")

    run(scene())


def test_the_encoding_of_a_refusal_follows_the_first_byte(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), raw_client(endpoint) as client:
            for payload, first in ((b"{", b"{"), (b" ", b"{"), (b"\x81", b"\x85"), (b"?", b"\x85")):
                await client.send(payload)
                (reply,) = await client.socket.recv_multipart()
                assert reply[:1] == first

    run(scene())


def test_a_frame_beyond_the_wire_limit_ends_that_connection_only(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        limits = Limits(max_message_bytes=1000, max_wire_bytes=2000)
        server = CountingDaemon().serve(endpoint, limits=limits)
        async with server, raw_client(endpoint) as bad, raw_client(endpoint) as good:
            ends = bad.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await bad.send(b"{" * 2001)
            assert await good.ask(ping_json()) == PONG
            await ends.recv_multipart()  # what is sent before is lost with the connection
            bad.socket.disable_monitor()
            ends.close()
            assert (await bad.ask(b"{" * 2000)).code == "too_large"  # type: ignore[union-attr]
        assert server.counters.refused == {"too_large": 1}

    run(scene())


def test_the_admin_socket_accepts_everything(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        server = daemon.serve(endpoint, role="admin", socket_mode=0o600)
        async with server, Client(endpoint) as client:
            assert (await client.list(limit=7)).total == 7
            assert (await client.evict(max_blocks=5)).num_blocks == 5
            assert (await client.evict(all=True)).num_blocks == 99
            assert (await client.pin("5e884898", 60, tenant="a")).expires_in_s == 60
            assert (await client.unpin("5e884898")).digest == "5e884898"
            assert (await client.explain("x")).cache == CacheReport("cold")
            assert await client.stats() == {"pool": {"num_blocks": 3}}
            assert (await client.ping()).version == "0.1.0"
        assert {ref.role for ref, _ in daemon.seen} == {"admin"}

    run(scene())


ADMIN_FRAMES = [
    GOLDEN / "request.release.2.json",  # it names a tenant
    *sorted(
        path
        for request in ADMIN_REQUESTS
        for path in GOLDEN.glob(f"request.{type_name(request)}.*.json")
    ),
]


@pytest.mark.parametrize("tenant", ["", "team-a"])
def test_users_sockets_refuse_what_is_for_administrators(
    run: Run, endpoint: str, tenant: str
) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        server = daemon.serve(endpoint, tenant=tenant)
        async with server, raw_client(endpoint) as client:
            for path in ADMIN_FRAMES:
                reply = await client.ask(path.read_bytes())
                assert isinstance(reply, Error)
                assert (reply.code, reply.retryable) == ("forbidden", False)
        assert daemon.seen == []
        assert server.counters.refused == {"forbidden": len(ADMIN_FRAMES)}

    run(scene())


def test_a_request_belongs_to_the_tenant_of_its_socket(run: Run, tmp_path: Path) -> None:
    """Two clients that chose one identity on two sockets are two clients."""

    async def scene() -> None:
        daemon = CountingDaemon()
        first = daemon.serve(f"ipc://{tmp_path}/a")
        second = daemon.serve(f"ipc://{tmp_path}/b", tenant="team-b")
        async with first, second:
            for server in (first, second):
                daemon.server = server
                async with raw_client(server.endpoint, IDENTITY=b"me") as client:
                    assert await client.ask(ping_json()) == PONG
        (one, _), (other, _) = daemon.seen
        assert (one.identity, other.identity) == (b"me", b"me")
        assert (one.tenant, other.tenant) == ("", "team-b")
        assert len({one, other}) == 2

    run(scene())


def test_a_reply_that_cannot_be_encoded_is_the_handlers_failure(run: Run, endpoint: str) -> None:
    class Broken(CountingDaemon):
        def _answer(self, client: ClientRef, message: Any) -> None:
            self.server.send(client, Stats(message.id, stats={"x": object()}))

    async def scene() -> None:
        server = Broken().serve(endpoint)
        async with server, raw_client(endpoint) as client:
            assert (await client.ask(ping_json())).code == "internal"  # type: ignore[union-attr]
        assert server.counters.handler_errors == 1

    run(scene())


# --- clients that vanish or do not read ---------------------------------------------------------


def test_a_vanished_client_is_noticed_at_the_next_send(
    run: Run, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # And not because its connection was looked at meanwhile.
    monkeypatch.setattr(attendance, "SWEEP_S", 3600.0)

    async def scene() -> None:
        daemon = CountingDaemon()
        async with daemon.serve(endpoint) as server, raw_client(endpoint) as other:
            async with raw_client(endpoint) as client:
                await client.send(b'{"type":"generate","id":"g","prompt":"hold"}')
                await daemon.until(lambda: daemon.seen)
            ref = daemon.seen[0][0]
            piece = Tokens(MessageId("g"), index=0, text="", token_ids=())
            await send_until(server, ref, piece, "unreachable")
            assert not server.send(ref, piece)
            assert daemon.gone == []
            await daemon.until(lambda: daemon.gone)
            assert daemon.gone == [ref]
            assert server.counters.unreachable == 2
            assert server.counters.clients_gone == 1
            assert await other.ask(ping_json()) == PONG
            event = {"role": "user", "tenant": "", "identity": ref.identity.hex()}
            assert ("client_gone", event) in daemon.log

    run(scene())


def test_a_client_that_does_not_read_is_noticed_and_others_feel_nothing(
    run: Run, endpoint: str
) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        server = daemon.serve(endpoint, max_queued_replies=2, parking=ParkingLimits(max_messages=8))
        lazy_client = raw_client(endpoint, RCVHWM=1)
        async with server, raw_client(endpoint) as good, lazy_client as lazy:
            await lazy.send(b'{"type":"generate","id":"g","prompt":"hold"}')
            await daemon.until(lambda: daemon.seen)
            ref = daemon.seen[0][0]
            piece = Tokens(MessageId("g"), index=0, text="x" * 65_536, token_ids=())
            await send_until(server, ref, piece, "slow_readers")
            await daemon.until(lambda: daemon.slow)
            assert daemon.slow == [ref]
            assert await good.ask(ping_json()) == PONG
            assert server.counters.slow_readers == 1
            assert server.num_parked > 0
        assert server.counters.dropped > 0

    run(scene())


def test_a_failing_callback_is_counted_and_the_server_goes_on(run: Run, endpoint: str) -> None:
    class Clumsy(CountingDaemon):
        def on_client_gone(self, client: ClientRef) -> None:
            raise RuntimeError("dropped it")

    async def scene() -> None:
        daemon = Clumsy()
        async with daemon.serve(endpoint) as server, raw_client(endpoint) as client:
            stranger = ClientRef(b"nobody", "user", Encoding.JSON, False)
            assert not server.send(stranger, Ok(MessageId("1")))
            await daemon.until(lambda: len(daemon.log) == 2)
            assert await client.ask(ping_json()) == PONG
        assert server.counters.handler_errors == 1
        assert daemon.log[1][0] == "handler_failed"
        assert daemon.log[1][1]["where"] == "on_client_gone"

    run(scene())


def test_a_failing_log_hook_stops_neither_the_reply_nor_the_receiver(
    run: Run, endpoint: str
) -> None:
    def full(event: str, fields: object) -> None:
        raise OSError("no space left")

    async def scene() -> None:
        problems: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))
        daemon = CountingDaemon()
        daemon.server = Server(endpoint, daemon, log=full)
        async with daemon.server, raw_client(endpoint) as client:
            await client.send(b"?")
            await client.send(ping_json())
            assert (await client.receive()).code == "bad_encoding"  # type: ignore[union-attr]
            assert await client.receive() == PONG
        assert [str(problem) for problem in problems] == ["no space left"]

    run(scene())


def test_a_flood_of_one_client_does_not_keep_others_waiting_for_its_end(
    run: Run, endpoint: str
) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        eager = raw_client(endpoint, SNDHWM=0, RCVHWM=0)
        async with daemon.serve(endpoint) as server, raw_client(endpoint) as good, eager as flood:
            for _ in range(1000):
                await flood.send(b"?")
            assert await good.ask(ping_json()) == PONG
            for _ in range(1000):
                assert (await flood.receive()).code == "bad_encoding"  # type: ignore[union-attr]
        assert server.counters.refused == {"bad_encoding": 1000}

    run(scene())


# --- the server's life --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_socket_file_has_its_mode_and_goes_away(run: Run, endpoint: str, mode: int) -> None:
    path = Path(endpoint.removeprefix("ipc://"))

    def mode_now() -> int | None:
        return stat.S_IMODE(path.stat().st_mode) if path.exists() else None

    async def scene() -> None:
        async with CountingDaemon().serve(endpoint, socket_mode=mode) as server:
            assert mode_now() == mode
            assert (
                repr(server) == f"<Server user {endpoint} listening: 0 received, 0 sent, 0 refused>"
            )
        assert mode_now() is None
        assert "closed" in repr(server)
        await server.close()

    run(scene())


def test_a_server_can_be_started_again_at_once(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        for _ in range(3):
            async with CountingDaemon().serve(endpoint), Client(endpoint) as client:
                assert (await client.ping()).version == "0.1.0"

    run(scene())


def test_a_second_server_on_a_path_is_refused_and_the_first_feels_nothing(
    run: Run, endpoint: str
) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), Client(endpoint) as client:
            with pytest.raises(EndpointBusy, match="already serves at"):
                await CountingDaemon().serve(endpoint).start()
            assert (await client.ping()).version == "0.1.0"

    run(scene())


def test_a_start_that_fails_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    async def scene() -> None:
        server = CountingDaemon().serve(f"ipc://{tmp_path}/no/a/s")
        with pytest.raises(EndpointError, match="there is no directory"):
            await server.start()
        await server.close()

    run(scene())
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_a_socket_the_start_fails_with_a_sentence(
    run: Run, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> zmq.Socket[bytes]:
        raise zmq.ZMQError(errno.EMFILE)

    async def scene() -> None:
        server = CountingDaemon().serve(endpoint)
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", refuse)
            with pytest.raises(EndpointError, match=r"cannot make a socket for .*: Too many open"):
                await server.start()
        async with server, Client(endpoint) as client:
            assert (await client.ping()).version == "0.1.0"

    run(scene())


def test_queued_replies_leave_before_the_server_closes(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with raw_client(endpoint) as client:
            daemon = CountingDaemon()
            async with daemon.serve(endpoint):
                await client.send(b'{"type":"generate","id":"g","prompt":"count 1000"}')
                await daemon.until(lambda: daemon.seen)
            replies = [await client.receive() for _ in range(1001)]
            assert [reply.index for reply in replies] == list(range(1001))  # type: ignore[union-attr]

    run(scene())


def test_after_close_nothing_is_sent(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        server = CountingDaemon().serve(endpoint)
        ref = ClientRef(b"x", "user", Encoding.JSON, False)
        assert not server.send(ref, Ok(MessageId("1")))
        async with server:
            pass
        assert not server.send(ref, Ok(MessageId("1")))
        assert server.counters.unreachable == server.counters.dropped == 0

    run(scene())


def test_tcp_on_loopback_with_a_port_the_system_chooses(run: Run) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve("tcp://127.0.0.1:*", insecure_tcp=True) as server:
            assert server.endpoint.removeprefix("tcp://127.0.0.1:").isdigit()
            async with Client(server.endpoint, encoding="json") as client:
                assert (await client.ping()).uptime_s == 12.5
            second = CountingDaemon().serve(server.endpoint, insecure_tcp=True)
            with pytest.raises(EndpointError, match=r"cannot listen on .* Address already in use"):
                await second.start()

    run(scene())


# --- the async client ---------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_an_answer_piece_by_piece_and_as_a_whole(run: Run, endpoint: str, encoding: str) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with daemon.serve(endpoint), Client(endpoint, encoding=encoding) as client:
            stream = client.generate("count 3", temperature=0, stop="x", logit_bias={3: 1})
            pieces = [piece async for piece in stream]
            assert pieces == [Piece(f"{n} ", (n,)) for n in range(3)]
            result = await stream.result()
            assert (result.text, result.token_ids) == ("0 1 2 ", (0, 1, 2))
            assert (result.finish_reason, result.usage.cached_tokens) == ("length", 500)
            assert await client.generate("count 3", stream=False).result() == result
            assert await client.generate("count 3").result() == result
            chat = client.chat([{"role": "user", "content": "echo"}])
            assert (await chat.result()).text == "echo"
        assert daemon.requests[0] == Generate(
            MessageId("1"),
            credit=DEFAULT_WINDOW,
            prompt="count 3",
            temperature=0,
            stop=("x",),
            logit_bias={"3": 1},
        )
        assert not any(isinstance(request, Cancel) for request in daemon.requests)

    run(scene())


def test_the_small_calls(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), Client(endpoint) as client:
            assert (await client.info()).model == "counting"
            assert await client.tokenize("x") == (1, 2)
            assert await client.tokenize(messages=[{"role": "user", "content": "x"}]) == (1, 2)
            assert (await client.register(prompt_ids=range(3))).prefix_id == "p-1"
            await client.cancel("77")
            with pytest.raises(ServerError) as caught:
                await client.release("p-1")
            assert caught.value.code == "internal"
            with pytest.raises(ServerError, match="256 requests are waiting") as caught:
                await client.generate("refuse").result()
            assert (caught.value.retryable, caught.value.retry_after_ms) == (True, 5)

    run(scene())


def test_many_answers_at_once_do_not_mix(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with CountingDaemon().serve(endpoint), Client(endpoint) as client:
            streams = [client.generate(f"count {n}") for n in range(50)]
            results = await asyncio.gather(*(stream.result() for stream in streams))
            assert [result.token_ids for result in results] == [tuple(range(n)) for n in range(50)]

    run(scene())


async def leave_the_loop(client: Client, daemon: CountingDaemon) -> None:
    async for _ in client.generate("begin"):
        break


async def leave_by_an_exception(client: Client, daemon: CountingDaemon) -> None:
    async def read() -> None:
        async for _ in client.generate("begin"):
            raise KeyError

    with pytest.raises(KeyError):
        await read()


async def close_it(client: Client, daemon: CountingDaemon) -> None:
    stream = client.generate("hold")
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(Closed):
        await stream.result()


async def cancel_the_reading_task(client: Client, daemon: CountingDaemon) -> None:
    task = asyncio.ensure_future(client.generate("hold").result())
    await daemon.until(lambda: daemon.seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def wait_too_long(client: Client, daemon: CountingDaemon) -> None:
    with pytest.raises(Timeout, match=r"within 0.01 s: either no daemon listens there .* or it is"):
        await client.generate("hold", timeout_s=0.01).result()


@pytest.mark.parametrize(
    "leave",
    [
        leave_the_loop,
        leave_by_an_exception,
        close_it,
        cancel_the_reading_task,
        wait_too_long,
    ],
)
def test_whoever_stops_reading_cancels(
    run: Run, endpoint: str, leave: Callable[[Client, CountingDaemon], Coroutine[Any, Any, None]]
) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with daemon.serve(endpoint), Client(endpoint) as client:
            await leave(client, daemon)
            await daemon.until(lambda: len(daemon.seen) == 2)
            assert daemon.requests[1] == Cancel(MessageId("2"), target=MessageId("1"))
            assert (await client.ping()).version == "0.1.0"

    run(scene())


def test_no_daemon_means_a_timeout_and_not_a_hang(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with Client(endpoint, timeout_s=0.01) as client:
            with pytest.raises(Timeout) as caught:
                await client.ping()
            assert (caught.value.endpoint, caught.value.timeout_s) == (endpoint, 0.01)

    run(scene())


def test_a_client_finds_a_restarted_daemon_by_itself(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        async with Client(endpoint) as client:
            for _ in range(2):
                async with CountingDaemon().serve(endpoint):
                    assert (await client.ping()).version == "0.1.0"

    run(scene())


def test_a_daemon_that_restarts_under_load_costs_its_callers_their_calls_only(
    run: Run, endpoint: str
) -> None:
    """Every call ends as soon as the daemon is gone, and the same clients are served again."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(endpoint)) for _ in range(5)]
            daemon = CountingDaemon()
            async with daemon.serve(endpoint):
                waiting = [
                    asyncio.ensure_future(client.generate(prompt).result())
                    for client in clients
                    for prompt in ("hold", "begin")
                ]
                await daemon.until(lambda: len(daemon.requests) >= len(waiting))
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(end) for end in ends} == {ConnectionLost}
            async with CountingDaemon().serve(endpoint):
                answers = await asyncio.gather(*(c.generate("count 2").result() for c in clients))
        assert {answer.token_ids for answer in answers} == {(0, 1)}

    run(scene())


def test_closing_a_client_ends_its_calls(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        client = Client(endpoint)
        with pytest.raises(Closed, match="async with"):
            await client.ping()
        async with client:
            waiting = asyncio.ensure_future(client.ping())
            await asyncio.sleep(0)
        with pytest.raises(Closed, match="the client was closed"):
            await waiting
        with pytest.raises(Closed):
            client.generate("x")
        client.close()

    run(scene())


def test_a_daemon_that_answers_nonsense_is_named_as_the_culprit(run: Run, endpoint: str) -> None:
    class Confused(CountingDaemon):
        def _answer(self, client: ClientRef, message: Any) -> None:
            self.server.send(client, Ok(message.id))

    async def scene() -> None:
        async with Confused().serve(endpoint), Client(endpoint) as client:
            with pytest.raises(ProtocolError, match="`ping` was answered by `ok`"):
                await client.ping()
            with pytest.raises(ProtocolError, match="expected `tokens` or `done`, got `ok`"):
                await client.generate("x").result()

    run(scene())


@pytest.mark.parametrize("endpoint", ["", "nonsense", "ipc://", "udp://x"])
def test_an_endpoint_that_is_none(run: Run, endpoint: str) -> None:
    async def scene() -> None:
        with pytest.raises(EndpointError, match="cannot connect to"):
            Client(endpoint).open()

    run(scene())


def test_msgpack_of_another_library_is_understood(run: Run, endpoint: str) -> None:
    """Field order is free, and integers may be wider than they need be."""

    async def scene() -> None:
        wide = b"\xde\x00\x03\xa1v\xcf" + (1).to_bytes(8, "big") + b"\xd9\x02id\xda\x00\x011"
        payload = wide + msgspec.msgpack.encode({"type": "ping"})[1:]
        async with CountingDaemon().serve(endpoint), raw_client(endpoint) as client:
            assert await client.ask(payload) == PONG

    run(scene())
