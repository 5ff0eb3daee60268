"""Prefilled tokens of a thousand users: no cache, a cache, a cache with half of the memory.

1000 users send 10 prompts each: the system prompt of 500 tokens that all have,
and 100 tokens of their own; the answer is one token. 1000 requests are
unfinished all the time. Through a real `rtcached` process and its ZeroMQ
socket, on the do-nothing model, so that what is counted and timed is the cache
and the host.

The floor is the system prompt once, and every prompt's own tokens. The
do-nothing model has 257 token ids, so of 10 000 random ends some begin alike,
and what is alike need not be computed again: `exact_floor` is the least for
exactly these prompts. Counted are the tokens whose KV the device has put into
its pool; the engine's count and the sum of the answers' usage must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from ipc.sync_client import Client
from om_models.bundle import load_bundle
from runtime_cache.config import CacheConfig
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.errors import InternalError
from tools.bench.load import Answered, Load, send_all
from tools.bench.plot import bar_plot, require_matplotlib
from tools.bench.prompts import (
    Prompts,
    exact_floor_tokens,
    floor_tokens,
    num_cached_blocks,
    shared_prompts,
)
from tools.bench.stage import median, null_bundle, percentile, positive
from tools.daemon_process import DaemonProcess

BLOCK_SIZE = CacheConfig().block_size
#: More requests than are in work at once by default.
MAX_RUNNING = 32
#: The low watermark keeps an eighth of the pool free at the most: a seventh of the rest.
WATERMARK_PART = 7
NUM_WARM_UP = 64


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A way to run the daemon.

    Attributes:
        name: what the result's keys end in.
        title: for people.
        options: the daemon's, besides bundle and device.
    """

    name: str
    title: str
    options: dict[str, str]


@dataclass(frozen=True, slots=True)
class Day:
    """What came of one run.

    Attributes:
        prefilled: tokens whose KV was computed.
        cached: prompt tokens that were found in the cache.
        evicted_blocks: blocks that left the cache.
        requests_per_s: from the first request to the last answer.
        ttft_p50_ms: from sending a request to its first token, half of them [milliseconds].
        ttft_p99_ms: the same, 99 of 100.
    """

    prefilled: int
    cached: int
    evicted_blocks: int
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--device", default="sim:0", help="device (sim:0)")
    parser.add_argument("--runs", type=positive, default=3, help="runs of each kind (3)")
    parser.add_argument("--users", type=positive, default=1000, help="users (1000)")
    parser.add_argument("--turns", type=positive, default=10, help="prompts of each user (10)")
    parser.add_argument(
        "--shared-tokens", type=positive, default=500, help="prompt tokens that all have (500)"
    )
    parser.add_argument(
        "--own-tokens", type=positive, default=100, help="prompt tokens of each one's own (100)"
    )
    parser.add_argument(
        "--at-once", type=positive, default=1000, help="unfinished requests at a time (1000)"
    )
    parser.add_argument("--connections", type=positive, default=4, help="client sockets (4)")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="a fourth kind: with cache.deterministic, which rounds hits down to a grid",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it too (.png or .svg)")


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; keys end in the kind of run: `_off`, `_on`, `_half`, `_deterministic`."""
    if args.plot:
        require_matplotlib()
    prompts = _prompts(args, args.users * args.turns, seed=0)
    facts = _facts(args, prompts)
    _state_floor(facts, out)
    with _bundle(prompts, facts["needed_blocks"], out) as bundle:
        kinds = _kinds(bundle, facts["needed_blocks"], has_deterministic=args.deterministic)
        days = {kind: _measure(bundle, kind, prompts, args, out) for kind in kinds}
    result: dict[str, Any] = {"device": args.device, "bundle": "null", "runs": args.runs, **facts}
    for kind, runs in days.items():
        result |= _medians(kind.name, runs)
    _show(days, result, out)
    if args.plot:
        _draw(args, result, kinds)
    return result


# -- what is asked ----------------------------------------------------------------------------


def _prompts(args: argparse.Namespace, num_prompts: int, *, seed: int) -> Prompts:
    # Imported late: brings onnx, which a host that only serves has not.
    from om_models.null_model import NULL_SPEC

    return shared_prompts(
        num_prompts,
        num_shared=args.shared_tokens,
        num_own=args.own_tokens,
        vocab_size=NULL_SPEC.vocab_size,
        seed=seed,
    )


def _facts(args: argparse.Namespace, prompts: Prompts) -> dict[str, int]:
    """What is known before anything runs; keys of the result."""
    shared, own = args.shared_tokens, args.own_tokens
    return {
        "users": args.users,
        "turns": args.turns,
        "shared_tokens": shared,
        "own_tokens": own,
        "at_once": args.at_once,
        "connections": args.connections,
        "prompt_tokens": prompts.size,
        "floor": floor_tokens(len(prompts), num_shared=shared, num_own=own),
        "exact_floor": exact_floor_tokens(prompts),
        "needed_blocks": num_cached_blocks(prompts, BLOCK_SIZE),
    }


def _state_floor(facts: dict[str, int], out: Console) -> None:
    num_prompts = facts["users"] * facts["turns"]
    out.print(
        f"{num_prompts:,} prompts of {facts['shared_tokens']} shared + {facts['own_tokens']} own "
        f"tokens, {facts['prompt_tokens']:,} in all. Floor: {facts['floor']:,}. Some ends begin "
        f"alike by chance, so for these prompts the least is {facts['exact_floor']:,}. Their KV "
        f"fills {facts['needed_blocks']:,} blocks of {BLOCK_SIZE} tokens."
    )


@contextmanager
def _bundle(prompts: Prompts, needed_blocks: int, out: Console) -> Iterator[Path]:
    """A bundle with room for all prompts, for those in work, and for the low watermark."""
    blocks_per_prompt = -(-(prompts.shape[1] + 1) // BLOCK_SIZE)
    num_blocks = needed_blocks + MAX_RUNNING * blocks_per_prompt
    num_blocks += num_blocks // WATERMARK_PART + 2
    kv_tokens, context = num_blocks * BLOCK_SIZE, blocks_per_prompt * BLOCK_SIZE
    with null_bundle(out, kv_tokens=kv_tokens, context=context) as bundle:
        yield bundle


def _kinds(bundle: Path, needed_blocks: int, *, has_deterministic: bool) -> list[Kind]:
    layout = KvLayout.from_spec(load_bundle(bundle, verify=False).manifest.kv, BLOCK_SIZE)
    # One more is the null block; and half of one, which rounding may take away.
    half_gb = (needed_blocks // 2 + 1.5) * layout.block_bytes / 10**9
    kinds = [
        Kind("off", "cache off", {"cache_enable": "false"}),
        Kind("on", "cache on", {}),
        Kind("half", "half memory", {"cache_cache_capacity": f"{half_gb:.9f}"}),
    ]
    if has_deterministic:
        kinds.append(Kind("deterministic", "deterministic", {"cache_deterministic": "true"}))
    return kinds


# -- one run ----------------------------------------------------------------------------------


def _measure(
    bundle: Path, kind: Kind, prompts: Prompts, args: argparse.Namespace, out: Console
) -> list[Day]:
    """All runs of one kind, on one daemon whose cache is empty before each."""
    options = kind.options | {"engine_max_waiting": str(max(1024, args.at_once))}
    with (
        DaemonProcess(bundle, args.device, **options) as daemon,
        Client(daemon.admin_endpoint, timeout_s=60) as admin,
        out.status(kind.title) as status,
    ):
        bench = _WorkloadBench(daemon.endpoint, admin, args)
        bench.day(_prompts(args, NUM_WARM_UP, seed=1), lambda _: None)

        def note(num_done: int) -> None:
            run = f"run {len(days) + 1} of {args.runs}"
            status.update(f"{kind.title}, {run}: {num_done:,} of {len(prompts):,} answers")

        days: list[Day] = []
        for _ in range(args.runs):
            days.append(bench.day(prompts, note))
    return days


class _WorkloadBench:
    """One daemon under load."""

    def __init__(self, endpoint: str, admin: Client, args: argparse.Namespace) -> None:
        self._endpoint = endpoint
        self._admin = admin
        self._at_once = args.at_once
        self._num_connections = args.connections

    def day(self, prompts: Prompts, note_end: Callable[[int], None]) -> Day:
        """Send all prompts to an empty cache.

        Raises:
            InternalError: the daemon's counts do not agree with each other.
        """
        self._admin.evict(all=True)
        load = Load(prompts, self._at_once, self._num_connections, max_tokens=1)
        before = self._counts()
        start_s = time.perf_counter()
        answers = uvloop.run(send_all(self._endpoint, load, note_end))
        duration_s = time.perf_counter() - start_s
        counted = {name: count - before[name] for name, count in self._counts().items()}
        prefilled, cached = _check(prompts.size, answers, counted)
        ttft_ms = [answer.ttft_s * 1000 for answer in answers]
        return Day(
            prefilled=prefilled,
            cached=cached,
            evicted_blocks=counted["evicted"],
            requests_per_s=len(answers) / duration_s,
            ttft_p50_ms=percentile(ttft_ms, 50),
            ttft_p99_ms=percentile(ttft_ms, 99),
        )

    def _counts(self) -> dict[str, int]:
        stats = self._admin.stats()
        return {
            "device": stats["device"]["prefill"]["rows_appended"],
            "engine": stats["engine"]["prefill_tokens"],
            "queried": stats["cache"]["queried_tokens"],
            "hit": stats["cache"]["hit_tokens"],
            "evicted": stats["cache"]["evicted_blocks"],
        }


def _check(num_tokens: int, answers: list[Answered], counted: dict[str, int]) -> tuple[int, int]:
    """Prefilled and cached tokens, which device, engine, cache and answers must agree on."""
    prefilled = sum(answer.usage.prefilled_tokens for answer in answers)
    cached = sum(answer.usage.cached_tokens for answer in answers)
    wanted = {"device": prefilled, "engine": prefilled, "queried": num_tokens, "hit": cached}
    wrong = {name: counted[name] for name in wanted if counted[name] != wanted[name]}
    if wrong or prefilled + cached != num_tokens:
        raise InternalError(
            f"of {num_tokens} prompt tokens the answers report {prefilled} computed and {cached} "
            f"cached, but the daemon counts {wrong}"
        )
    return prefilled, cached


# -- what is told -----------------------------------------------------------------------------


def _medians(name: str, days: list[Day]) -> dict[str, Any]:
    num_tokens = days[0].prefilled + days[0].cached
    return {
        f"prefilled_{name}": statistics.median_low(day.prefilled for day in days),
        f"hit_rate_{name}": median([day.cached / num_tokens for day in days]),
        f"evicted_blocks_{name}": statistics.median_low(day.evicted_blocks for day in days),
        f"requests_per_s_{name}": median([day.requests_per_s for day in days]),
        f"ttft_p50_ms_{name}": median([day.ttft_p50_ms for day in days]),
        f"ttft_p99_ms_{name}": median([day.ttft_p99_ms for day in days]),
    }


def _show(days: dict[Kind, list[Day]], result: dict[str, Any], out: Console) -> None:
    table = Table("", "prefilled", "hits", "evicted", "requests/s", "TTFT p50, p99 ms")
    for kind, runs in days.items():
        table.add_row(
            kind.title,
            f"{result[f'prefilled_{kind.name}']:,}",
            f"{result[f'hit_rate_{kind.name}']:.1%}",
            f"{result[f'evicted_blocks_{kind.name}']:,}",
            " … ".join(f"{rate:.0f}" for rate in _spread(runs)),
            f"{result[f'ttft_p50_ms_{kind.name}']:.0f}, {result[f'ttft_p99_ms_{kind.name}']:.0f}",
        )
    out.print(table)
    more = result["prefilled_on"] - result["exact_floor"]
    out.print(
        f"with the cache on, {result['prefilled_on']:,} tokens are computed: "
        + ("the least there is" if more == 0 else f"{more:,} more than the least there is")
    )


def _spread(days: list[Day]) -> tuple[float, float, float]:
    rates = [day.requests_per_s for day in days]
    return min(rates), statistics.median(rates), max(rates)


def _draw(args: argparse.Namespace, result: dict[str, Any], kinds: list[Kind]) -> None:
    title = (
        f"{args.users:,} users × {args.turns} prompts of {args.shared_tokens} shared + "
        f"{args.own_tokens} own tokens"
    )
    bars = {kind.title: result[f"prefilled_{kind.name}"] for kind in kinds}
    bar_plot(args.plot, title, "prefilled tokens", bars, floor=result["floor"])
