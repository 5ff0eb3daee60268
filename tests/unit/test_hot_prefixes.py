"""What a hot system prompt is worth under streams of one-off prompts, exactly, by policy.

[32] of facts/peers.md (d): a prompt that is asked for every so often, and a stream of prompts that
nobody asks for again, three times the capacity. The hit rate is that of the device: tokens of the
hot prompt that a step did not compute.
"""

from __future__ import annotations

import pytest

from om_models.manifest import Gear
from runtime_cache.cache.policy import CachePolicy, EvictionPolicy
from runtime_cache.engine.gears import GearTable
from tests.support.engine_rig import EngineRig

NUM_BLOCKS = 40
#: Nine blocks, the last of them with two tokens.
SYSTEM = list(range(1000, 1034))
GEARS = GearTable([Gear(1, 64, 64)], [Gear(2, 1, 64)])


def computed(rig: EngineRig, prompt: list[int]) -> int:
    """Rows that the device computes for a prompt."""
    before = rig.pool.num_rows_written
    rig.arrive(prompt, max_tokens=1)
    rig.run()
    return rig.pool.num_rows_written - before


def hit_rate(policy: EvictionPolicy, period: int, *, num_first: int = 1) -> float:
    """Of the hot prompt's tokens, whenever it is asked for later.

    It is asked for so often at first, and again after every `period` prompts of the stream, which
    have 16 tokens, four blocks, each.
    """
    rig = EngineRig(num_blocks=NUM_BLOCKS + 1, gears=GEARS, policy=CachePolicy(eviction=policy))
    num_stream = 3 * NUM_BLOCKS // 4
    saved = [37 - computed(rig, [*SYSTEM, 2000 + first, 1, 2]) for first in range(num_first)]
    for number in range(num_stream):
        if number and number % period == 0:
            saved.append(37 - computed(rig, [*SYSTEM, 3000 + number, 1, 2]))
        assert computed(rig, [10_000 + number, *range(15)]) == 16
    counters = rig.cache.counters
    assert counters.hit_tokens == sum(saved)
    assert counters.queried_tokens == num_stream * 16 + len(saved) * 37
    assert counters.evicted_blocks > 2 * NUM_BLOCKS
    later = saved[num_first:]
    return sum(later) / (len(SYSTEM) * len(later))


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("period", [1, 2, 5, 7])
def test_a_prompt_asked_for_after_every_fifth_is_always_a_hit(
    policy: EvictionPolicy, period: int
) -> None:
    """Up to every seventh: 28 blocks of others, its own ten, of 40."""
    assert hit_rate(policy, period) == 1.0


@pytest.mark.parametrize(
    ("period", "lru"),
    [(7, 1.0), (8, 32 / 34), (9, 16 / 34), (10, 0.0)],  # what is left is eight, four, no blocks
)
def test_asked_for_too_seldom_it_is_lost_tail_first_but_by_slru_only_if_it_was_never_reused(
    period: int, lru: float
) -> None:
    assert [hit_rate(policy, period) for policy in ("lru", "slru")] == [lru, lru]
    twice = [hit_rate(policy, period, num_first=2) for policy in ("lru", "slru")]
    assert twice == [lru, 1.0]
