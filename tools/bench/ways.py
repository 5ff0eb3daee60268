"""Ways to find a cached prefix, timed alike: this project's cache, its parts, and the peers."""

from __future__ import annotations

import hashlib
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from runtime_cache.cache.hashing import HashChain
from runtime_cache.cache.manager import CacheManager
from runtime_cache.engine.request import TokenArray
from tools.bench.peers import BlockMap, RadixTree
from tools.bench.resident import BLOCK_SIZE
from tools.bench.stage import median, percentile

Clock = Callable[[], int]
#: cpu: what this thread has used; wall: what has passed, other processes' turns included [ns].
CLOCKS: dict[str, Clock] = {"cpu": time.thread_time_ns, "wall": time.perf_counter_ns}
#: Samples before those that count, as a part of them.
WARM_UP_PART = 10


class Way(NamedTuple):
    """One way.

    Attributes:
        pack: a prompt in the form in which it is kept; not timed.
        find: how many of its tokens are cached; timed.
    """

    pack: Callable[[TokenArray], Any]
    find: Callable[[Any], int]


class Series:
    """One way, asked run after run for other prompts."""

    def __init__(self, way: Way, next_prompt: Callable[[], TokenArray]) -> None:
        self._way = way
        self._next_prompt = next_prompt
        self._medians_ns: list[float] = []
        self._p99s_ns: list[float] = []

    def measure(self, num_samples: int, clock: Clock) -> None:
        """One run, after a short one that does not count."""
        self._times_ns(num_samples // WARM_UP_PART, clock)
        times_ns = self._times_ns(num_samples, clock)
        self._medians_ns.append(statistics.median(times_ns))
        self._p99s_ns.append(percentile(times_ns, 99))

    def found(self, prompt: TokenArray) -> int:
        """How many tokens of a prompt are found; not timed."""
        return self._way.find(self._way.pack(prompt))

    def ns_per(self, num_tokens: int) -> float:
        """Median of the runs' medians, for prompts of so many tokens [nanoseconds a token]."""
        return median([ns / num_tokens for ns in self._medians_ns])

    @property
    def median_us(self) -> float:
        """Median of the runs' medians [microseconds]."""
        return median([ns / 1e3 for ns in self._medians_ns])

    @property
    def p99_ms(self) -> float:
        """Median of what 99 of 100 samples of a run do not exceed [milliseconds]."""
        return median([ns / 1e6 for ns in self._p99s_ns])

    def _times_ns(self, num_samples: int, clock: Clock) -> list[int]:
        pack, find = self._way
        times_ns = []
        for _ in range(num_samples):
            packed = pack(self._next_prompt())
            start_ns = clock()
            find(packed)
            times_ns.append(clock() - start_ns)
        return times_ns


def hash_and_match(manager: CacheManager) -> Way:
    """All that finding a new request's prefix costs here."""
    return Way(_itself, lambda prompt: _match(manager, _chain(manager, prompt)))


def hash_alone(manager: CacheManager) -> Way:
    """The first part of it."""
    return Way(_itself, lambda prompt: _chain(manager, prompt).num_tokens)


def match_alone(manager: CacheManager) -> Way:
    """The second part of it."""
    return Way(lambda prompt: _chain(manager, prompt), lambda chain: _match(manager, chain))


def sha256_alone() -> Way:
    """The floor: a chain of SHA-256 over blocks that are cut and packed already."""

    def find(blocks: list[bytes]) -> int:
        digest = bytes(32)
        for block in blocks:
            digest = hashlib.sha256(digest + block).digest()
        return len(blocks) * BLOCK_SIZE

    return Way(_blocks, find)


def block_map(peer: BlockMap) -> Way:
    """A map of 16-token blocks."""
    return Way(lambda prompt: prompt.tolist(), peer.match)


def radix_tree(peer: RadixTree) -> Way:
    """A token radix tree."""
    return Way(words, peer.match)


def words(prompt: TokenArray) -> array[int]:
    """A prompt as the radix tree keeps it."""
    return array("q", prompt.astype("i8").tobytes())


def _itself(prompt: TokenArray) -> TokenArray:
    return prompt


def _chain(manager: CacheManager, prompt: TokenArray) -> HashChain:
    chain = manager.new_chain()
    chain.extend(prompt)
    return chain


def _match(manager: CacheManager, chain: HashChain) -> int:
    return manager.match(chain, chain.num_tokens - 1).num_tokens


def _blocks(prompt: TokenArray) -> list[bytes]:
    size = BLOCK_SIZE
    return [prompt[i : i + size].tobytes() for i in range(0, len(prompt) - size + 1, size)]
