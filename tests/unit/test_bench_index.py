"""What `rtcache-bench index` compares finds what it should: the peers, the caches, the ways."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.cache import invariants
from runtime_cache.errors import ConfigError
from tools.bench.peers import BlockMap, RadixTree, common_length
from tools.bench.resident import BLOCK_SIZE, ResidentCache
from tools.bench.ways import (
    Series,
    block_map,
    hash_alone,
    hash_and_match,
    match_alone,
    radix_tree,
    sha256_alone,
    words,
)

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12)


def common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@given(PROMPTS, st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_the_radix_tree_finds_the_longest_beginning(prompts: list[list[int]], query: list[int]):
    tree = RadixTree()
    for prompt in prompts:
        tree.insert(array("q", prompt))
    longest = max(common(prompt, query) for prompt in prompts)
    # Twice: the first match splits a node.
    assert [tree.match(array("q", query)) for _ in range(2)] == [longest, longest]
    assert all(tree.match(array("q", prompt)) == len(prompt) for prompt in prompts)


@given(PROMPTS, st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_the_block_map_finds_whole_blocks_of_16(prompts: list[list[int]], query: list[int]):
    blocks = BlockMap()
    for prompt in prompts:
        blocks.insert(prompt)
    # A beginning is there if some prompt has all of its full blocks.
    longest = max(common(prompt, query) for prompt in prompts)
    assert blocks.match(query) == longest // 16 * 16


@pytest.mark.parametrize("length", [0, 1, 2, 3, 6, 7, 8, 100])
@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 6, 7, 62, 63, 99])
def test_where_two_runs_differ(length: int, place: int):
    one, other = array("q", range(length)), array("q", range(length))
    if place < length:
        other[place] = -1
    assert common_length(one, other) == min(place, length)


def full(num_blocks: int, blocks_per_prompt: int) -> ResidentCache:
    cache = ResidentCache(num_blocks, blocks_per_prompt, seed=5)
    cache.fill(lambda _: None)
    return cache


def test_every_block_of_a_full_cache_is_cached():
    cache = full(23, 4)
    manager = cache.manager
    assert (cache.num_prompts, manager.num_evictable, manager.num_free) == (5, 23, 0)
    invariants.check(manager, [])
    way = Series(hash_and_match(manager), lambda: cache.prompt(0))
    # At least the last token is computed.
    assert [way.found(cache.prompt(n)) for n in range(5)] == [4 * BLOCK_SIZE - 1] * 5
    # The sixth was cut short to the rest of the blocks.
    assert way.found(cache.prompt(5)) == 3 * BLOCK_SIZE


def test_what_is_evicted_first_comes_back_last():
    cache = full(20, 4)
    found = Series(hash_and_match(cache.manager), lambda: cache.prompt(0)).found
    for oldest in (0, 2, 4, 1):
        assert cache.evict(2) == 8
        gone = [n for n in range(5) if found(cache.prompt(n)) == 0]
        assert gone == sorted((oldest + n) % 5 for n in range(2))
        cache.refill(2)
        assert cache.manager.num_evictable == 20
        invariants.check(cache.manager, [])


@pytest.mark.parametrize("blocks", [(3, 4), (32_000, 1)])
def test_caches_that_cannot_be_filled(blocks: tuple[int, int]):
    with pytest.raises(ConfigError, match="can be told apart"):
        ResidentCache(*blocks, seed=0)


def test_all_ways_find_the_same_prompt():
    cache = full(8, 4)
    tree, blocks = RadixTree(), BlockMap()
    for number in range(2):
        tree.insert(words(cache.prompt(number)))
        blocks.insert(cache.prompt(number).tolist())
    query = cache.prompt(1)
    query[150:] += 1
    found = {
        way: Series(way, lambda: query).found(query)
        for way in (
            hash_and_match(cache.manager),
            match_alone(cache.manager),
            radix_tree(tree),
            block_map(blocks),
        )
    }
    assert list(found.values()) == [150, 150, 150, 144]
    num_tokens = len(query)
    assert [w.find(w.pack(query)) for w in (hash_alone(cache.manager), sha256_alone())] == [
        num_tokens,
        num_tokens,
    ]


class Clock:
    """Every look takes one tick more than the one before."""

    def __init__(self) -> None:
        self._ticks: Iterator[int] = count()
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += next(self._ticks)
        return self.now_ns


def test_a_series_times_only_the_finding():
    clock = Clock()
    cache = full(4, 4)
    prompts: list[int] = []

    def next_prompt() -> np.ndarray:
        prompts.append(len(prompts))
        return cache.prompt(0)

    series = Series(hash_and_match(cache.manager), next_prompt)
    series.measure(20, clock)
    # 2 to warm up, 20 that count: the samples take 1, 3, 5 … ticks, the counted ones 5 … 43.
    assert len(prompts) == 22
    assert series.ns_per(2) == 12.0
    assert series.median_us == 0.024
    assert series.p99_ms == 0.0
