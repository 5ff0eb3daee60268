"""The socket: round trips, and tokens per second of many streamed answers at once.

A real `rtcached` process with the do-nothing model, a client in this process.
First pings, one after the other, then --streams answers at once, of which every
token is counted by its index. The ceiling, in the same run: a bare pyzmq ROUTER
in the daemon's place, which answers with as many messages, of the same sizes,
that were encoded beforehand, to the same reader.
Aims: a round trip of 300 µs (median), 50 000 tokens per second.

On a machine of two cores daemon and client take one each; `daemon_us_per_token`
and `client_us_per_token` are processor time, all threads together.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console
from rich.table import Table

from ipc.codec import Encoding, decode_reply, encode
from ipc.messages import Ping, Pong
from ipc.sync_client import Client
from runtime_cache.errors import InternalError
from tools.bench.bare_router import PING_ID, bare_router
from tools.bench.stage import cpu_s, median, null_bundle, percentile, positive, spread
from tools.bench.streams import PATIENCE_S, connected, requests
from tools.daemon_process import DaemonProcess

#: Pings before those that are timed.
_WARM_UP = 200


@dataclass(slots=True)
class Measured:
    """One series of each figure, a value a run."""

    rtt_p50_us: list[float] = field(default_factory=list)
    rtt_p99_us: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    client_rtt_p50_us: list[float] = field(default_factory=list)
    ceiling_rtt_p50_us: list[float] = field(default_factory=list)
    ceiling_rtt_p99_us: list[float] = field(default_factory=list)
    ceiling_tokens_per_s: list[float] = field(default_factory=list)
    daemon_us_per_token: list[float] = field(default_factory=list)
    client_us_per_token: list[float] = field(default_factory=list)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--device", default="sim:0", help="device (sim:0)")
    parser.add_argument("--runs", type=positive, default=5, help="runs of each (5)")
    parser.add_argument("--pings", type=positive, default=2000, help="round trips a run (2000)")
    parser.add_argument("--streams", type=positive, default=512, help="answers at once (512)")
    parser.add_argument("--tokens", type=positive, default=200, help="tokens an answer (200)")
    parser.add_argument("--connections", type=positive, default=8, help="client sockets (8)")


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; see the module for what the keys mean."""
    measured = Measured()
    with (
        _bundle(args, out) as bundle,
        _private_endpoint() as bare_endpoint,
        DaemonProcess(bundle, args.device) as daemon,
        bare_router(bare_endpoint, args.streams),
    ):
        bench = _IpcBench(daemon, bare_endpoint, args, measured)
        with out.status("measuring"):
            bench.warm_up()
            for number in range(args.runs):
                bench.run(number)
    _show(measured, out)
    result: dict[str, Any] = {
        "device": args.device,
        "bundle": "null",
        "runs": args.runs,
        "streams": args.streams,
        "connections": args.connections,
        "peer": f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}: a bare ROUTER",
    }
    result |= {name: median(getattr(measured, name)) for name in Measured.__slots__}
    return result


def _show(measured: Measured, out: Console) -> None:
    table = Table("", "min … median … max")
    for name in Measured.__slots__:
        table.add_row(name, spread(getattr(measured, name)))
    out.print(table)


def rate(turns: Iterable[int], clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second, from the first to the last.

    Args:
        turns: how many have come, one turn of reading after the other. If all come in one, on a
            machine that is busy with other things, reading them is what is measured.
    """
    start_s = clock()
    came: list[tuple[float, int]] = [(clock(), num_new) for num_new in turns if num_new]
    (first_s, num_first), num_tokens = came[0], sum(num_new for _, num_new in came)
    if len(came) == 1:
        return num_tokens / (first_s - start_s)
    return (num_tokens - num_first) / (came[-1][0] - first_s)


@contextmanager
def _bundle(args: argparse.Namespace, out: Console) -> Iterator[Path]:
    """The do-nothing model, with room for all answers in one step."""
    context = 64
    while context < args.tokens + 1:
        context *= 2
    blocks_tokens = args.streams * (args.tokens + 64) + context + 256
    kv_tokens = -(-blocks_tokens // 64) * 64
    with null_bundle(
        out, kv_tokens=kv_tokens, context=max(context, 128), max_batch=args.streams
    ) as path:
        yield path


@contextmanager
def _private_endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rtcache-") as directory:
        yield f"ipc://{directory}/bare.sock"


class _IpcBench:
    """A daemon and a bare router, measured in turn."""

    def __init__(
        self, daemon: DaemonProcess, bare_endpoint: str, args: argparse.Namespace, out: Measured
    ) -> None:
        self._daemon = daemon
        self._bare_endpoint = bare_endpoint
        self._args = args
        self._out = out

    def warm_up(self) -> None:
        """A run that does not count."""
        kept, self._out = self._out, Measured()
        self.run(-1)
        self._out = kept

    def run(self, number: int) -> None:
        """Measure everything once."""
        out, num_pings = self._out, self._args.pings
        bare_us = _raw_round_trips(self._bare_endpoint, num_pings)
        out.ceiling_rtt_p50_us.append(percentile(bare_us, 50))
        out.ceiling_rtt_p99_us.append(percentile(bare_us, 99))
        raw_us = _raw_round_trips(self._daemon.endpoint, num_pings)
        out.rtt_p50_us.append(percentile(raw_us, 50))
        out.rtt_p99_us.append(percentile(raw_us, 99))
        out.client_rtt_p50_us.append(percentile(self._client_round_trips(), 50))
        out.ceiling_tokens_per_s.append(self._stream(self._bare_endpoint, number))
        self._stream_from_daemon(number)

    def _stream_from_daemon(self, number: int) -> None:
        process_id = self._daemon.process.pid
        before = cpu_s(process_id), time.process_time()
        self._out.tokens_per_s.append(self._stream(self._daemon.endpoint, number))
        num_tokens = self._args.streams * self._args.tokens
        daemon_s, client_s = cpu_s(process_id) - before[0], time.process_time() - before[1]
        self._out.daemon_us_per_token.append(daemon_s / num_tokens * 1e6)
        self._out.client_us_per_token.append(client_s / num_tokens * 1e6)

    def _stream(self, endpoint: str, number: int) -> float:
        """Tokens per second, from the first token to the last."""
        args = self._args
        with connected(endpoint, min(args.connections, args.streams)) as streams:
            streams.ask(requests(args.streams, args.tokens, number))
            per_s = rate(streams.read())
            if streams.num_tokens != args.streams * args.tokens:
                raise InternalError(f"{streams.num_tokens} tokens have come in all")
            return per_s

    def _client_round_trips(self) -> list[float]:
        """Microseconds of each ping of the client library."""
        with Client(self._daemon.endpoint) as client:
            return _timed(client.ping, self._args.pings)


def _raw_round_trips(endpoint: str, num_pings: int) -> list[float]:
    """Microseconds of each ping, encoded and decoded, over a bare DEALER."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.connect(endpoint)
        return _timed(partial(_ping, socket), num_pings)
    except zmq.Again:
        raise InternalError(f"{endpoint} does not answer a ping") from None
    finally:
        context.destroy(linger=0)


def _ping(socket: zmq.Socket[bytes]) -> None:
    socket.send(encode(Ping(PING_ID), Encoding.MSGPACK))
    answer = decode_reply(socket.recv())
    if not isinstance(answer, Pong):
        raise InternalError(f"a ping was answered by {answer}")


def _timed(call: Callable[[], object], num_calls: int) -> list[float]:
    """Microseconds of each call, after some that are not timed."""
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(num_calls):
        start_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - start_s) * 1e6)
    return times
