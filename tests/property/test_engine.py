"""Random traffic on a tiny pool: nothing is lost, nothing is wrong, nothing leaks.

After every event the rig checks the cache's invariants, the owners of all holds and the counters;
the fake device checks every KV read, copy and write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from om_models.manifest import Gear
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.engine.commands import (
    FinishRequest,
    ReportExplained,
    ReportPinned,
    ReportRefused,
    ReportUnpinned,
)
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.limits import EngineLimits
from runtime_cache.ids import TenantName
from tests.support.engine_rig import EngineRig, expected_answer, limits, small_gears

#: Prompts begin with one of these, so that many share blocks, and beginnings of blocks.
STEMS = (tuple(range(14)), tuple(range(6)), (7, 7, 7, 7, 7), ())
prompts = st.builds(
    lambda stem, tail: [*stem, *tail] or [9],
    st.sampled_from(STEMS),
    st.lists(st.integers(0, 1), max_size=7),
)
#: A long past only in a narrow decode gear: batches must then rotate.
LOPSIDED = GearTable(
    [Gear(1, 8, 8), Gear(1, 4, 32)], [Gear(4, 1, 8), Gear(2, 1, 16), Gear(1, 1, 32)]
)
#: Chunks that are shorter and longer than a block of four, and not a multiple of it.
GRIDS = tuple(GearTable([Gear(1, chunk, 32)], [Gear(2, 1, 32)]).fixed(1) for chunk in (3, 4, 6, 8))
policies = st.builds(
    CachePolicy,
    is_auto=st.sampled_from((True, True, True, False)),
    eviction=st.sampled_from(("lru", "slru")),
    low_watermark_blocks=st.integers(0, 2),
    high_watermark_blocks=st.integers(0, 2),
    max_prefix_tokens=st.sampled_from((None, None, 7)),
    max_leaves=st.sampled_from((None, None, 2)),
)
tenants = st.sampled_from(("", "t"))


class EngineMachine(RuleBasedStateMachine):
    """One engine; the rules are the events."""

    @initialize(
        num_blocks=st.integers(4, 13),
        is_shared=st.booleans(),
        policy=policies,
        gears=st.sampled_from((small_gears(), small_gears(), LOPSIDED, LOPSIDED, *GRIDS)),
        config=st.builds(
            limits,
            max_waiting=st.just(5),
            max_running=st.integers(1, 6),
            max_overtakes=st.integers(0, 2),
            match_window=st.integers(1, 4),
            on_failed_step=st.sampled_from(("recompute", "fail")),
        ),
    )
    def start(
        self,
        num_blocks: int,
        is_shared: bool,
        policy: CachePolicy,
        gears: GearTable,
        config: EngineLimits,
    ) -> None:
        if gears.is_fixed:
            policy = replace(policy, grid_tokens=gears.chunk)
            config = replace(config, is_deterministic=True)
        self.tenants = ("", "t") if is_shared else ("",)
        self.rig = EngineRig(
            num_blocks=1 + num_blocks * len(self.tenants),
            tenants=self.tenants,
            gears=gears,
            policy=policy,
            config=config,
        )
        self.prompts: dict[int, list[int]] = {}

    # -- requests -----------------------------------------------------------------------------

    @rule(
        prompt=prompts,
        max_tokens=st.none() | st.integers(1, 12),
        deadline=st.none() | st.integers(0, 12),
        tenant=tenants,
        use_cache=st.sampled_from((True, True, True, False)),
        priority=st.sampled_from((0, 50, 100)),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int | None,
        deadline: int | None,
        tenant: str,
        use_cache: bool,
        priority: int,
    ) -> None:
        request_id = self.rig.arrive(
            prompt,
            max_tokens,
            deadline_s=None if deadline is None else self.rig.now_s + deadline,
            tenant=self._existing(tenant),
            use_cache=use_cache,
            cache_priority=priority,
        )
        self.prompts[request_id] = prompt

    @rule(prompt=prompts, num_requests=st.integers(2, 4), tenant=tenants)
    def a_crowd_arrives(self, prompt: list[int], num_requests: int, tenant: str) -> None:
        for token in range(num_requests):
            request_id = self.rig.arrive([*prompt, token], 12, tenant=self._existing(tenant))
            self.prompts[request_id] = [*prompt, token]

    @rule(prompt=prompts, number=st.integers(0, 2), tenant=tenants)
    def register(self, prompt: list[int], number: int, tenant: str) -> None:
        self.rig.register(f"p{number}", prompt, tenant=self._existing(tenant))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.cancel(data.draw(st.sampled_from(sorted(self.prompts))))

    @rule(seconds=st.integers(0, 3))
    def tick(self, seconds: int) -> None:
        self.rig.tick(seconds)

    # -- the device ---------------------------------------------------------------------------

    @precondition(lambda self: self.rig.batch is not None and not self.rig.is_hung)
    @rule(seconds=st.integers(0, 2))
    def step_done(self, seconds: int) -> None:
        self.rig.step_done(seconds)

    @precondition(lambda self: self.rig.batch is not None and not self.rig.is_hung)
    @rule(times=st.integers(3, 20))
    def several_steps_done(self, times: int) -> None:
        for _ in range(times):
            if self.rig.batch is not None:
                self.rig.step_done()

    @precondition(lambda self: self.rig.batch is not None)
    @rule(chance=st.integers(0, 2), retryable=st.sampled_from((True, True, False)))
    def step_ends_somehow(self, chance: int, retryable: bool) -> None:
        if chance == 0 or self.rig.is_hung:
            self.rig.step_failed(retryable=retryable)
        else:
            self.rig.step_done()

    @precondition(lambda self: self.rig.batch is not None and not self.rig.is_hung)
    @rule()
    def step_hangs(self) -> None:
        self.rig.step_hung()

    @precondition(lambda self: self.rig.batch is not None and not self.rig.is_hung)
    @rule(which=st.integers(0, 3))
    def step_gives_bad_logits(self, which: int) -> None:
        batch = self.rig.batch
        assert batch is not None
        wanted = [row for row in batch.rows if row.sampler is not None]
        if wanted:
            self.rig.step_done(bad=wanted[which % len(wanted)].request_id)

    # -- the operator -------------------------------------------------------------------------

    @rule(number=st.integers(0, 2), tenant=tenants)
    def release_prefix(self, number: int, tenant: str) -> None:
        self.rig.release_prefix(f"p{number}", tenant=self._existing(tenant))

    @rule(max_blocks=st.none() | st.integers(0, 3), tenant=st.none() | tenants)
    def evict(self, max_blocks: int | None, tenant: str | None) -> None:
        self.rig.evict(max_blocks, tenant=None if tenant is None else self._existing(tenant))

    @rule(idle_s=st.integers(0, 5))
    def evict_idle(self, idle_s: int) -> None:
        self.rig.evict(idle_s=idle_s)

    @rule(age_s=st.integers(0, 5))
    def evict_aged(self, age_s: int) -> None:
        self.rig.evict(age_s=age_s)

    @rule(data=st.data(), tenant=tenants)
    def evict_entry(self, data: st.DataObject, tenant: str) -> None:
        if digest := self._a_digest(data, tenant):
            assert not isinstance(self.rig.evict(digest=digest), ReportRefused)

    @rule(data=st.data(), tenant=tenants, ttl_s=st.none() | st.integers(1, 9))
    def pin(self, data: st.DataObject, tenant: str, ttl_s: int | None) -> None:
        tenant = self._existing(tenant)
        if digest := self._a_digest(data, tenant):
            answer = self.rig.pin(digest, ttl_s, tenant=tenant)
            assert isinstance(answer, ReportPinned | ReportRefused)

    @rule(data=st.data(), tenant=tenants)
    def unpin(self, data: st.DataObject, tenant: str) -> None:
        tenant = self._existing(tenant)
        pins = [k.name for k in self._cache(tenant).keeps if k.kind != "registration"]
        if pins:
            answer = self.rig.unpin(data.draw(st.sampled_from(sorted(pins))), tenant=tenant)
            assert isinstance(answer, ReportUnpinned)

    @rule(prompt=prompts, tenant=tenants)
    def explain(self, prompt: list[int], tenant: str) -> None:
        before = self.rig.state.snapshot()
        answer = self.rig.explain(prompt, tenant=self._existing(tenant))
        assert isinstance(answer, ReportExplained)
        assert 0 <= answer.report.cached_tokens < answer.prompt_tokens == len(prompt)
        if self.rig.commands == [answer]:
            assert self.rig.state.snapshot() == before

    # -- the end ------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.drain()
        rig.run()
        assert rig.state.is_drained
        rig.tick(10)
        for tenant, cache in rig.caches.items():
            assert all(keep.kind != "lease" for keep in cache.keeps)
            for keep in list(cache.keeps):
                if keep.kind == "pin":
                    rig.unpin(keep.name, tenant=tenant)
                else:
                    rig.release_prefix(keep.name, tenant=tenant)
            assert cache.num_live == 0
        self._check_answers()
        self._check_reasons()

    def _check_answers(self) -> None:
        counters = self.rig.state.snapshot().engine
        was_computed_again = counters.preemptions + counters.recomputed > 0
        for request_id, prompt in self.prompts.items():
            tokens, final = self.rig.token_ids[request_id], self.rig.finals[request_id]
            assert tokens == expected_answer(prompt, len(tokens))
            if isinstance(final, FinishRequest):
                assert final.usage.completion_tokens == len(tokens)
                assert len(self.rig.texts[request_id]) == len(tokens)
                assert 0 <= final.usage.cached_tokens < len(prompt)
                if final.reason == "length" and not was_computed_again:
                    assert final.usage.prefilled_tokens == len(prompt) - final.usage.cached_tokens

    def _check_reasons(self) -> None:
        """Every finished request that was admitted is counted by its reason; failed ones may be."""
        told = Counter[str]()
        num_failed = 0
        for final in self.rig.finals.values():
            if not isinstance(final, FinishRequest):
                num_failed += 1
            elif final.usage.cache is not None:
                told[final.usage.cache.reason] += 1
        counted = self.rig.state.snapshot().requests_by_reason
        assert not told - counted
        assert (counted - told).total() <= num_failed

    # -- inside -------------------------------------------------------------------------------

    def _existing(self, tenant: str) -> str:
        return tenant if tenant in self.tenants else ""

    def _cache(self, tenant: str) -> CacheManager:
        return self.rig.caches[TenantName(self._existing(tenant))]

    def _a_digest(self, data: st.DataObject, tenant: str) -> str | None:
        digests = sorted(node.digest.hex() for node in self._cache(tenant).index)
        return data.draw(st.sampled_from(digests)) if digests else None


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase
