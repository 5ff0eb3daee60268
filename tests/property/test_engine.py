"""Random traffic on a tiny pool: nothing is lost, nothing is wrong, nothing leaks.

After every event the rig checks the cache's invariants, the owners of all holds, the order of the
requests and the counters; the fake device checks every KV read and write.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from om_models.manifest import Gear
from runtime_cache.engine.commands import FinishRequest
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.state import EngineLimits
from tests.support.engine_rig import EngineRig, expected_answer, small_gears

#: Prompts begin with one of these, so that many share blocks.
STEMS = (tuple(range(12)), tuple(range(6)), (7, 7, 7, 7, 7), ())
prompts = st.builds(
    lambda stem, tail: [*stem, *tail] or [9],
    st.sampled_from(STEMS),
    st.lists(st.integers(0, 1), max_size=7),
)
#: A long past only in a narrow decode gear: batches must then rotate.
LOPSIDED = GearTable(
    [Gear(1, 8, 8), Gear(1, 4, 32)], [Gear(4, 1, 8), Gear(2, 1, 16), Gear(1, 1, 32)]
)


class EngineMachine(RuleBasedStateMachine):
    """One engine; the rules are the events."""

    @initialize(
        num_blocks=st.integers(5, 14),
        watermark=st.integers(0, 3),
        max_running=st.integers(1, 6),
        is_lopsided=st.booleans(),
    )
    def start(self, num_blocks: int, watermark: int, max_running: int, is_lopsided: bool) -> None:
        self.rig = EngineRig(
            num_blocks=num_blocks,
            gears=LOPSIDED if is_lopsided else small_gears(),
            low_watermark_blocks=watermark,
            config=EngineLimits(max_waiting=5, interleave_chunk_tokens=4, max_running=max_running),
        )
        self.prompts: dict[int, list[int]] = {}
        self.prefixes = 0

    @rule(
        prompt=prompts,
        max_tokens=st.none() | st.integers(1, 12),
        deadline=st.none() | st.integers(0, 12),
    )
    def arrive(self, prompt: list[int], max_tokens: int | None, deadline: int | None) -> None:
        deadline_s = None if deadline is None else self.rig.now_s + deadline
        self.prompts[self.rig.arrive(prompt, max_tokens, deadline_s=deadline_s)] = prompt

    @rule(prompt=prompts, number=st.integers(0, 2))
    def register(self, prompt: list[int], number: int) -> None:
        self.rig.register(f"p{number}", prompt)

    @rule(number=st.integers(0, 2))
    def release_prefix(self, number: int) -> None:
        self.rig.release_prefix(f"p{number}")

    @precondition(lambda self: self.rig.batch is not None)
    @rule(seconds=st.integers(0, 2))
    def step_done(self, seconds: int) -> None:
        self.rig.step_done(seconds)

    @precondition(lambda self: self.rig.batch is not None)
    @rule(times=st.integers(3, 20))
    def several_steps_done(self, times: int) -> None:
        for _ in range(times):
            if self.rig.batch is not None:
                self.rig.step_done()

    @precondition(lambda self: self.rig.batch is not None)
    @rule(chance=st.integers(0, 2))
    def step_ends_somehow(self, chance: int) -> None:
        if chance == 0:
            self.rig.step_failed()
        else:
            self.rig.step_done()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.cancel(data.draw(st.sampled_from(sorted(self.prompts))))

    @rule(seconds=st.integers(0, 3))
    def tick(self, seconds: int) -> None:
        self.rig.tick(seconds)

    @rule(max_blocks=st.none() | st.integers(0, 3))
    def evict(self, max_blocks: int | None) -> None:
        self.rig.evict(max_blocks)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.drain()
        rig.run()
        assert rig.state.is_drained
        for number in range(3):
            rig.release_prefix(f"p{number}")
        assert rig.cache.num_live == 0
        self._check_answers()

    def _check_answers(self) -> None:
        for request_id, prompt in self.prompts.items():
            tokens, final = self.rig.token_ids[request_id], self.rig.finals[request_id]
            assert tokens == expected_answer(prompt, len(tokens))
            if isinstance(final, FinishRequest):
                assert final.usage.completion_tokens == len(tokens)
                assert len(self.rig.texts[request_id]) == len(tokens)
                assert 0 <= final.usage.cached_tokens < len(prompt)
                if final.reason == "length":
                    assert final.usage.prefilled_tokens >= len(prompt) - final.usage.cached_tokens


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase
