"""Clients that go without a word, or do not read, through real sockets.

Nothing is sent to them meanwhile: it is the connection that is looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from ipc.client import Client
from ipc.messages import Done, MessageId, Tokens
from ipc.outbox import ParkingLimits
from om_models.bundle import Bundle
from tests.sim.test_ipc_server import PONG, ping_json, raw_client
from tests.support.house import House, is_decode, is_prefill, open_house
from tests.support.ipc_daemon import CountingDaemon

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

LONG = "a" * 99
#: Longer than anything here takes; only a hanging test reaches it [seconds].
PATIENCE_S = 20.0


@pytest.fixture
async def house(tiny_bundle: Bundle, tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tiny_bundle, tmp_path, max_running=1) as house:
        yield house


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
@pytest.mark.parametrize("is_stop", [is_prefill(0), is_decode(110)], ids=["prefill", "decode"])
async def test_who_waits_for_one_message_is_missed_too(
    house: House, kind: int, is_stop: object
) -> None:
    house.pause_at(is_stop)  # type: ignore[arg-type]
    request = {"type": "generate", "id": "g", "prompt": LONG, "ignore_eos": True, "stream": False}
    async with raw_client(house.server.endpoint, kind) as doomed:
        await doomed.send(json.dumps(request).encode())
        await house.paused()
    await until_unfinished(house, 0)
    assert house.server.counters.sent == house.server.counters.unreachable == 0
    house.resume()
    async with Client(house.server.endpoint) as client:
        await house.check(client)


async def until_unfinished(house: House, number: int) -> None:
    """Wait until the service has so few requests."""

    async def poll() -> None:
        while house.service.num_unfinished != number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), PATIENCE_S)


async def test_a_client_that_comes_back_under_its_name_is_another_one(tmp_path: Path) -> None:
    daemon = CountingDaemon()
    endpoint = f"ipc://{tmp_path}/s"
    async with daemon.serve(endpoint) as server:
        async with raw_client(endpoint, ROUTING_ID=b"me") as first:
            await first.send(b'{"type":"generate","id":"g","prompt":"hold"}')
            await daemon.until(lambda: daemon.seen)
        # Before that libzmq would not let anybody else have the name.
        await daemon.until(lambda: daemon.gone)
        async with raw_client(endpoint, ROUTING_ID=b"me") as second:
            assert await second.ask(ping_json()) == PONG
            assert (len(daemon.gone), server.num_connections) == (1, 1)
            assert [ref.identity for ref, _ in daemon.seen] == [b"me", b"me"]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_connections_are_forgotten_when_they_end(tmp_path: Path, transport: str) -> None:
    daemon = CountingDaemon()
    address = f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:*"
    server = daemon.serve(address, insecure_tcp=True)
    async with server, raw_client(server.endpoint) as stays:
        assert await stays.ask(ping_json()) == PONG
        for _ in range(5):
            async with raw_client(server.endpoint) as goes:
                assert await goes.ask(ping_json()) == PONG
        await daemon.until(lambda: len(daemon.gone) == 5)
        assert server.num_connections == 1
        assert await stays.ask(ping_json()) == PONG
        assert server.counters.clients_gone == 5


async def test_a_slow_reader_loses_nothing_and_a_fast_one_feels_nothing(tmp_path: Path) -> None:
    daemon = CountingDaemon()
    endpoint = f"ipc://{tmp_path}/s"
    parking = ParkingLimits(max_messages=500)
    server = daemon.serve(endpoint, max_queued_replies=2, parking=parking)
    async with server, raw_client(endpoint, RCVHWM=1) as slow, raw_client(endpoint) as fast:
        for client in (slow, fast):
            await client.send(b'{"type":"generate","id":"g","prompt":"hold"}')
        await daemon.until(lambda: len(daemon.seen) == 2)
        refs = [ref for ref, _ in daemon.seen]
        for index in range(300):
            text = str(index) * 1000
            for ref in refs:
                piece = Tokens(MessageId("g"), index=index, text=text, token_ids=(index,))
                assert server.send(ref, piece)
            if index % 50 == 0:
                assert isinstance(await fast.receive(), Tokens)
        assert server.num_parked > 0
        assert await indices(fast, 294) == list(range(6, 300))
        assert await indices(slow, 300) == list(range(300))
        assert server.num_parked == 0
        assert (daemon.slow, server.counters.dropped) == ([], 0)


async def indices(client: object, number: int) -> list[int]:
    """Of the next so many pieces."""
    found = []
    for _ in range(number):
        piece = await client.receive()  # type: ignore[attr-defined]
        assert isinstance(piece, Tokens)
        found.append(piece.index)
    return found


async def test_a_slow_readers_answer_ends_once_and_without_a_hole(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    async with (
        open_house(
            tiny_bundle,
            tmp_path,
            max_queued_replies=1,
            parking=ParkingLimits(max_messages=5),
        ) as house,
        Client(house.server.endpoint) as client,
        raw_client(house.server.endpoint, RCVHWM=1) as lazy,
    ):
        request = {"type": "generate", "id": "g", "prompt": LONG, "ignore_eos": True}
        await lazy.send(json.dumps(request).encode())
        house.pause_at(is_decode(101))
        await house.paused()
        await fill(house)
        house.resume()
        await until_unfinished(house, 0)
        answer = [reply async for reply in replies_to(lazy, "g")]
        *pieces, done = answer
        assert isinstance(done, Done)
        assert done.finish_reason == "slow_reader"
        counts = [len(piece.token_ids) for piece in pieces]
        expected = [sum(counts[:number]) for number in range(len(counts) + 1)]
        assert [reply.index for reply in answer] == expected
        assert done.usage.completion_tokens == sum(counts) + len(done.token_ids) < 28
        await house.check(client)


async def fill(house: House) -> None:
    """Fill the queues of libzmq, of both sides, and the kernel's: what is sent then is parked.

    The other side's may be slow to take what it has room for.
    """
    filler = Tokens(MessageId("filler"), index=0, text="x" * 65_536, token_ids=())
    is_full = False
    while not is_full:
        while not house.server.num_parked:
            house.server.send(house.seen[0], filler)
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        is_full = house.server.num_parked > 0


async def replies_to(client: object, message_id: str) -> AsyncIterator[Tokens | Done]:
    """Those to one request, to its end."""
    while True:
        reply = await client.receive()  # type: ignore[attr-defined]
        if reply.id == message_id:
            yield reply
        if isinstance(reply, Done):
            return


async def test_large_messages_that_nobody_reads_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    daemon = CountingDaemon()
    endpoint = f"ipc://{tmp_path}/s"
    server = daemon.serve(endpoint)
    async with server, raw_client(endpoint, RCVHWM=1) as lazy, raw_client(endpoint) as good:
        await lazy.send(b'{"type":"generate","id":"g","prompt":"hold"}')
        await daemon.until(lambda: daemon.seen)
        ref = daemon.seen[0][0]
        piece = Tokens(MessageId("g"), index=0, text="x" * 262_144, token_ids=())
        num_kept = 0
        while server.send(ref, piece):
            num_kept += 1
            await asyncio.sleep(0)
        # Eight MiB in libzmq, as much parked, and a little in the kernel and the client's socket.
        assert 60 <= num_kept <= 80
        assert await good.ask(ping_json()) == PONG
        for _ in range(num_kept):
            assert await lazy.receive() == piece
        assert server.num_parked == 0
        assert server.send(ref, piece)
        assert await lazy.receive() == piece
