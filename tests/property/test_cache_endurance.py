"""A cache that has been used for a long time is as it was: no hold, no block, no byte is lost."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from runtime_cache.cache import desk, invariants
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy, EvictionPolicy
from runtime_cache.ids import PrefixId
from tests.support.caching import RowPool, admit, chain_of, commit, make_manager, serve

NUM_BLOCKS = 500
#: Tokens that all prompts share: two blocks and a half.
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def traffic(cache: CacheManager, numbers: range) -> None:
    """One-off continuations of one system prompt, and ten looks for each."""
    for number in numbers:
        serve(cache, [*SYSTEM, number % 1000, number // 1000, number % 7])
        for earlier in range(number - 9, number + 1):
            served = max(earlier, numbers.start)
            other = chain_of([*SYSTEM, served % 1000, served // 1000, 99])
            assert cache.match(other, 12).num_tokens == 12


@pytest.mark.long
@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_200_000_lookups_and_20_000_evictions_leave_no_trace(policy: EvictionPolicy) -> None:
    cache = make_manager(NUM_BLOCKS, policy=CachePolicy(eviction=policy))
    traffic(cache, range(10_000, 11_500))  # every queue and table has its size now
    num_before = cache.counters.evicted_blocks
    gc.collect()
    tracemalloc.start()
    sizes = []
    for start in range(11_500, 32_500, 3000):
        traffic(cache, range(start, start + 3000))
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert cache.counters.evicted_blocks - num_before >= 20_000
    assert len(cache.index) == cache.num_evictable == NUM_BLOCKS - 1 - cache.num_free
    assert cache.num_live == 0
    invariants.check(cache, [])
    # What is replaced is traced from its replacement on; from then on nothing is added.
    assert max(sizes[2:]) - sizes[1] < 20_000, sizes


class Lives:
    """Requests, some of them at once, with every end a request can have."""

    def __init__(self, cache: CacheManager, seed: int) -> None:
        self.cache = cache
        self.pool = RowPool()
        self.rng = random.Random(seed)
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.prompts: list[list[int]] = [SYSTEM]

    def one(self) -> None:
        """One more life begins; others end as long as it has no room."""
        rng, tokens = self.rng, self._prompt()
        while (table := admit(self.cache, tokens, room=8)) is None:
            self.end(rng.randrange(len(self.live)))
        self.live.append((table, tokens))
        self.prompts = [*self.prompts[-20:], tokens]
        while len(self.live) > 5:
            self.end(rng.randrange(len(self.live)))
        self.cache.now_s += 1.0
        self.cache.expire()

    def end(self, number: int) -> None:
        table, tokens = self.live.pop(number)
        chance = self.rng.random()
        if chance < 0.1:  # cancelled before its first step
            self.cache.commit(table, chain_of(tokens), table.num_hit_tokens, is_tail=True)
            self.cache.release(table)
        elif chance < 0.2:
            self.cache.drop(table, is_all_suspect=chance < 0.15)
            self._admit_anew()
        else:
            self._compute(table, tokens)
            if chance < 0.3:
                self.cache.register(PrefixId(f"p{self.rng.randrange(4)}"), table)
            elif chance < 0.4 and table.tail is not None:
                desk.pin(self.cache, table.tail.digest.hex(), self.rng.choice([None, 20.0]))
            self.cache.release(table)
        if chance > 0.97:
            self.give_up_keeps()

    def give_up_keeps(self) -> None:
        for keep in list(self.cache.keeps):
            if keep.kind == "registration":
                self.cache.unregister(PrefixId(keep.name))
            else:
                desk.unpin(self.cache, keep.name)

    def _prompt(self) -> list[int]:
        base = self.rng.choice(self.prompts)
        tail = [self.rng.randrange(3) for _ in range(self.rng.randint(1, 6))]
        return [*base[: self.rng.randint(0, 24)], *tail]

    def _compute(self, table: BlockTable, tokens: list[int]) -> None:
        """The whole prompt, and an answer of up to eight tokens."""
        self.pool.copy(table)
        self.pool.expect(table, tokens, table.num_hit_tokens)
        start = table.num_hit_tokens
        for _ in range(1 + self.rng.randrange(8)):
            self.pool.write(table, tokens, start, len(tokens))
            commit(self.cache, table, tokens)
            self.pool.expect(table, tokens, len(tokens))
            start = len(tokens)
            if not self.cache.reserve(table, start + 1):
                return
            tokens.append(self.rng.randrange(3))

    def _admit_anew(self) -> None:
        """What a failure has left without the source of its copy starts again."""
        pending = [(table, tokens) for table, tokens in self.live if table.copy is not None]
        for table, tokens in pending:
            self.live.remove((table, tokens))
            self.cache.release(table)
            again = admit(self.cache, tokens, room=8, is_retry=True)
            if again is not None:
                self.live.append((again, tokens))


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(),
        CachePolicy(eviction="slru", low_watermark_blocks=4, high_watermark_blocks=8),
        CachePolicy(max_leaves=6, max_prefix_tokens=21),
        CachePolicy(grid_tokens=6),
    ],
    ids=["lru", "slru", "limits", "grid"],
)
@pytest.mark.parametrize("num_lives", [2500, pytest.param(25_000, marks=pytest.mark.long)])
def test_when_all_lives_are_over_nothing_is_held(policy: CachePolicy, num_lives: int) -> None:
    cache = make_manager(60, policy=policy)
    lives = Lives(cache, seed=num_lives)
    for number in range(num_lives):
        lives.one()
        if number % 100 == 0:
            invariants.check(cache, [table for table, _ in lives.live])
    while lives.live:
        lives.end(0)
    lives.give_up_keeps()
    invariants.check(cache, [])
    assert (cache.num_live, len(cache.keeps)) == (0, 0)
    assert len(cache.index) == cache.num_evictable
    counters = cache.counters
    assert counters.hit_tokens > 2 * num_lives
    assert min(counters.copied_tokens, counters.evicted_blocks, counters.dropped_blocks) > 0
    desk.plan_blocks(cache, None).carry_out(cache)
    assert (len(cache.index), cache.num_free, cache.index.num_leaves) == (0, 59, 0)
