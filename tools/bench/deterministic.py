"""What deterministic mode costs: prompts and answers against the normal mode.

One daemon in each mode, on the same bundle, asked in turn. A prompt of 500 + 50
tokens, first with an empty cache and then once more with the same 500 and other
50; and answers, one alone and eight at once. Costs are medians over pairs of
runs, one in each mode, next to each other; the ceiling is 1. Deterministic mode
reuses whole chunks only, runs every prompt in one gear and every answer in
another, and never answers two in one step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from ipc.sync_client import Client
from tools.bench.load import Load, send_all
from tools.bench.prompts import Prompts
from tools.bench.stage import median, positive, spread
from tools.daemon_process import DaemonProcess

MODES = ("normal", "deterministic")
#: What one run measures, by name: normal, deterministic.
Pair = tuple[dict[str, float], dict[str, float]]
#: Of the prompts whose answers are timed: one step to prefill, whatever the gears.
SHORT_TOKENS = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument(
        "--bundle",
        type=Path,
        default=Path(".models/smollm2"),
        help="bundle to serve (the one `make demo` makes)",
    )
    parser.add_argument("--device", default="sim:0", help="device (sim:0)")
    parser.add_argument("--runs", type=positive, default=5, help="pairs of runs (5)")
    parser.add_argument(
        "--shared-tokens", type=positive, default=500, help="prompt tokens that both have (500)"
    )
    parser.add_argument(
        "--own-tokens", type=positive, default=50, help="prompt tokens of each one's own (50)"
    )
    parser.add_argument(
        "--answer-tokens", type=positive, default=32, help="length of the answers (32)"
    )
    parser.add_argument("--at-once", type=positive, default=8, help="answers at once (8)")


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; keys end in the mode, or in `cost`: so many times the normal mode's."""
    out.print("ceiling: a cost of 1")
    with (
        DaemonProcess(args.bundle, args.device, cache_deterministic="false") as normal,
        DaemonProcess(args.bundle, args.device, cache_deterministic="true") as deterministic,
    ):
        rows = _measure((normal, deterministic), args, out)
    result: dict[str, Any] = {
        "device": args.device,
        "bundle": str(args.bundle),
        "runs": args.runs,
        "at_once": args.at_once,
    }
    for name in rows[0][0]:
        for place, mode in enumerate(MODES):
            result[f"{name}_{mode}"] = median([pair[place][name] for pair in rows])
        result[f"{name}_cost"] = median([pair[1][name] / pair[0][name] for pair in rows])
    _show(rows, result, out)
    return result


def _show(rows: list[Pair], result: dict[str, Any], out: Console) -> None:
    table = Table("min … median … max", *MODES, "cost")
    for name in rows[0][0]:
        spreads = [spread([pair[place][name] for pair in rows]) for place in range(len(MODES))]
        table.add_row(name, *spreads, f"{result[f'{name}_cost']:.2f}")
    out.print(table)


def _measure(
    daemons: tuple[DaemonProcess, DaemonProcess], args: argparse.Namespace, out: Console
) -> list[Pair]:
    """Pairs of runs, after one to warm up."""
    normal, deterministic = (_ModeBench(daemon, args) for daemon in daemons)
    with out.status("warming up") as status:
        normal.row(), deterministic.row()
        rows = []
        for number in range(1, args.runs + 1):
            status.update(f"measuring, pair {number} of {args.runs}")
            rows.append((normal.row(), deterministic.row()))
    return rows


class _ModeBench:
    """One daemon, and the prompts it is sent: the same in both modes."""

    def __init__(self, daemon: DaemonProcess, args: argparse.Namespace) -> None:
        self._daemon = daemon
        self._args = args
        self._random = np.random.default_rng(0)
        with Client(daemon.endpoint, timeout_s=60) as client:
            self._vocab_size = client.info().vocab_size

    def row(self) -> dict[str, float]:
        """Milliseconds to the first token, cold and hit, and per answered token, alone and not."""
        args = self._args
        with Client(self._daemon.admin_endpoint, timeout_s=60) as admin:
            admin.evict(all=True)
        shared = self._tokens(1, args.shared_tokens)
        cold, hit = (
            np.concatenate([shared, self._tokens(1, args.own_tokens)], axis=1) for _ in range(2)
        )
        return {
            "cold_ttft_ms": self._duration_ms(cold, 1),
            "hit_ttft_ms": self._duration_ms(hit, 1),
            "alone_token_ms": self._token_ms(1),
            "together_token_ms": self._token_ms(args.at_once),
        }

    def _token_ms(self, num_answers: int) -> float:
        """Milliseconds per answered token, of all answers together."""
        num_tokens: int = num_answers * self._args.answer_tokens
        prompts = self._tokens(num_answers, SHORT_TOKENS)
        return self._duration_ms(prompts, self._args.answer_tokens) / num_tokens

    def _duration_ms(self, prompts: Prompts, max_tokens: int) -> float:
        """From sending all prompts to the end of the last answer."""
        num_prompts = len(prompts)
        load = Load(prompts, at_once=num_prompts, num_connections=1, max_tokens=max_tokens)
        start_s = time.perf_counter()
        uvloop.run(send_all(self._daemon.endpoint, load, lambda _: None))
        return (time.perf_counter() - start_s) * 1000

    def _tokens(self, num_prompts: int, num_tokens: int) -> Prompts:
        shape = (num_prompts, num_tokens)
        return self._random.integers(0, self._vocab_size, shape, dtype=np.int32)
