"""A daemon that is sent anything at all: no crash, no hang, no leak, one last reply for everything.

Two fuzzers, one daemon with both of its sockets: recorded frames with their bytes spoilt
(`tests/support/mutations.py`), and messages drawn from the protocol's own types
(`tests/support/wire_strategies.py`), so that a new message is covered as soon as it has a type.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ipc import messages as wire
from ipc.codec import Encoding, Limits, encode
from ipc.sync_client import Client
from om_models.convert import convert
from om_models.plan import ConvertOptions
from tests.support import zmtp
from tests.support.fuzz_target import Frames, FuzzClient
from tests.support.mutations import Corpus, framed, mutated
from tests.support.process_state import look_at
from tests.support.rtcached import PATIENCE_S, wait_until_idle
from tests.support.tiny import Silent
from tests.support.wire_strategies import payloads
from tools.daemon_process import DaemonProcess

#: Small enough that the longest answer there can be takes no time.
OPTIONS = ConvertOptions(
    target="sim", kv_tokens=1024, gears="prefill=32@64,256 decode=1,4,16@64,256"
)
#: So that a message beyond the limit costs little.
LIMITS = Limits(max_message_bytes=65536)
NUM_BLOCKS = 63
#: Messages of one connection between two looks at its account.
BATCH = 64
MAX_GROWTH_KIB = 24 * 1024
#: The event loop's pool for what blocks: made when needed, never more (asyncio's default).
MAX_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
#: Takes new requests again, whatever was sent before.
RESUME = encode(wire.Resume(wire.MessageId("resume")), Encoding.MSGPACK)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    bundle = tmp_path_factory.mktemp("fuzz") / "null"
    convert("null", bundle, OPTIONS, Silent())
    options = {"ipc_max_message_bytes": str(LIMITS.max_message_bytes), "cache_block_size": "16"}
    with DaemonProcess(bundle, "sim:0", **options) as running:
        yield running
        odd = [e for e in running.events if e.get("level") not in {"info", "warning"}]
        assert odd == []  # neither errors nor what libraries print


@pytest.fixture(scope="module")
def admin(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.admin_endpoint) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(admin: Client) -> Iterator[None]:
    yield
    give_up_what_is_kept(admin)
    wait_until_idle(admin)
    stats = admin.stats()
    pool, engine = stats["pool"], stats["engine"]
    assert pool["live_blocks"] == 0
    assert pool["cached_blocks"] + pool["free_blocks"] == pool["num_blocks"] == NUM_BLOCKS
    ends = ("refused", "finished", "cancelled", "expired", "failed", "registered")
    assert engine["arrived"] == sum(engine[name] for name in ends)
    assert engine["failed_steps"] == 0
    assert [stats["ipc"][role]["handler_errors"] for role in ("user", "admin")] == [0, 0]


def give_up_what_is_kept(admin: Client) -> None:
    for entry in admin.list(limit=1000).entries:
        if entry.prefix_id is not None:
            admin.release(entry.prefix_id)
        elif entry.kept:
            admin.unpin(entry.digest)


class Fuzzer:
    """Sends spoilt frames to both sockets of a daemon.

    Attributes:
        num_sent: messages so far.
    """

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self._chance = random.Random(seed)
        self._corpus = Corpus()
        self._clients = [
            FuzzClient(endpoint, LIMITS) for endpoint in (daemon.endpoint, daemon.admin_endpoint)
        ]
        self.num_sent = 0

    def run(self, num_frames: int) -> None:
        """Send about so many frames; every reply is accounted for."""
        until = self.num_sent + num_frames
        while self.num_sent < until:
            for client in self._clients:
                batch = [self._message() for _ in range(BATCH)]
                for message in batch:
                    client.send(message)
                client.settle(batch)
                self.num_sent += len(batch)
            self._resume()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _resume(self) -> None:
        """A `drain` may have been among what was sent; what follows is not to be refused."""
        _, operator = self._clients
        operator.send([RESUME])
        operator.settle()

    def _message(self) -> Frames:
        payload = mutated(self._chance, self._corpus)
        return framed(self._chance, payload, self._corpus)


# --- spoilt bytes ---------------------------------------------------------------------------------


def spoil(daemon: DaemonProcess, admin: Client, warm_up: int, num_frames: int, seed: int) -> None:
    """Frames until everything has its size, then those that may leave nothing behind."""
    fuzzer = Fuzzer(daemon, seed)
    fuzzer.run(warm_up)
    give_up_what_is_kept(admin)
    before = look_at(daemon.process.pid)
    fuzzer.run(num_frames)
    fuzzer.close()
    wait_until_idle(admin)
    after = look_at(daemon.process.pid)
    assert after.resident_kib < before.resident_kib + MAX_GROWTH_KIB
    assert after.num_fds <= before.num_fds
    assert after.num_threads <= before.num_threads + MAX_POOL_THREADS


def test_recorded_frames_spoilt(daemon: DaemonProcess, admin: Client):
    spoil(daemon, admin, warm_up=600, num_frames=2000, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_100_000_recorded_frames_spoilt(daemon: DaemonProcess, admin: Client):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    spoil(daemon, admin, warm_up=20_000, num_frames=100_000, seed=seed)


# --- spoilt streams -------------------------------------------------------------------------------


@contextlib.contextmanager
def hand_written(daemon: DaemonProcess) -> Iterator[socket.socket]:
    """A connection without libzmq on this side; at the end the daemon's side has hung up, too."""
    with socket.socket(socket.AF_UNIX) as wire_end:
        wire_end.settimeout(PATIENCE_S)
        wire_end.connect(str(daemon.socket))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            yield wire_end
            wire_end.shutdown(socket.SHUT_WR)
            while wire_end.recv(65536):
                pass


def spoilt(chance: random.Random, stream: bytes, heads: Sequence[int]) -> bytes:
    """Up to three bytes have other values, those at `heads` most often; or the end is missing."""
    changed = bytearray(stream)
    for _ in range(chance.randint(0, 3)):
        at = chance.choice((*heads, chance.randrange(len(changed))))
        changed[at] = chance.choice((0, 1, 2, 4, 7, 127, 255, chance.randrange(256)))
    return bytes(changed[: chance.choice((None, None, chance.randrange(len(changed))))])


def spoil_streams(daemon: DaemonProcess, admin: Client, num_streams: int, seed: int) -> None:
    """Hand-written connections with spoilt bytes: lengths, flags and commands of ZMTP included."""
    chance, corpus = random.Random(seed), Corpus()
    num_fds = look_at(daemon.process.pid).num_fds
    for number in range(num_streams):
        # Each its own: libzmq does not hear who comes under a name that it has not let go of yet.
        name = chance.choice((b"", b"me%d" % number, b"\0" + number.to_bytes(4, "big")))
        with hand_written(daemon) as wire_end:
            if chance.random() < 0.3:
                wire_end.sendall(spoilt(chance, zmtp.handshake(name), heads=(10, 12, 64, 66)))
                continue
            zmtp.shake_hands(wire_end, name)
            frames = (b"", chance.choice(corpus.requests), mutated(chance, corpus))
            stream = zmtp.message(frames[:2]) + zmtp.message(frames[2:])
            wire_end.sendall(spoilt(chance, stream, heads=(0, 1, 2, 3)))
    wait_until_idle(admin)
    assert look_at(daemon.process.pid).num_fds <= num_fds


def test_a_hand_written_client_is_a_client(daemon: DaemonProcess):
    with hand_written(daemon) as wire_end:
        zmtp.shake_hands(wire_end)
        wire_end.sendall(zmtp.message([b'{"type":"ping","id":"1"}']))
        assert b'{"type":"pong","id":"1"' in wire_end.recv(4096)


def test_streams_spoilt(daemon: DaemonProcess, admin: Client):
    spoil_streams(daemon, admin, num_streams=200, seed=1)


@pytest.mark.long
def test_5_000_streams_spoilt(daemon: DaemonProcess, admin: Client):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    spoil_streams(daemon, admin, num_streams=5000, seed=seed)


def test_a_frame_beyond_what_the_wire_carries_costs_its_connection_only(
    daemon: DaemonProcess, admin: Client
):
    with FuzzClient(daemon.endpoint, LIMITS) as neighbour:
        neighbour.settle()
        before = look_at(daemon.process.pid)
        for length in (LIMITS.max_wire_bytes + 1, 2**63 - 1, 2**64 - 1):
            with hand_written(daemon) as wire_end:
                zmtp.shake_hands(wire_end)
                wire_end.sendall(b"\x02" + length.to_bytes(8, "big") + b"x" * 1000)
        neighbour.settle()
        assert look_at(daemon.process.pid).resident_kib < before.resident_kib + 8 * 1024


# --- messages of every type -----------------------------------------------------------------------

#: What must be answered in three ways, whatever else is drawn.
CERTAIN = [
    (
        False,
        encode(wire.Generate(id=wire.MessageId("g"), prompt_ids=(1,), max_tokens=2), Encoding.JSON),
    ),
    (True, encode(wire.Ping(id=wire.MessageId("p")), Encoding.MSGPACK)),
    (False, b'{"type":"ping","id":"x","spelt":"wrong"}'),
]
MESSAGES = st.lists(st.tuples(st.booleans(), payloads()), min_size=1, max_size=12)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(QUICK, max_examples=2000, derandomize=False, print_blob=True)


def draw_messages(daemon: DaemonProcess, limit: settings) -> Counter[str]:
    """Send messages drawn from their types to both sockets; what kinds of replies came."""
    kinds: Counter[str] = Counter()

    @limit
    @given(MESSAGES)
    @example(CERTAIN)
    def send(drawn: list[tuple[bool, bytes]]) -> None:
        messages = [[b"", text] if is_delimited else [text] for is_delimited, text in drawn]
        for endpoint in (daemon.endpoint, daemon.admin_endpoint):
            with FuzzClient(endpoint, LIMITS) as client:
                for message in messages:
                    client.send(message)
                client.send([RESUME])
                client.settle(messages)
                kinds.update(client.account.kinds)

    send()
    return kinds


def test_messages_of_every_type(daemon: DaemonProcess):
    kinds = draw_messages(daemon, QUICK)
    assert {"done", "pong", "error invalid_request"} <= set(kinds)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_10_000_messages_of_every_type(daemon: DaemonProcess):
    draw_messages(daemon, LONG)
