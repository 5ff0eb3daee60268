"""Random lives of requests, registrations, pins and leases, in the order an engine may choose.

After every call all invariants hold, every cached row is the one its node promises, every row that
a request would read is its own, what is kept is still found, and the counters are those of a log.
Every match is compared with a search through all entries.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from runtime_cache.cache import desk, hashing, invariants
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheReport, Keep
from runtime_cache.ids import PrefixId
from tests.support.cache_traffic import Request, in_common, policies, prompts, tokens_of
from tests.support.caching import (
    BLOCK_SIZE,
    RowPool,
    entries,
    make_manager,
    plan_aged,
    plan_idle,
)

MAX_TOKENS = 26

#: What may happen, and how often. One rule draws from these: of several rules Hypothesis leaves out
#: some in every run, and few of the others would ever come together.
HAPPENINGS = {
    "arrive": 4,
    "serve": 4,
    "admit": 1,
    "launch": 3,
    "land": 6,
    "run_steps": 4,
    "finish": 1,
    "preempt": 1,
    "pin": 1,
    "unpin": 1,
    "unregister": 1,
    "pass_time": 1,
    "evict": 2,
}


class CacheMachine(RuleBasedStateMachine):
    """The calls of an engine: steps of several requests, and what happens while one is running."""

    cache: CacheManager
    may_collide = False

    @initialize(policy=policies, num_blocks=st.integers(6, 20), served=st.lists(prompts))
    def start(self, policy: CachePolicy, num_blocks: int, served: list[list[int]]) -> None:
        self.cache = make_manager(num_blocks, policy=policy)
        self.policy = policy
        self.pool = RowPool()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.in_flight: list[Request] = []
        self.kept: dict[tuple[str, str], list[int]] = {}
        self.queried = self.hit = self.copied = 0
        self._keep_a_log()
        for tokens in served:
            self._live(tokens, 0)

    def _keep_a_log(self) -> None:
        """Note what enters the index, and what is evicted from it."""
        insert, evict_node = self.cache.index.insert, self.cache.evict_node
        self.inserted = 0
        self.evicted: list[tuple[str, bool, float]] = []

        def note_insert(*args: object) -> PrefixNode:
            self.inserted += 1
            return insert(*args)  # type: ignore[arg-type]

        def note_eviction(node: PrefixNode, reason: str) -> None:
            assert self.cache.pool.num_holds(node.block) == 0
            idle_s = self.cache.now_s - node.last_used_s
            self.evicted.append((reason, node.num_hits == 0, idle_s))
            evict_node(node, reason)

        self.cache.index.insert = note_insert  # type: ignore[method-assign, assignment]
        self.cache.evict_node = note_eviction  # type: ignore[method-assign]

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        is_idle = not self.in_flight
        possible = {
            "serve": is_idle,
            "admit": is_idle and self.waiting,
            "launch": is_idle and self.running,
            "land": not is_idle,
            "run_steps": is_idle and self.running,
            "finish": self._idle(),
            "preempt": is_idle and self.running,
            "pin": len(self.cache.index) > 0,
            "unpin": len(self.cache.keeps) > self.cache.keeps.num_registrations,
            "unregister": self.cache.keeps.num_registrations > 0,
            "evict": self.cache.num_evictable > 0,
        }
        names = [name for name in HAPPENINGS if possible.get(name, True)]
        weighted = [name for name in names for _ in range(HAPPENINGS[name])]
        getattr(self, f"_{data.draw(st.sampled_from(weighted))}")(data)

    # -- arrivals -----------------------------------------------------------------------------

    def _arrive(self, data: st.DataObject) -> None:
        tokens = data.draw(prompts)
        priority = data.draw(st.sampled_from([50, 50, 50, 0, 100]))
        is_caching = data.draw(st.sampled_from([True] * 8 + [False]))
        prefix_id = data.draw(st.sampled_from([None] * 5 + [PrefixId("p0"), PrefixId("p1")]))
        if prefix_id is not None:
            tokens = tokens[: self.policy.cacheable(len(tokens))]
            is_caching = True
        request = Request(tokens, self.cache.new_chain(), prefix_id, is_caching, priority)
        self.waiting.append(request)
        if not self.in_flight:
            self._try_admit(request)

    def _serve(self, data: st.DataObject) -> None:
        self._live(data.draw(prompts), data.draw(st.integers(0, 5)))

    def _live(self, tokens: list[int], num_answered: int) -> None:
        """A whole life without anything between."""
        request = Request(tokens, self.cache.new_chain(), None, True, 50)
        self.waiting.append(request)
        if self._try_admit(request):
            for _ in range(1 + num_answered):
                self._start_step([request], MAX_TOKENS)
                self._end_step("done")
            self._end(request)

    def _admit(self, data: st.DataObject) -> None:
        self._try_admit(data.draw(st.sampled_from(self.waiting)))

    def _try_admit(self, request: Request) -> bool:
        chain, most = request.chain, request.max_hit_tokens
        chain.extend(np.array(request.tokens, dtype=np.int32))
        self._expect_length(request)
        expected = self._expected_report(request) if request.is_caching else None
        before = self._state()
        table = self.cache.admit(
            chain,
            num_tokens=len(request.tokens),
            max_tokens=MAX_TOKENS,
            max_hit_tokens=most,
            priority=request.priority,
            is_caching=request.is_caching,
            is_kept=request.prefix_id is not None,
            is_retry=request.was_admitted,
        )
        if table is None:
            assert self._state() == before
            assert self.cache.num_blocks_for(len(request.tokens)) > self.cache.num_available
            return False
        self._check_admission(request, table, expected)
        request.table, request.num_computed = table, table.num_hit_tokens
        request.was_admitted = True
        self.waiting.remove(request)
        self.running.append(request)
        if request.prefix_id is not None and request.num_computed == len(request.tokens):
            self._register(request)
        return True

    def _expect_length(self, request: Request) -> None:
        """The cheap look agrees with the whole one."""
        most = request.max_hit_tokens
        length = self.cache.match_length(request.chain, request.hint, most)
        nodes: list[PrefixNode] = []
        self.cache.index.extend_match(
            nodes, request.chain, self.policy.cacheable(most) // BLOCK_SIZE
        )
        assert length == len(nodes) * BLOCK_SIZE

    def _expected_report(self, request: Request) -> CacheReport:
        """What a search through all entries says, and that the cache says the same."""
        before = self._state()
        report = self.cache.report(request.chain, request.max_hit_tokens)
        assert self._state() == before
        paths = [tokens_of(node) for node in self.cache.index]
        common = max((in_common(path, request.tokens) for path in paths), default=0)
        most = self.policy.within_limit(request.max_hit_tokens)
        assert report.cached_tokens == self.policy.on_grid(min(common, most))
        if report.reason in ("cold", "evicted", "diverged", "extended"):
            assert (report.diverged_at or 0) == common < most
            nearest = [len(path) for path in paths if in_common(path, request.tokens) == common]
            assert (report.nearest_tokens is None) == (common == 0)
            assert common == 0 or report.nearest_tokens in nearest
        if report.reason == "extended":
            assert report.nearest_tokens == report.diverged_at
        elif report.reason == "diverged":
            assert report.nearest_tokens is not None
            assert report.nearest_tokens > common
        elif report.reason == "cold":
            assert common == 0
        return report

    def _check_admission(
        self, request: Request, table: BlockTable, expected: CacheReport | None
    ) -> None:
        if expected is None:
            assert (table.num_hit_tokens, table.report) == (0, None)
            return
        if table.num_hit_tokens != expected.cached_tokens:
            # Its last blocks were those to copy from.
            assert table.num_hit_tokens < expected.cached_tokens
            assert self.cache.num_available == 0
        elif not request.was_admitted:
            assert table.report == expected
        if request.was_admitted:
            assert table.report is None
            return
        assert table.report is not None
        assert table.report.cached_tokens == table.num_hit_tokens
        self.queried += len(request.tokens)
        self.hit += table.num_hit_tokens
        self.copied += table.num_hit_tokens - table.num_committed * BLOCK_SIZE

    # -- steps --------------------------------------------------------------------------------

    def _launch(self, data: st.DataObject) -> None:
        num_rows, num_fed = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
        self._start_step(data.draw(st.permutations(self.running))[:num_rows], num_fed)

    def _start_step(self, rows: list[Request], num_fed: int) -> None:
        for request in rows:
            request.num_fed = min(num_fed, len(request.tokens) - request.num_computed)
            if request.num_fed:
                self.in_flight.append(request)

    def _run_steps(self, data: st.DataObject) -> None:
        """Some steps of all, without anything between."""
        for _ in range(data.draw(st.integers(1, 4))):
            self._start_step(self.running, 6)
            self._end_step("done")

    def _land(self, data: st.DataObject) -> None:
        outcome = data.draw(st.sampled_from(["done"] * 6 + ["failed", "bad"]))
        self._end_step(
            outcome,
            bad=data.draw(st.sampled_from(self.in_flight)) if outcome == "bad" else None,
            is_tail=data.draw(st.booleans()),
        )

    def _end_step(self, outcome: str, *, bad: Request | None = None, is_tail: bool = False) -> None:
        """Its copies come before its reads, and its reads before its writes."""
        rows, self.in_flight = self.in_flight, []
        for request in rows:
            self.pool.copy(request.blocks())
        for request in rows:
            self.pool.expect(request.blocks(), request.tokens, request.num_computed)
        for request in rows:
            if outcome == "failed" or request is bad:
                self._fail(request, is_all_suspect=request is bad)
            else:
                self._land_row(request, is_tail=is_tail)
        if outcome != "done":
            self._forget_lost_keeps()
            for request in list(self.running):
                if request.blocks().copy is not None:
                    self._put_back(request)

    def _land_row(self, request: Request, *, is_tail: bool) -> None:
        table, start = request.blocks(), request.num_computed
        self.pool.write(table, request.tokens, start, start + request.num_fed)
        request.num_computed += request.num_fed
        self.cache.copied(table)
        is_computed = request.num_computed == len(request.tokens)
        self._commit(request, is_tail=is_tail or is_computed)
        if not is_computed:
            return
        if request.prefix_id is not None:
            self._register(request)
        elif self.cache.reserve(table, len(request.tokens) + 1) and len(request.tokens) < (
            MAX_TOKENS - 1
        ):
            request.tokens.append(len(request.tokens) // 7 % 2)

    def _fail(self, request: Request, *, is_all_suspect: bool) -> None:
        table, start = request.blocks(), request.num_computed
        self.pool.spoil(table, start, start + request.num_fed)
        self.running.remove(request)
        self.cache.drop(table, is_all_suspect=is_all_suspect)

    def _commit(self, request: Request, *, is_tail: bool) -> None:
        request.chain.extend(np.array(request.tokens, dtype=np.int32))
        self.cache.commit(request.blocks(), request.chain, request.num_computed, is_tail=is_tail)

    # -- ends ---------------------------------------------------------------------------------

    def _idle(self) -> list[Request]:
        return [request for request in self.running if request not in self.in_flight]

    def _finish(self, data: st.DataObject) -> None:
        """Also a cancel: of a request that had no step yet, and while others are in a step."""
        self._end(data.draw(st.sampled_from(self._idle())))

    def _end(self, request: Request) -> None:
        self._commit(request, is_tail=True)
        self.running.remove(request)
        self.cache.release(request.blocks())

    def _preempt(self, data: st.DataObject) -> None:
        self._put_back(data.draw(st.sampled_from(self.running)))

    def _put_back(self, request: Request) -> None:
        self._end(request)
        request.table, request.num_computed = None, 0
        self.waiting.append(request)

    def _register(self, request: Request) -> None:
        assert request.prefix_id is not None
        self._commit(request, is_tail=True)
        before = self._state()
        keep = self.cache.register(request.prefix_id, request.blocks())
        if keep is None:
            assert self._state() == before
        else:
            assert keep.num_tokens >= len(request.tokens) or self.may_collide
            self.kept["registration", keep.name] = self._kept_tokens(keep)
        self.running.remove(request)
        self.cache.release(request.blocks())

    # -- keeps and evictions, also while a step is in flight ----------------------------------

    def _kept_tokens(self, keep: Keep) -> list[int]:
        if not keep.blocks:
            return []
        node = self.cache.index.node_of(keep.blocks[-1])
        assert node is not None
        return tokens_of(node)

    def _unregister(self, data: st.DataObject) -> None:
        prefix_id = PrefixId(data.draw(st.sampled_from(["p0", "p1"])))
        was_there = self.cache.keeps.get("registration", prefix_id) is not None
        assert self.cache.unregister(prefix_id) == was_there
        self.kept.pop(("registration", prefix_id), None)

    def _pin(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(list(self.cache.index)))
        before = self._state()
        ttl_s = data.draw(st.sampled_from([None, 1.0, 4.0]))
        keep = desk.pin(self.cache, node.digest.hex(), ttl_s)
        if keep is None:
            assert self._state() == before
        else:
            self.kept["pin", keep.name] = tokens_of(node)

    def _unpin(self, data: st.DataObject) -> None:
        names = [keep.name for keep in self.cache.keeps if keep.kind != "registration"]
        name = data.draw(st.sampled_from(names))
        assert desk.unpin(self.cache, name).name == name
        self.kept.pop(("pin", name), None)

    def _pass_time(self, data: st.DataObject) -> None:
        self.cache.now_s += data.draw(st.integers(1, 3))
        self.cache.expire()
        pins = {keep.name for keep in self.cache.keeps if keep.kind != "registration"}
        for kind, name in list(self.kept):
            if kind == "pin" and name not in pins:
                del self.kept[kind, name]
        times = [keep.expires_s for keep in self.cache.keeps if keep.expires_s is not None]
        assert self.cache.keeps.next_expiry_s == min(times, default=None)
        assert all(time > self.cache.now_s for time in times)

    def _evict(self, data: st.DataObject) -> None:
        """First looked at, which changes nothing, then done: the figures are the same."""
        number = data.draw(st.integers(0, 4))
        before = self._standing()
        kind = data.draw(st.sampled_from(["number", "idle", "age", "digest"]))
        match kind:
            case "number":
                plan = desk.plan_blocks(self.cache, number)
                assert len(plan.nodes) == min(number, self.cache.num_evictable)
            case "idle":
                plan = plan_idle(self.cache, number)
            case "age":
                plan = plan_aged(self.cache, number)
            case _:
                digest = data.draw(st.sampled_from(list(self.cache.index))).digest
                plan = desk.plan_entry(self.cache, digest.hex())
        assert self._standing() == before
        foreseen = plan.result
        assert plan.carry_out(self.cache) == foreseen
        assert foreseen.num_evicted == len(before) - len(self.cache.index)
        assert all(not node.is_indexed for node in plan.nodes)
        # Nothing was left out that could go.
        assert kind != "idle" or not plan_idle(self.cache, number).nodes
        assert foreseen.num_in_use + foreseen.num_kept <= self.cache.num_live

    def _standing(self) -> list[tuple[object, ...]]:
        """All that an eviction could change."""
        cache = self.cache
        return [
            (n.digest, n.block, n.rank, n.num_children, cache.pool.num_holds(n.block))
            for n in cache.index
        ]

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        invariants.check(self.cache, [request.blocks() for request in self.running])
        self._check_cached_rows()
        self._check_computed_rows()
        self._check_keeps()
        self._check_room()
        self._check_queues()
        self._check_counters()

    def _check_cached_rows(self) -> None:
        for node in self.cache.index:
            start = (node.num_blocks - 1) * BLOCK_SIZE
            self.pool.expect_block(node.block, tokens_of(node), start, node.num_tokens)
            assert self.policy.within_limit(node.num_tokens) == node.num_tokens
            if node.num_tokens % BLOCK_SIZE:
                assert self.policy.on_grid(node.num_tokens) == node.num_tokens

    def _check_computed_rows(self) -> None:
        for request in self.running:
            table, num_rows = request.blocks(), request.num_computed
            if table.copy is not None:
                source, num_copied = table.copy
                num_rows -= num_copied
                self.pool.expect_block(source, request.tokens, num_rows, request.num_computed)
            self.pool.expect(table, request.tokens, num_rows)

    def _check_keeps(self) -> None:
        keeps, index = self.cache.keeps, self.cache.index
        assert max(len(keeps), keeps.num_blocks) <= keeps.max_blocks
        paths = [tokens_of(node) for node in index]
        for tokens in self.kept.values():
            assert not tokens or max(in_common(path, tokens) for path in paths) == len(tokens)
        listed = [e.keep for e in entries(self.cache)[0] if e.keep is not None]
        assert sorted(listed, key=id) == sorted(keeps, key=id)

    def _forget_lost_keeps(self) -> None:
        """A failed step takes its partly filled block from those who keep it, too."""
        for keep in self.cache.keeps:
            if keep.blocks and self.cache.index.node_of(keep.blocks[-1]) is None:
                kind = "registration" if keep.kind == "registration" else "pin"
                self.kept.pop((kind, keep.name), None)

    def _check_room(self) -> None:
        policy, cache = self.policy, self.cache
        assert cache.num_free >= policy.low_watermark_blocks or cache.num_evictable == 0
        if policy.max_leaves is not None:
            assert cache.index.num_leaves <= policy.max_leaves or cache.num_evictable == 0

    def _check_queues(self) -> None:
        protected = 0
        for node in self.cache.index.parked:
            rank, parent = node.rank, node.parent
            assert rank is not None
            protected += rank[1]
            if parent is not None and parent.rank is not None:
                assert parent.rank >= rank
        assert protected <= (self.cache.num_usable * 4 // 5)
        assert self.policy.eviction == "slru" or protected == 0

    def _check_counters(self) -> None:
        counters = self.cache.counters
        assert (counters.queried_tokens, counters.hit_tokens) == (self.queried, self.hit)
        assert counters.copied_tokens == self.copied
        assert counters.inserted_blocks == self.inserted
        assert counters.evicted_blocks == len(self.evicted)
        assert counters.evicted_by == Counter(reason for reason, _, _ in self.evicted)
        assert counters.evicted_unused_blocks == sum(unused for _, unused, _ in self.evicted)
        assert counters.evicted_idle_s == sum(idle_s for _, _, idle_s in self.evicted)
        assert counters.collisions == 0 or self.may_collide

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in self.running:
            self.cache.release(request.blocks())
        for keep in list(self.cache.keeps):
            if keep.kind == "registration":
                self.cache.unregister(PrefixId(keep.name))
            else:
                desk.unpin(self.cache, keep.name)
        invariants.check(self.cache, [])
        assert self.cache.num_live == 0
        desk.plan_blocks(self.cache, None).carry_out(self.cache)
        assert (len(self.cache.index), self.cache.num_free) == (0, self.cache.num_usable)

    def _state(self) -> object:
        """All that a call which does nothing leaves alone."""
        cache = self.cache
        nodes = [(n.block, n.digest, n.last_used_s, n.num_hits, n.priority) for n in cache.index]
        holds = [cache.pool.num_holds(block) for block in cache.pool.blocks]  # type: ignore[arg-type]
        parked = [node.block for node in cache.index.parked]
        return nodes, holds, parked, cache.pool.free_blocks, cache.counters.copy(), [*cache.keeps]


class FewDigests:
    """A hash function with four values."""

    def __init__(self, data: bytes) -> None:
        self._value = hashlib.sha256(data).digest()[0] % 4

    def digest(self) -> bytes:
        return bytes([self._value]) * 32


class CollidingMachine(CacheMachine):
    """The same where digests collide all the time: less is cached, and no hit is wrong."""

    may_collide = True

    @initialize(policy=policies, num_blocks=st.integers(6, 20), served=st.lists(prompts))
    def start(self, policy: CachePolicy, num_blocks: int, served: list[list[int]]) -> None:
        self.patch = mock.patch.object(hashing, "sha256", FewDigests)
        self.patch.start()
        super().start(policy, num_blocks, served)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "patch"):
                self.patch.stop()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
CollidingMachine.TestCase.settings = settings(CacheMachine.TestCase.settings, max_examples=25)
TestCollidingMachine = CollidingMachine.TestCase
