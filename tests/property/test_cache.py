"""Random lives of requests and registrations: the invariants hold after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from runtime_cache.cache import invariants
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import HashChain
from runtime_cache.ids import PrefixId
from tests.support.caching import BLOCK_SIZE, make_manager

NUM_BLOCKS = 12
MAX_TOKENS = 24

#: Few distinct tokens, so that random prompts share prefixes.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS - 4)


@dataclass
class Live:
    """A request, and how many of its tokens have their KV in the pool."""

    tokens: list[int]
    chain: HashChain
    table: BlockTable
    num_computed: int
    is_over: bool = field(default=False)


class CacheMachine(RuleBasedStateMachine):
    """Requests against a model of the pool's content: slot → all tokens up to it."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_manager(NUM_BLOCKS, low_watermark_blocks=2)
        self.requests: list[Live] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.queried = self.hit = 0

    @rule(target=live, prompt=prompts)
    def admit(self, prompt: list[int]) -> Live | None:
        chain = self.cache.new_chain()
        chain.extend(np.array(prompt, dtype=np.int32))
        before = self._state()
        table = self.cache.admit(
            chain,
            num_tokens=len(prompt),
            max_tokens=MAX_TOKENS,
            max_hit_tokens=len(prompt) - 1,
        )
        if table is None:
            assert self._state() == before
            return None
        assert table.num_hit_tokens < len(prompt)
        self.queried += len(prompt)
        self.hit += table.num_hit_tokens
        request = Live(list(prompt), chain, table, table.num_hit_tokens)
        self.requests.append(request)
        return request

    @rule(request=live, num_tokens=st.integers(1, 9))
    def run_and_commit(self, request: Live | None, num_tokens: int) -> None:
        if request is None or request.is_over:
            return
        end = min(request.num_computed + num_tokens, len(request.tokens))
        for position in range(request.num_computed, end):
            slot = int(request.table.slots[position])
            self.content[slot] = tuple(request.tokens[: position + 1])
        request.num_computed = end
        request.chain.extend(np.array(request.tokens, dtype=np.int32))
        self.cache.commit(request.table, request.chain, end)

    @rule(request=live, token=st.integers(0, 1))
    def grow(self, request: Live | None, token: int) -> None:
        if request is None or request.is_over or len(request.tokens) == MAX_TOKENS:
            return
        if self.cache.reserve(request.table, len(request.tokens) + 1):
            request.tokens.append(token)

    @rule(request=live, is_failed=st.booleans(), is_all_suspect=st.booleans())
    def end(self, request: Live | None, is_failed: bool, is_all_suspect: bool) -> None:
        if request is None or request.is_over:
            return
        if is_failed:
            self.cache.drop(request.table, is_all_suspect=is_all_suspect)
        else:
            self.cache.release(request.table)
        request.is_over = True
        self.requests.remove(request)

    @rule(request=live, number=st.integers(0, 2))
    def register(self, request: Live | None, number: int) -> None:
        if request is None or request.is_over:
            return
        registration = self.cache.register(PrefixId(f"p{number}"), request.table)
        if registration is not None:
            assert registration.num_tokens == request.table.num_committed * BLOCK_SIZE
        assert self.cache.num_registered_blocks <= self.cache.max_registered_blocks

    @rule(number=st.integers(0, 2))
    def unregister(self, number: int) -> None:
        prefix_id = PrefixId(f"p{number}")
        was_there = prefix_id in [entry.prefix_id for entry in self.cache.registrations()]
        assert self.cache.unregister(prefix_id) == was_there

    @rule(max_blocks=st.none() | st.integers(0, 4))
    def evict(self, max_blocks: int | None) -> None:
        num_evictable = self.cache.num_evictable
        wanted = num_evictable if max_blocks is None else max_blocks
        assert self.cache.evict(max_blocks).num_evicted == min(wanted, num_evictable)

    @invariant()
    def nothing_is_broken(self) -> None:
        invariants.check(self.cache, [request.table for request in self.requests])

    @invariant()
    def every_computed_slot_holds_its_own_prefix(self) -> None:
        for request in self.requests:
            slots = request.table.slots[: request.num_computed].tolist()
            for position, slot in enumerate(slots):
                assert self.content[slot] == tuple(request.tokens[: position + 1])

    @invariant()
    def the_watermark_is_kept_while_something_can_go(self) -> None:
        assert self.cache.num_free >= 2 or self.cache.num_evictable == 0

    @invariant()
    def counters_equal_the_log(self) -> None:
        counters = self.cache.counters
        assert (counters.queried_tokens, counters.hit_tokens) == (self.queried, self.hit)
        assert counters.inserted_blocks - counters.evicted_blocks == len(self.cache.index)

    def teardown(self) -> None:
        for request in list(self.requests):
            self.cache.release(request.table)
        for registration in self.cache.registrations():
            self.cache.unregister(registration.prefix_id)
        invariants.check(self.cache, [])
        assert self.cache.num_live == 0

    def _state(self) -> object:
        return self.cache.pool.free_blocks, self.cache.index.parked, self.cache.counters.hit_tokens


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
