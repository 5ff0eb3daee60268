"""What the cache costs when it finds nothing: throughput with it on against off.

Two daemons, one with `cache.enable` and one without. The same requests go to
both in turn, 16 at once, of 512 prompt and 32 answer tokens. Every prompt
begins with another token, so nothing is ever found; and more is sent than the
pool holds, so blocks are evicted. `ratio` is the median over pairs of runs, one
on each daemon, next to each other. The ceiling is 1, the aim 0.99.

The bundle is the one that `make demo` makes. With --null it is the do-nothing
model, where the aim cannot be met: its steps take no time, so all the time is
the host's. The output also says what the cache costs in processor time per
request, whatever the steps take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from ipc.sync_client import Client
from runtime_cache.config import CacheConfig
from runtime_cache.errors import InternalError
from tools.bench.load import Load, send_all
from tools.bench.prompts import Prompts
from tools.bench.stage import cpu_s, median, null_bundle, positive
from tools.daemon_process import DaemonProcess

#: Requests that the do-nothing bundle's pool holds: fewer than its 257 token ids, so that a prompt
#: has been evicted when another one begins with its first token.
NULL_CAPACITY = 128
#: Requests per run and pairs of runs: short and many where a request takes milliseconds.
NULL_SIZE = (128, 24)
SIZE = (16, 6)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run on one daemon.

    Attributes:
        requests_per_s: answered requests.
        cpu_ms: processor time of the daemon per request, all threads together [milliseconds].
        evicted_blocks: blocks that left the cache.
    """

    requests_per_s: float
    cpu_ms: float
    evicted_blocks: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument(
        "--bundle",
        type=Path,
        default=Path(".models/smollm2"),
        help="bundle to serve (the one `make demo` makes)",
    )
    parser.add_argument("--null", action="store_true", help="serve the do-nothing model instead")
    parser.add_argument("--device", default="sim:0", help="device (sim:0)")
    parser.add_argument(
        "--runs",
        type=positive,
        help=f"pairs of runs ({SIZE[1]}; {NULL_SIZE[1]} with --null)",
    )
    parser.add_argument(
        "--requests",
        type=positive,
        help=f"requests per run ({SIZE[0]}; {NULL_SIZE[0]} with --null)",
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=512, help="length of the prompts (512)"
    )
    parser.add_argument(
        "--answer-tokens", type=positive, default=32, help="length of the answers (32)"
    )
    parser.add_argument(
        "--at-once", type=positive, default=16, help="unfinished requests at a time (16)"
    )
    parser.add_argument("--connections", type=positive, default=4, help="client sockets (4)")


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; key `ratio`, and what a request costs with the cache on and off."""
    with (
        _bundle(args, out) as (name, bundle),
        DaemonProcess(bundle, args.device, cache_enable="true") as on,
        DaemonProcess(bundle, args.device, cache_enable="false") as off,
    ):
        out.print(f"bundle: {name}. Ceiling: 1")
        num_requests, num_pairs = NULL_SIZE if args.null else SIZE
        num_requests, num_pairs = args.requests or num_requests, args.runs or num_pairs
        pairs = _measure(_NoHitBench(on, off, args), num_requests, num_pairs, out)
    result = {
        "device": args.device,
        "bundle": name,
        "runs": num_pairs,
        "requests": num_requests,
        "prompt_tokens": args.prompt_tokens,
        "answer_tokens": args.answer_tokens,
        "at_once": args.at_once,
        **_medians(pairs),
    }
    _show(pairs, result, out)
    return result


@contextmanager
def _bundle(args: argparse.Namespace, out: Console) -> Iterator[tuple[str, Path]]:
    """Name and place of what is served."""
    if not args.null:
        yield str(args.bundle), args.bundle
        return
    block_size = CacheConfig().block_size
    context = -(-(args.prompt_tokens + args.answer_tokens) // block_size) * block_size
    with null_bundle(out, kv_tokens=NULL_CAPACITY * context, context=context) as bundle:
        yield "null", bundle


def _measure(
    bench: _NoHitBench, num_requests: int, num_pairs: int, out: Console
) -> list[tuple[Run, Run]]:
    """Pairs of runs with the cache on and off."""
    pairs = []
    with out.status("warming up") as status:
        bench.pair(num_requests)
        for number in range(1, num_pairs + 1):
            status.update(f"measuring, pair {number} of {num_pairs}")
            pairs.append(bench.pair(num_requests))
    return pairs


class _NoHitBench:
    """Both daemons, and prompts that none of them has seen."""

    def __init__(self, on: DaemonProcess, off: DaemonProcess, args: argparse.Namespace) -> None:
        self._on = on
        self._off = off
        self._args = args
        self._random = np.random.default_rng(0)
        self._num_pairs = 0
        self._num_prompts = 0
        with Client(on.endpoint, timeout_s=60) as client:
            self._vocab_size = client.info().vocab_size

    def pair(self, num_requests: int) -> tuple[Run, Run]:
        """The same prompts to both, with the cache on and off; every other time in this order.

        Raises:
            InternalError: something was found in the cache.
        """
        prompts = self._prompts(num_requests)
        self._num_pairs += 1
        if self._num_pairs % 2:
            return self._run(self._on, prompts), self._run(self._off, prompts)
        off = self._run(self._off, prompts)
        return self._run(self._on, prompts), off

    def _prompts(self, num_prompts: int) -> Prompts:
        """Random ones; the first tokens go round the vocabulary."""
        shape = (num_prompts, self._args.prompt_tokens)
        prompts = self._random.integers(0, self._vocab_size, shape, dtype=np.int32)
        first = self._num_prompts + np.arange(num_prompts)
        prompts[:, 0] = first % self._vocab_size
        self._num_prompts += num_prompts
        return prompts

    def _run(self, daemon: DaemonProcess, prompts: Prompts) -> Run:
        args = self._args
        load = Load(prompts, args.at_once, args.connections, max_tokens=args.answer_tokens)
        with Client(daemon.admin_endpoint, timeout_s=60) as admin:
            evicted_before = admin.stats()["cache"]["evicted_blocks"]
            cpu_before_s, start_s = cpu_s(daemon.process.pid), time.perf_counter()
            answers = uvloop.run(send_all(daemon.endpoint, load, lambda _: None))
            duration_s = time.perf_counter() - start_s
            used_s = cpu_s(daemon.process.pid) - cpu_before_s
            evicted_blocks = admin.stats()["cache"]["evicted_blocks"] - evicted_before
        if num_cached := sum(answer.usage.cached_tokens for answer in answers):
            raise InternalError(
                f"{num_cached} tokens were found in the cache: it holds more prompts than the "
                f"vocabulary has first tokens; serve a bundle with a smaller pool"
            )
        num_requests = len(answers)
        return Run(num_requests / duration_s, used_s * 1000 / num_requests, evicted_blocks)


def _medians(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    return {
        "ratio": median([on.requests_per_s / off.requests_per_s for on, off in pairs]),
        "requests_per_s_on": median([on.requests_per_s for on, _ in pairs]),
        "requests_per_s_off": median([off.requests_per_s for _, off in pairs]),
        "cpu_ms_on": median([on.cpu_ms for on, _ in pairs]),
        "cpu_ms_off": median([off.cpu_ms for _, off in pairs]),
        "cost_us": round(statistics.median(on.cpu_ms - off.cpu_ms for on, off in pairs) * 1000),
        "evicted_blocks": sum(on.evicted_blocks for on, _ in pairs),
    }


def _show(pairs: list[tuple[Run, Run]], result: dict[str, Any], out: Console) -> None:
    table = Table("", "requests/s: min … median … max", "CPU ms per request")
    for title, runs in zip(("cache on", "cache off"), zip(*pairs, strict=True), strict=True):
        rates, cpu_ms = [run.requests_per_s for run in runs], [run.cpu_ms for run in runs]
        table.add_row(title, _spread(rates), _spread(cpu_ms))
    out.print(table)
    out.print(
        f"throughput with the cache on at 0 % hits: {result['ratio']:.1%} of that with it off; "
        f"{result['evicted_blocks']:,} blocks were evicted meanwhile. The cache costs "
        f"{result['cost_us']} µs of processor time per request"
    )


def _spread(values: list[float]) -> str:
    """Minimum, median and maximum to three digits: requests may take seconds or milliseconds."""
    return " … ".join(f"{v:.3g}" for v in (min(values), statistics.median(values), max(values)))
