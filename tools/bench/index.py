"""What finding a prefix costs: hash and lookup among 1 000 to 1 000 000 cached blocks.

The cache's own code in this process, without a device: caches full of random
prompts of 8192 tokens (128 blocks), asked for prompts that are in them. One
sample is what a new request costs: pack its tokens, hash its blocks, look them
up, compare them. Prompts are drawn at random, so nothing of a large cache is in
those of the processor. Then 10 000 prompts of 500 shared and 100 own tokens,
asked for others that leave one of them at any token.

Beside it, on the same prompts, what others do: a map of 16-token blocks keyed
by SHA-256 over a pickle, and a token radix tree. The floor is SHA-256 alone.
Times are those of this thread alone, unless `--clock wall` is given: on a busy
machine the 99th percentile of the other clock is a time slice of the kernel's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from runtime_cache.cache.manager import CacheManager
from runtime_cache.engine.request import TokenArray
from runtime_cache.errors import InternalError
from tools.bench.peers import BlockMap, RadixTree
from tools.bench.prompts import num_cached_blocks, shared_prompts
from tools.bench.resident import BLOCK_SIZE, VOCAB_SIZE, ResidentCache, empty_cache, insert
from tools.bench.stage import median, positive
from tools.bench.ways import (
    CLOCKS,
    Clock,
    Series,
    block_map,
    hash_alone,
    hash_and_match,
    match_alone,
    radix_tree,
    sha256_alone,
    words,
)

SHARED_TOKENS = 500
OWN_TOKENS = 100
#: This part of a cache is evicted at a time.
EVICTED_PART = 10
#: Prompts for which what is found is compared with a search through all prompts.
NUM_CHECKED = 100

Note = Callable[[str], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--runs", type=positive, default=5, help="runs (5)")
    parser.add_argument("--samples", type=positive, default=300, help="samples per run (300)")
    parser.add_argument(
        "--blocks",
        type=positive,
        nargs=3,
        default=[1_000, 100_000, 1_000_000],
        metavar=("SMALL", "MIDDLE", "LARGE"),
        help="cached blocks (1000 100000 1000000)",
    )
    parser.add_argument(
        "--prompt-blocks", type=positive, default=128, help="length of the prompts (128 blocks)"
    )
    parser.add_argument(
        "--continuations", type=positive, default=10_000, help="of one system prompt (10000)"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="cpu",
        help="cpu: this thread's time; wall: what passes meanwhile (cpu)",
    )


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; the keys tell the size of the cache (`_1k`, `_1m`) unless it is the middle one."""
    num_tokens = args.prompt_blocks * BLOCK_SIZE
    result: dict[str, Any] = {
        "device": "none",
        "bundle": "none",
        "runs": args.runs,
        "clock": args.clock,
        "blocks": args.blocks,
        "prompt_tokens": num_tokens,
        "continuations": args.continuations,
    }
    with out.status("filling the caches") as status:
        long = _LongPrompts(args.blocks, args.prompt_blocks, status.update)
        fanout = _Fanout(args.continuations, status.update)
        for number in range(1, args.runs + 1):
            status.update(f"measuring, run {number} of {args.runs}")
            long.measure(args.samples, CLOCKS[args.clock])
            fanout.measure(args.samples, CLOCKS[args.clock])
    result |= long.result(num_tokens) | fanout.result()
    _show(result, out)
    return result


class _LongPrompts:
    """Caches of three sizes and the peers', all asked for long prompts that are in them."""

    def __init__(self, blocks: list[int], blocks_per_prompt: int, note: Note) -> None:
        self._random = np.random.default_rng(0)
        small, middle, large = blocks
        before_bytes = _memory_bytes()
        self._large = _filled(large, blocks_per_prompt, note)
        self._block_bytes = (_memory_bytes() - before_bytes) / large
        self._small = _filled(small, blocks_per_prompt, note)
        self._middle = _filled(middle, blocks_per_prompt, note)
        self._evict_ns: list[float] = []
        self._evict_ns_1m: list[float] = []
        self._series = self._make_series(note)

    def _make_series(self, note: Note) -> dict[str, Series]:
        peers = BlockMap(), RadixTree()
        for number in range(self._middle.num_prompts):
            note(f"filling the peers' caches: {number:,} prompts")
            _teach(self._middle.prompt(number), *peers)
        small, middle, large = self._small.manager, self._middle.manager, self._large.manager
        return {
            "floor": Series(sha256_alone(), self._any_of(self._middle)),
            "hash": Series(hash_alone(middle), self._any_of(self._middle)),
            "1k": Series(hash_and_match(small), self._any_of(self._small)),
            "100k": Series(hash_and_match(middle), self._any_of(self._middle)),
            "1m": Series(hash_and_match(large), self._any_of(self._large)),
            "map": Series(block_map(peers[0]), self._any_of(self._middle)),
            "radix": Series(radix_tree(peers[1]), self._any_of(self._middle)),
        }

    def _any_of(self, cache: ResidentCache) -> Callable[[], TokenArray]:
        return lambda: cache.prompt(int(self._random.integers(cache.num_prompts)))

    def measure(self, num_samples: int, clock: Clock) -> None:
        """One run."""
        for series in self._series.values():
            series.measure(num_samples, clock)
        self._evict_ns.append(_evict(self._middle, clock))
        self._evict_ns_1m.append(_evict(self._large, clock))

    def result(self, num_tokens: int) -> dict[str, Any]:
        """Medians over the runs, for prompts of so many tokens."""
        ns = {name: series.ns_per(num_tokens) for name, series in self._series.items()}
        p99_ms = {name: series.p99_ms for name, series in self._series.items()}
        return {
            "floor_ns_per_token": ns["floor"],
            "hash_ns_per_token": ns["hash"],
            "ns_per_token": ns["100k"],
            "ns_per_token_1k": ns["1k"],
            "ns_per_token_1m": ns["1m"],
            "growth_1k_to_1m": round(ns["1m"] / ns["1k"], 3),
            "p99_8k_ms": p99_ms["100k"],
            "p99_8k_ms_1k": p99_ms["1k"],
            "p99_8k_ms_1m": p99_ms["1m"],
            "p99_growth_1k_to_1m": round(p99_ms["1m"] / p99_ms["1k"], 3),
            "evict_ns": median(self._evict_ns),
            "evict_ns_1m": median(self._evict_ns_1m),
            "bytes_per_block": round(self._block_bytes),
            "map_ns_per_token": ns["map"],
            "map_p99_8k_ms": p99_ms["map"],
            "radix_ns_per_token": ns["radix"],
            "radix_p99_8k_ms": p99_ms["radix"],
        }


class _Fanout:
    """Many continuations of one system prompt, asked for others."""

    def __init__(self, num_continuations: int, note: Note) -> None:
        self._random = np.random.default_rng(1)
        self._prompts = shared_prompts(
            num_continuations,
            num_shared=SHARED_TOKENS,
            num_own=OWN_TOKENS,
            vocab_size=VOCAB_SIZE,
            seed=2,
        )
        manager = self._filled(note)
        peers = BlockMap(), RadixTree()
        for prompt in self._prompts:
            _teach(prompt, *peers)
        self._series = {
            "all": Series(hash_and_match(manager), self._leaver),
            "match": Series(match_alone(manager), self._leaver),
            "map": Series(block_map(peers[0]), self._leaver),
            "radix": Series(radix_tree(peers[1]), self._leaver),
        }
        self._mean_tokens = self._check()

    def _filled(self, note: Note) -> CacheManager:
        # As many more as the last prompt needs until its own are given up for shared ones.
        spare = -(-self._prompts.shape[1] // BLOCK_SIZE)
        manager = empty_cache(num_cached_blocks(self._prompts, BLOCK_SIZE) + spare)
        for number, prompt in enumerate(self._prompts):
            note(f"filling a cache with continuations: {number:,}")
            insert(manager, prompt)
        return manager

    def _leaver(self) -> TokenArray:
        """A prompt that goes along with a cached one and leaves it at some token of its own."""
        random = self._random
        prompt: TokenArray = self._prompts[random.integers(len(self._prompts))].copy()
        start = SHARED_TOKENS + int(random.integers(OWN_TOKENS))
        prompt[start:] = random.integers(0, VOCAB_SIZE, len(prompt) - start)
        return prompt

    def _check(self) -> dict[str, float]:
        """How many tokens each way finds on average.

        Raises:
            InternalError: the cache or the radix tree does not find all there is.
        """
        found: dict[str, list[int]] = {name: [] for name in self._series}
        for _ in range(NUM_CHECKED):
            prompt = self._leaver()
            common = (self._prompts != prompt).argmax(axis=1).max()
            for name, series in self._series.items():
                found[name].append(series.found(prompt))
            if not found["all"][-1] == found["radix"][-1] == common:
                raise InternalError(f"{common} tokens are cached, but found are {found}")
        return {name: round(float(np.mean(counts)), 1) for name, counts in found.items()}

    def measure(self, num_samples: int, clock: Clock) -> None:
        """One run."""
        for series in self._series.values():
            series.measure(num_samples, clock)

    def result(self) -> dict[str, Any]:
        """Medians over the runs."""
        us = {name: series.median_us for name, series in self._series.items()}
        return {
            "fanout_match_us": us["match"],
            "fanout_us": us["all"],
            "fanout_tokens": self._mean_tokens["all"],
            "map_fanout_us": us["map"],
            "map_fanout_tokens": self._mean_tokens["map"],
            "radix_fanout_us": us["radix"],
            "radix_fanout_tokens": self._mean_tokens["radix"],
        }


def _filled(num_blocks: int, blocks_per_prompt: int, note: Note) -> ResidentCache:
    cache = ResidentCache(num_blocks, blocks_per_prompt, seed=num_blocks)
    cache.fill(lambda done: note(f"filling {num_blocks:,} blocks: {done:,}"))
    return cache


def _teach(prompt: TokenArray, block_map: BlockMap, radix_tree: RadixTree) -> None:
    block_map.insert(prompt.tolist())
    radix_tree.insert(words(prompt))


def _evict(cache: ResidentCache, clock: Clock) -> float:
    """Evict a part and bring it back; nanoseconds per evicted block."""
    num_prompts = max(1, cache.num_prompts // EVICTED_PART)
    start_ns = clock()
    num_blocks = cache.evict(num_prompts)
    duration_ns = clock() - start_ns
    cache.refill(num_prompts)
    return duration_ns / num_blocks


def _memory_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _show(result: dict[str, Any], out: Console) -> None:
    small, middle, large = result["blocks"]
    table = Table("", f"{small:,} blocks", f"{middle:,}", f"{large:,}", "growth")
    for title, key, growth in (
        ("ns per token", "ns_per_token", "growth_1k_to_1m"),
        ("p99 of a prompt, ms", "p99_8k_ms", "p99_growth_1k_to_1m"),
    ):
        sizes = (result[f"{key}{size}"] for size in ("_1k", "", "_1m"))
        table.add_row(title, *(f"{value:.2f}" for value in sizes), f"{result[growth]:.2f}")
    table.add_row(
        "ns per evicted block", "", f"{result['evict_ns']:.0f}", f"{result['evict_ns_1m']:.0f}"
    )
    out.print(table)
    out.print(
        f"of the {result['ns_per_token']:.1f} ns per token {result['hash_ns_per_token']:.1f} are "
        f"hashing; floor: {result['floor_ns_per_token']:.1f} (SHA-256 alone). "
        f"{result['bytes_per_block']} bytes of memory per cached block"
    )
    table = Table(
        f"{middle:,} blocks", "ns per token", "p99, ms", "among continuations, µs", "tokens found"
    )
    for title, prefix in (("this cache", ""), ("16-token map", "map_"), ("radix tree", "radix_")):
        table.add_row(
            title,
            f"{result[f'{prefix}ns_per_token']:.2f}",
            f"{result[f'{prefix}p99_8k_ms']:.2f}",
            f"{result[f'{prefix}fanout_us']:.1f}",
            f"{result[f'{prefix}fanout_tokens']}",
        )
    out.print(table)
