"""A set of tasks scores the same with the cache off, on, and when requests give way at every step.

[2, 43] of facts/peers.md (d): a peer's score fell from 0.80 to 0.00 under load. The score is how
many answers are those of the oracle, a numpy Llama over the same weights; all tasks are asked at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

import pytest

from om_models.bundle import Bundle
from runtime_cache.engine.scheduler import Decision
from tests.support.served import Comparison, Greedy, Served, oracle, random_prompt, served
from tests.support.tiny import tiny_reference

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NUM_TOKENS = 8
SYSTEM = random_prompt(11, 34)
#: One system prompt and questions of several lengths, two of them equal.
TASKS = [SYSTEM + random_prompt(n % 5, 1 + 4 * (n % 5)) for n in range(6)]


class TaskSet:
    """The tasks, their right answers, and how runs compare with each other."""

    def __init__(self) -> None:
        self.comparison = Comparison()
        self._right = [oracle(tiny_reference(), prompt, NUM_TOKENS) for prompt in TASKS]

    async def score(self, host: Served) -> int:
        """How many of the answers are right; ties within the bound would be counted."""
        answers = await asyncio.gather(*(host.greedy(prompt, NUM_TOKENS) for prompt in TASKS))
        for answer, (tokens, margins) in zip(answers, self._right, strict=True):
            self.comparison.check(answer.token_ids, tokens, margins)
        return sum(self._is_right(*pair) for pair in zip(answers, self._right, strict=True))

    def _is_right(self, answer: Greedy, right: tuple[list[int], list[float]]) -> bool:
        return answer.token_ids == tuple(right[0])


@contextmanager
def giving_way(host: Served, when: Callable[[int], bool]) -> Iterator[None]:
    """All admitted requests give their blocks up before the steps for which this is true.

    Args:
        when: by the number of steps so far.
    """
    scheduler = host.engine.state._scheduler
    decide, first = scheduler.decide, len(host.batches)

    def decide_after_that(now_s: float) -> Decision | None:
        if when(len(host.batches) - first):
            for sequence in reversed(scheduler.running):
                scheduler._preempt(sequence)
        return decide(now_s)

    with mock.patch.object(scheduler, "decide", decide_after_that):
        yield


@asynccontextmanager
async def hosted(bundle: Bundle, **changes: Any) -> AsyncIterator[tuple[Served, TaskSet]]:
    async with served(bundle, **changes) as host:
        yield host, TaskSet()


def num_preemptions(host: Served) -> int:
    return host.engine.state.snapshot().engine.preemptions


async def test_with_the_cache_off_and_on(tiny_bundle: Bundle, record_property: Any) -> None:
    num_prompt_rows = sum(map(len, TASKS))
    # The first prompt; of the others what is behind the system prompt; the last equals the first.
    num_new_rows = len(TASKS[0]) + sum(len(prompt) - len(SYSTEM) for prompt in TASKS[1:5]) + 1
    # The last token of an answer is never fed.
    num_answer_rows = len(TASKS) * (NUM_TOKENS - 1)
    for is_cached, computed in ((False, [num_prompt_rows] * 2), (True, [num_new_rows, len(TASKS)])):
        async with hosted(tiny_bundle, is_cached=is_cached) as (host, tasks):
            for num_rows in computed:
                before = host.rows_appended()
                assert await tasks.score(host) == len(TASKS)
                assert host.rows_appended() - before == num_rows + num_answer_rows
            tasks.comparison.report(record_property)


@pytest.mark.parametrize("is_cached", [True, False])
async def test_when_all_give_way_at_any_one_step(
    tiny_bundle: Bundle, is_cached: bool, record_property: Any
) -> None:
    async with hosted(tiny_bundle, is_cached=is_cached) as (host, tasks):
        await tasks.score(host)
        for step in range(1, len(host.batches)):
            host.engine.evict(None)
            before = num_preemptions(host)
            with giving_way(host, lambda number, step=step: number == step):
                assert await tasks.score(host) == len(TASKS)
            assert num_preemptions(host) > before
        tasks.comparison.report(record_property)


async def test_when_all_give_way_at_every_step(tiny_bundle: Bundle, record_property: Any) -> None:
    """Each step's work is kept, so that all of them end nevertheless."""
    async with hosted(tiny_bundle) as (host, tasks):
        with giving_way(host, lambda number: True):
            assert await tasks.score(host) == len(TASKS)
        assert num_preemptions(host) > len(host.batches)
        snapshot = host.engine.state.snapshot()
        assert snapshot.cache.queried_tokens == sum(map(len, TASKS))
        tasks.comparison.report(record_property)
