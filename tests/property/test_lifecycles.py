"""Many whole lives of requests, one after another and together: at idle nothing is held.

[38] of facts/peers.md (d): live = 0, the gauges add up, and the counters are those of the log.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from runtime_cache.cache.policy import CachePolicy
from runtime_cache.engine.commands import FailRequest, FinishRequest
from tests.support.engine_rig import EngineRig, expected_answer, limits

NUM_BLOCKS = 41


def live(rig: EngineRig, chance: random.Random, num_requests: int) -> None:
    """Let so many requests come and go in whatever way."""
    for _ in range(num_requests):
        stem = list(range(chance.choice((0, 3, 8, 13))))
        prompt = stem + [chance.randrange(4) for _ in range(chance.randrange(1, 8))]
        rig.arrive(
            prompt,
            max_tokens=chance.randrange(1, 10),
            tenant=chance.choice(("a", "b")),
            use_cache=chance.random() < 0.9,
            deadline_s=rig.now_s + chance.randrange(1, 30) if chance.random() < 0.2 else None,
        )
        for _ in range(chance.randrange(4)):
            step(rig, chance)
        if chance.random() < 0.1:
            rig.cancel(chance.randrange(1, len(rig.requests) + 1))
        if chance.random() < 0.02:
            rig.evict(chance.randrange(1, 20))


def step(rig: EngineRig, chance: random.Random) -> None:
    if rig.batch is None:
        return
    luck = chance.random()
    if luck < 0.01:
        rig.step_failed()
    else:
        rig.step_done(bad=rig.batch.rows[0].request_id if luck < 0.02 else None)


@pytest.mark.parametrize(
    ("num_requests", "eviction"),
    [
        (300, "lru"),
        (300, "slru"),
        pytest.param(10_000, "lru", marks=pytest.mark.long),
        pytest.param(10_000, "slru", marks=pytest.mark.long),
    ],
)
def test_nothing_is_held_after_many_lives(num_requests: int, eviction: str) -> None:
    policy = CachePolicy(eviction=eviction, low_watermark_blocks=2, high_watermark_blocks=4)  # type: ignore[arg-type]
    rig = EngineRig(
        num_blocks=NUM_BLOCKS,
        tenants=("a", "b"),
        policy=policy,
        config=limits(max_waiting=12, max_running=6, max_overtakes=3),
    )
    chance = random.Random(num_requests)
    live(rig, chance, num_requests)
    rig.run()
    snapshot = rig.state.snapshot()
    assert rig.state.request_ids() == []
    assert snapshot.num_live_blocks == 0
    assert snapshot.num_evictable_blocks + snapshot.num_free_blocks == NUM_BLOCKS - 1
    check_log(rig)
    rig.evict()
    assert rig.gauges() == (0, 0, NUM_BLOCKS - 1)


def check_log(rig: EngineRig) -> None:
    """The exported counters, recomputed from requests and answers."""
    counters = rig.state.snapshot().engine
    ends = Counter(
        final.reason if isinstance(final, FinishRequest) else final.code
        for final in rig.finals.values()
    )
    assert counters.arrived == len(rig.finals) == len(rig.requests)
    assert counters.finished == ends["length"]
    assert counters.cancelled == counters.cancelled_by["client"] == ends["cancelled"]
    assert counters.expired == ends["deadline"]
    assert counters.failed == ends["device"] + ends["bad_logits"]
    assert counters.refused == ends["queue_full"]
    assert counters.prefill_tokens + counters.decode_tokens <= rig.pool.num_rows_written
    for request_id, final in rig.finals.items():
        tokens = rig.token_ids[request_id]
        assert tokens == expected_answer(rig.requests[request_id].prompt.tolist(), len(tokens))
        if isinstance(final, FailRequest):
            assert final.retryable or final.code == "bad_logits"
