"""The executor with a real graph: tiny Llama bundles against the numpy oracle, hit against miss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from om_models.manifest import Gear
from om_models.plan import ConvertOptions
from om_models.reference import FloatArray, KvCache
from runtime_cache.engine.batch import BatchRow, SlotRun, StepBatch
from runtime_cache.engine.executor import Executor
from runtime_cache.ids import RequestId, StepId
from tests.support.devices import opened
from tests.support.tiny import make_bundle, tiny_reference

BLOCK = 16
CHUNK, PAST = 16, 64
PREFILL, DECODE = Gear(1, CHUNK, PAST), Gear(4, 1, PAST)
OPTIONS = {
    "fused": ConvertOptions(
        "sim", kv_tokens=512, dtype="float32", gears="prefill=8,16@64 decode=1,4@64"
    ),
    "split, two groups, int64": ConvertOptions(
        "sim",
        kv_tokens=512,
        dtype="float32",
        gears="prefill=8,16@64 decode=1,4@64",
        layout="split",
        num_kv_groups=2,
        index_dtype="int64",
    ),
}
#: fp32 on both sides, which add up in different orders.
BOUND = 1e-4
REFERENCE = tiny_reference()


@pytest.fixture(scope="module", params=OPTIONS)
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    bundle = make_bundle(tmp_path_factory.mktemp("tiny"), options=OPTIONS[request.param])
    with opened(soc_name=bundle.manifest.soc_version) as device:
        executor = Executor.open(device, bundle.manifest, bundle.path, block_size=BLOCK)
        yield executor
        executor.close()


class Story:
    """One sequence in given blocks, told to the executor and to the oracle alike."""

    def __init__(self, ids: list[int], blocks: list[int]) -> None:
        self.ids = ids
        self.slots = [block * BLOCK + offset for block in blocks for offset in range(BLOCK)]
        self.num_fed = 0

    def feed(self, count: int) -> BatchRow:
        """A row with the next `count` ids; they stay inside one block each."""
        first, self.num_fed = self.num_fed, self.num_fed + count
        return BatchRow(
            request_id=RequestId(0),
            token_ids=np.array(self.ids[first : self.num_fed], np.int32),
            num_past=first,
            past_slots=np.array(self.slots[:first], np.int32),
            appends=tuple(SlotRun(slot, 1) for slot in self.slots[first : self.num_fed]),
            sampler=cast("None", object()),
        )

    def expected(self) -> FloatArray:
        """The oracle's logits after what was fed."""
        return REFERENCE.forward(np.array(self.ids[: self.num_fed]), KvCache())[-1]


def random_ids(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.RandomState(seed).randint(0, 256, count)]


def prefill(executor: Executor, story: Story, count: int) -> FloatArray:
    return executor.run(StepBatch(StepId(0), "prefill", PREFILL, (story.feed(count),)))[0].copy()


def test_chunks_then_single_tokens_equal_the_oracle(executor: Executor) -> None:
    story = Story(random_ids(1, 40), [2, 9, 4])
    for count in (CHUNK, 5, 1, CHUNK - 1):
        np.testing.assert_allclose(prefill(executor, story, count), story.expected(), atol=BOUND)
    for _ in range(3):
        logits = executor.run(StepBatch(StepId(0), "decode", Gear(1, 1, PAST), (story.feed(1),)))
        np.testing.assert_allclose(logits[0], story.expected(), atol=BOUND)


def test_a_batch_of_unequal_lengths_equals_the_oracle(executor: Executor) -> None:
    stories = [
        Story(random_ids(seed, 30), [3 * seed, 3 * seed + 1]) for seed, _ in enumerate("abc", 1)
    ]
    for story, count in zip(stories, (1, 7, CHUNK), strict=True):
        prefill(executor, story, count)
    for _ in range(4):
        rows = tuple(story.feed(1) for story in stories)
        logits = executor.run(StepBatch(StepId(0), "decode", DECODE, rows))
        for row, story in zip(logits, stories, strict=True):
            np.testing.assert_allclose(row, story.expected(), atol=BOUND)


@pytest.mark.parametrize("num_shared", range(1, CHUNK))
def test_a_hit_of_any_length_equals_a_miss(num_shared: int, executor: Executor) -> None:
    """The device computes only what is new, and answers the same."""
    ids = random_ids(99, CHUNK)
    cold = Story(ids, [20])
    miss = prefill(executor, cold, CHUNK)
    warm = Story(ids, [21])
    warm.slots = cold.slots[:num_shared] + warm.slots
    warm.num_fed = num_shared
    before = executor.counters["prefill"].rows_appended
    hit = prefill(executor, warm, CHUNK - num_shared)
    assert executor.counters["prefill"].rows_appended - before == CHUNK - num_shared
    np.testing.assert_allclose(hit, miss, atol=BOUND)
    assert hit.argmax() == miss.argmax()
