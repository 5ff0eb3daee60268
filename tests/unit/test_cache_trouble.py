"""Trouble on the cache's side costs time, never a right answer, and is counted.

[18, 65] of facts/peers.md (d). Steps that fail are in `test_fault_paths` and `test_coded_kv`.
"""

from __future__ import annotations

import hashlib
import random

import pytest

from runtime_cache.cache import hashing
from runtime_cache.cache.prefix_index import PrefixIndex
from tests.support.engine_rig import EngineRig, expected_answer, limits

#: Two blocks and a token.
PROMPT = list(range(10, 19))


class FewDigests:
    """A hash function with so many values."""

    num_values = 1

    def __init__(self, data: bytes) -> None:
        self._value = hashlib.sha256(data).digest()[0] % self.num_values

    def digest(self) -> bytes:
        return bytes([self._value]) * 32


@pytest.mark.parametrize("num_values", [1, 2, 7])
def test_whatever_collides_is_computed(monkeypatch: pytest.MonkeyPatch, num_values: int) -> None:
    """Every answer is that of an engine without any cache; the rig looks at every row read."""
    monkeypatch.setattr(FewDigests, "num_values", num_values)
    monkeypatch.setattr(hashing, "sha256", FewDigests)
    rig = EngineRig(num_blocks=17, config=limits(max_running=3))
    chance = random.Random(num_values)
    prompts = [
        [*range(chance.choice((0, 5, 13))), *(chance.randrange(3) for _ in range(6))]
        for _ in range(60)
    ]
    for prompt in prompts:
        rig.arrive(prompt, max_tokens=5)
        for _ in range(chance.randrange(4)):
            if rig.batch is not None:
                rig.step_done()
    rig.run()
    for request_id, prompt in enumerate(prompts, 1):
        assert rig.token_ids[request_id] == expected_answer(prompt, 5)
    snapshot = rig.state.snapshot()
    assert snapshot.cache.collisions > 20
    assert snapshot.cache.hit_tokens > 0  # what is found is still reused
    assert snapshot.num_live_blocks == 0
    assert len(rig.cache.index) <= num_values


def test_a_collision_is_told_as_what_it_is_for_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss: nothing cached begins like the prompt."""
    monkeypatch.setattr(hashing, "sha256", FewDigests)
    rig = EngineRig()
    rig.arrive(range(8), max_tokens=1)
    rig.run()
    for _ in range(2):
        request_id = rig.arrive(range(20, 28), max_tokens=1)
        before = rig.pool.num_rows_written
        rig.run()
        report = rig.finished(request_id).usage.cache
        assert report is not None
        assert (report.cached_tokens, report.reason) == (0, "cold")
        assert rig.pool.num_rows_written - before == 8
    assert rig.cache.counters.collisions >= 3  # met by each prompt, whenever it is committed


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_lookup_that_fails_is_a_miss(monkeypatch: pytest.MonkeyPatch, is_waiting: bool) -> None:
    """The request is computed without the cache; the others, and the next ones, are not."""
    rig = EngineRig(config=limits(max_running=1))
    rig.arrive(PROMPT, max_tokens=2)
    if not is_waiting:
        rig.run()
    with monkeypatch.context() as broken:
        broken.setattr(PrefixIndex, "extend_match", _raise)
        rig.arrive([*PROMPT, 50], max_tokens=2)
        rig.run()
    final = rig.finished(2)
    assert final.usage.cache is not None
    assert (final.usage.cache.reason, final.usage.cached_tokens) == ("disabled", 0)
    assert final.usage.cache.detail == "looking it up failed: a bug of the daemon"
    rig.arrive([*PROMPT, 50], max_tokens=2)
    rig.run()
    assert rig.finished(3).usage.cached_tokens == 9  # of the first request
    for request_id, prompt in ((1, PROMPT), (2, [*PROMPT, 50]), (3, [*PROMPT, 50])):
        assert rig.token_ids[request_id] == expected_answer(prompt, 2)
    assert rig.cache.counters.failed_lookups >= 1


def test_a_preempted_request_whose_lookup_fails_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = EngineRig(num_blocks=6)
    prompts = [list(range(start, start + 7)) for start in (10, 30)]
    for prompt in prompts:
        rig.arrive(prompt, max_tokens=8)
    while not rig.state.snapshot().engine.preemptions:
        rig.step_done()
    monkeypatch.setattr(PrefixIndex, "extend_match", _raise)
    rig.run()
    for request_id, prompt in enumerate(prompts, 1):
        assert rig.token_ids[request_id] == expected_answer(prompt, 8)
        report = rig.finished(request_id).usage.cache
        assert report is not None
        assert report.reason == "cold"  # of its first admission


def _raise(*_: object) -> None:
    raise ZeroDivisionError("a bug")
