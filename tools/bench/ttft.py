"""Time to the first token, cold and after a prefix hit, through the daemon and on the device alone.

A prompt of 500 + 50 tokens: first with an empty cache, then once more with the
same 500 and other 50. Through a real `rtcached` process and its ZeroMQ socket,
and in the same run as the ceiling the device steps of the same two prefills
with nothing around them. The cache should keep at least nine tenths of the
device's own ratio.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from ipc.sync_client import Client
from runtime_cache.engine.commands import FinishRequest, RunStep
from runtime_cache.engine.events import RequestArrived, StepDone
from runtime_cache.engine.request import NewRequest, SamplingParams, TokenArray
from runtime_cache.errors import InternalError
from runtime_cache.ids import RequestId
from runtime_cache.runtime import Runtime
from tools.bench.plot import latency_plot, require_matplotlib
from tools.bench.stage import bench_config, median, positive, spread
from tools.daemon_process import DaemonProcess


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument(
        "--bundle",
        type=Path,
        default=Path(".models/smollm2"),
        help="bundle to serve (the one `make demo` makes)",
    )
    parser.add_argument("--device", default="sim:0", help="device (sim:0)")
    parser.add_argument("--runs", type=positive, default=5, help="cold and hit pairs (5)")
    parser.add_argument(
        "--shared-tokens", type=positive, default=500, help="prompt tokens that both have (500)"
    )
    parser.add_argument(
        "--own-tokens", type=positive, default=50, help="prompt tokens of each one's own (50)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it too (.png or .svg)")


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; see the module for the keys' meaning."""
    if args.plot:
        require_matplotlib()
    with DaemonProcess(args.bundle, args.device) as daemon:
        rows = uvloop.run(_measure(daemon, args, out))
    times = {name: [row[name] for row in rows] for name in rows[0]}
    result: dict[str, Any] = {
        "device": args.device,
        "bundle": str(args.bundle),
        "runs": args.runs,
        **{name: median(values) for name, values in times.items()},
    }
    result["daemon_ratio"] = round(result["cold_ttft_ms"] / result["hit_ttft_ms"], 3)
    result["device_ratio"] = round(result["device_cold_ms"] / result["device_hit_ms"], 3)
    result["kept"] = round(result["daemon_ratio"] / result["device_ratio"], 3)
    _show(times, result, out)
    if args.plot:
        _draw(args, times)
    return result


def _show(times: dict[str, list[float]], result: dict[str, Any], out: Console) -> None:
    table = Table("", "min … median … max")
    for name, values in times.items():
        table.add_row(name, spread(values))
    out.print(table)
    out.print(
        f"a hit is {result['daemon_ratio']} times faster through the daemon, "
        f"{result['device_ratio']} times on the device alone: {result['kept']:.0%} of it are kept"
    )


def _draw(args: argparse.Namespace, times: dict[str, list[float]]) -> None:
    title = f"Prefill of {args.shared_tokens} + {args.own_tokens} tokens on {args.device}"
    roads = {
        name: {"through the daemon": times[f"{name}_ttft_ms"], "device": times[f"device_{name}_ms"]}
        for name in ("cold", "hit")
    }
    latency_plot(args.plot, title, roads)


async def _measure(
    daemon: DaemonProcess, args: argparse.Namespace, out: Console
) -> list[dict[str, float]]:
    runtime = await Runtime.open(bench_config(args.bundle, args.device))
    try:
        with (
            Client(daemon.endpoint, timeout_s=300) as client,
            Client(daemon.admin_endpoint, timeout_s=30) as admin,
        ):
            bench = _TtftBench(runtime, client, admin, args.shared_tokens, args.own_tokens)
            await bench.row()  # warm-up
            rows = []
            for number in range(args.runs):
                with out.status(f"measuring, pair {number + 1} of {args.runs}"):
                    rows.append(await bench.row())
    finally:
        await runtime.close()
    return rows


class _TtftBench:
    """Cold and hit, through the daemon and on a device of our own, one after the other."""

    def __init__(
        self, runtime: Runtime, client: Client, admin: Client, num_shared: int, num_own: int
    ) -> None:
        self._runtime = runtime
        self._client = client
        self._admin = admin
        self._num_shared = num_shared
        self._num_own = num_own
        self._random = np.random.default_rng(0)
        self._next_id = 1

    async def row(self) -> dict[str, float]:
        """One cold and one hit prefill, each measured on both roads."""
        shared = self._tokens(self._num_shared)
        cold = np.concatenate([shared, self._tokens(self._num_own)])
        hit = np.concatenate([shared, self._tokens(self._num_own)])
        self._admin.evict(all=True)
        self._runtime.engine.evict(None)
        row: dict[str, float] = {}
        # Road by road, so that each hit comes right after its cold prefill: a process that has
        # waited for the other one's turn is slower at first.
        for name, prompt in (("cold", cold), ("hit", hit)):
            row[f"{name}_ttft_ms"], row[f"prefilled_{name}"] = self._through_daemon(prompt)
        for name, prompt in (("cold", cold), ("hit", hit)):
            row[f"device_{name}_ms"] = await self._on_device(prompt)
        return row

    def _through_daemon(self, prompt: TokenArray) -> tuple[float, int]:
        """(milliseconds to the first token, token rows the device appended for the prompt)."""
        before = self._appended()
        start_s = time.perf_counter()
        answer = self._client.generate(prompt_ids=prompt.tolist(), max_tokens=1, temperature=0)
        pieces = iter(answer)
        next(pieces)
        ttft_ms = (time.perf_counter() - start_s) * 1000
        deque(pieces, maxlen=0)  # to the end, so that nothing of this request is left running
        return ttft_ms, self._appended() - before

    def _appended(self) -> int:
        return int(self._admin.stats()["device"]["prefill"]["rows_appended"])

    async def _on_device(self, prompt: TokenArray) -> float:
        """Milliseconds that the device steps of this prefill take, with nothing around them."""
        state = self._runtime.engine.state
        request = NewRequest(
            RequestId(self._next_id), prompt, SamplingParams(max_tokens=1, temperature=0.0)
        )
        self._next_id += 1
        commands = state.handle(RequestArrived(request, time.monotonic()))
        total_s = 0.0
        while steps := [c.batch for c in commands if isinstance(c, RunStep)]:
            start_s = time.perf_counter()
            samples = await self._runtime.run_step(steps[0])
            total_s += time.perf_counter() - start_s
            commands = state.handle(StepDone(steps[0].step_id, samples, time.monotonic()))
        if not any(isinstance(command, FinishRequest) for command in commands):
            raise InternalError(f"the prefill did not end: {commands}")
        return total_s * 1000

    def _tokens(self, num_tokens: int) -> TokenArray:
        vocab_size = self._runtime.manifest.model.vocab_size
        return self._random.integers(0, vocab_size, num_tokens, dtype=np.int32)
