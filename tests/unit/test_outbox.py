"""Replies for clients that do not read: in order, without holes, and within bounds; no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import zmq

from ipc import outbox as outbox_module
from ipc.codec import Encoding
from ipc.handler import ClientRef, Counters
from ipc.in_flight import MAX_BYTES
from ipc.outbox import Outbox, ParkingLimits
from ipc.pump import Pump

LAZY = ClientRef(b"lazy", "user", Encoding.JSON, is_delimited=False)
GOOD = ClientRef(b"good", "user", Encoding.JSON, is_delimited=False)
LIMITS = ParkingLimits(max_messages=4, max_bytes=100, max_total_bytes=120)


class Held:
    """A large message that libzmq never lets go of."""

    done = False


class FakePump:
    """Takes messages for those that have room.

    Attributes:
        taken: identity and payload of each.
        room: identity → messages it takes; any number if it is not named.
        gone: identities that are not there.
        num_refused: how often there was no room.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, bytes]] = []
        self.room: dict[bytes, int] = {}
        self.gone: set[bytes] = set()
        self.num_refused = 0
        self._changed = asyncio.Event()

    async def until_taken(self, number: int) -> None:
        while len(self.taken) < number:
            self._changed.clear()
            await self._changed.wait()

    async def until_refused(self, number: int) -> None:
        while self.num_refused < number:
            self._changed.clear()
            await self._changed.wait()

    def send(self, frames: Sequence[bytes]) -> None:
        identity = frames[0]
        if identity in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self.room.get(identity, 1) <= 0:
            self.num_refused += 1
            self._changed.set()
            raise zmq.Again
        if identity in self.room:
            self.room[identity] -= 1
        self.taken.append((identity, frames[-1]))
        self._changed.set()

    def send_tracked(self, frames: Sequence[bytes]) -> Held:
        self.send(frames)
        return Held()


class Rig:
    """An outbox and what it told.

    Attributes:
        slow: each time a client was said to be slow, and whether it was new.
        gone: each time a client was said to have gone.
    """

    def __init__(self, limits: ParkingLimits = LIMITS) -> None:
        self.pump = FakePump()
        self.counters = Counters()
        self.slow: list[tuple[ClientRef, bool]] = []
        self.gone: list[ClientRef] = []
        self.outbox = Outbox(
            cast("Pump", self.pump),
            self.counters,
            on_gone=self.gone.append,
            on_slow=lambda client, is_new: self.slow.append((client, is_new)),
            limits=limits,
        )

    def send(self, *payloads: bytes, client: ClientRef = LAZY) -> list[bool]:
        return [self.outbox.send(client, (client.identity, payload)) for payload in payloads]

    def taken(self, client: ClientRef = LAZY) -> list[bytes]:
        return [payload for identity, payload in self.pump.taken if identity == client.identity]


def payloads(number: int, num_bytes: int = 1) -> list[bytes]:
    return [bytes([65 + index]) * num_bytes for index in range(number)]


@pytest.fixture
async def rig() -> Any:
    rig = Rig()
    rig.pump.room[LAZY.identity] = 0
    yield rig
    rig.outbox.stop()


async def test_a_client_that_reads_on_loses_nothing_and_is_not_slow(rig: Rig) -> None:
    assert rig.send(*payloads(4)) == [True] * 4
    assert (rig.outbox.num_parked, rig.taken(), rig.slow) == (4, [], [])
    rig.pump.room[LAZY.identity] = 99
    await rig.outbox.drain(10)
    assert (rig.outbox.num_parked, rig.taken()) == (0, payloads(4))
    assert (rig.counters.parked, rig.counters.slow_readers, rig.counters.dropped) == (4, 0, 0)


async def test_what_is_parked_goes_before_what_is_sent_later(rig: Rig) -> None:
    rig.send(*payloads(2))
    rig.pump.room[LAZY.identity] = 1
    rig.send(b"C")
    assert rig.taken() == [b"A"]
    rig.pump.room[LAZY.identity] = 9
    rig.send(b"D")
    assert rig.taken() == payloads(4)
    assert rig.outbox.num_parked == 0


@pytest.mark.parametrize(
    ("number", "num_slow", "num_dropped"), [(4, 0, 0), (5, 1, 0), (8, 4, 0), (9, 5, 1)]
)
async def test_bounds_of_messages(rig: Rig, number: int, num_slow: int, num_dropped: int) -> None:
    sent = rig.send(*payloads(number))
    assert sent == [True] * (number - num_dropped) + [False] * num_dropped
    assert [is_new for _, is_new in rig.slow] == [True, *[False] * 9][:num_slow]
    assert rig.counters.dropped == num_dropped
    assert rig.counters.slow_readers == min(1, num_slow)


@pytest.mark.parametrize(
    ("sizes", "is_slow", "is_dropped"),
    [
        ([46, 46], False, False),  # with the identity's four bytes, a hundred
        ([46, 47], True, False),
        ([46, 50, 46, 42], True, False),
        ([46, 50, 46, 43], True, True),
        ([196], True, False),
        ([197], True, True),
    ],
)
async def test_bounds_of_bytes(sizes: list[int], is_slow: bool, is_dropped: bool) -> None:
    rig = Rig(ParkingLimits(max_messages=9, max_bytes=100, max_total_bytes=10_000))
    rig.pump.room[LAZY.identity] = 0
    sent = rig.send(*(b"x" * size for size in sizes))
    assert (bool(rig.slow), sent[-1]) == (is_slow, not is_dropped)
    rig.outbox.stop()


async def test_the_bound_for_all_together(rig: Rig) -> None:
    rig.pump.room[GOOD.identity] = 0
    rig.send(b"x" * 96)
    rig.send(b"x" * 16, client=GOOD)
    assert rig.slow == []
    rig.send(b"", client=GOOD)
    assert rig.slow == [(GOOD, True)]
    rig.outbox.forget(LAZY.identity)
    assert rig.send(b"x" * 50, client=GOOD) == [True]


async def test_others_are_sent_to_at_once(rig: Rig) -> None:
    rig.send(*payloads(9))
    assert rig.send(*payloads(3), client=GOOD) == [True] * 3
    assert rig.taken(GOOD) == payloads(3)
    assert rig.counters.sent == 3
    assert all(client == LAZY for client, _ in rig.slow)


async def test_who_reads_nothing_for_long_is_slow(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "PATIENCE_S", 0.0)
    rig.send(b"A")
    await rig.outbox.drain(0.01)
    assert rig.slow == [(LAZY, True)]
    await rig.outbox.drain(0.01)
    assert rig.slow == [(LAZY, True)]


async def test_who_has_read_everything_begins_anew(rig: Rig) -> None:
    rig.send(*payloads(5))
    assert rig.slow == [(LAZY, True)]
    rig.pump.room[LAZY.identity] = 5
    await rig.outbox.drain(10)
    rig.send(*payloads(4))
    assert (rig.outbox.num_parked, rig.slow) == (4, [(LAZY, True)])
    rig.send(b"E")
    assert rig.slow == [(LAZY, True), (LAZY, True)]


@pytest.mark.parametrize("num_refused", [0, 6])
async def test_what_is_parked_goes_by_itself_when_there_is_room(rig: Rig, num_refused: int) -> None:
    rig.send(*payloads(3))
    await asyncio.wait_for(rig.pump.until_refused(num_refused), 10)
    rig.pump.room[LAZY.identity] = 9
    await asyncio.wait_for(rig.pump.until_taken(3), 10)
    assert (rig.taken(), rig.outbox.num_parked) == (payloads(3), 0)


async def test_what_waits_for_a_client_that_has_gone_is_dropped(rig: Rig) -> None:
    rig.send(*payloads(3))
    rig.pump.gone.add(LAZY.identity)
    assert rig.send(b"D") == [False]
    assert (rig.outbox.num_parked, rig.counters.dropped) == (0, 3)
    assert set(rig.gone) == {LAZY}
    assert rig.slow == []


async def test_what_is_sent_to_nobody_is_counted(rig: Rig) -> None:
    rig.pump.gone.add(GOOD.identity)
    assert rig.send(b"A", client=GOOD) == [False]
    assert (rig.counters.sent, rig.counters.unreachable, rig.gone) == (0, 1, [GOOD])


async def test_large_messages_of_who_has_gone_do_not_count_against_the_next() -> None:
    """Neither here nor in memory: what libzmq held of them is forgotten."""
    rig = Rig(ParkingLimits())
    large = b"x" * (MAX_BYTES // 2 + 1)
    assert rig.send(large, client=GOOD) == [True]
    rig.outbox.forget(GOOD.identity)
    assert rig.send(large, client=GOOD) == [True]
    assert rig.outbox.num_parked == 0
    rig.send(b"y" * (MAX_BYTES // 2), client=GOOD)
    assert rig.outbox.num_parked == 1
    rig.outbox.stop()


async def test_a_stop_drops_what_waits(rig: Rig) -> None:
    rig.send(*payloads(3))
    rig.outbox.stop()
    rig.outbox.stop()
    assert (rig.outbox.num_parked, rig.counters.dropped) == (0, 3)
