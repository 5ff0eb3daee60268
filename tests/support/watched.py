"""A served runtime whose steps are watched: the logits of each; and poison where nobody's KV is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from om_models.bundle import Bundle
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.executor import Executor
from runtime_cache.engine.request import Sampled
from runtime_cache.ids import BlockId, RequestId
from runtime_cache.runtime import Runtime
from tests.support.served import Comparison, Greedy, Served, config_for, opened_runtime

Logits = npt.NDArray[np.float32]
#: NaN in either KV type, every byte of it.
POISON_BYTE = 0xFF


@dataclass(frozen=True)
class Answered:
    """A greedy answer, and the logits that were computed for it.

    Attributes:
        logits: what followed so many tokens; several if it was computed again.
    """

    greedy: Greedy
    logits: Mapping[int, list[Logits]]

    def check_like(self, other: Answered, comparison: Comparison) -> float:
        """Compare with another answer: tokens, log-probabilities, and all logits.

        Returns:
            The largest difference of two logits that should be the same.
        """
        comparison.check_runs(self.greedy, other.greedy)
        worst = 0.0
        pairs = zip(self.greedy.token_ids, other.greedy.token_ids, strict=True)
        for length, (one, two) in enumerate(pairs, min(self.logits)):
            difference = np.abs(self.logits[length][-1] - other.logits[length][-1]).max()
            assert difference <= comparison.bound
            worst = max(worst, float(difference))
            if one != two:  # a tie: from here on they are answers to different questions
                break
        return worst


class Watched(Served):
    """Keeps what the device answers, and overwrites all blocks that nobody has before each step.

    Attributes:
        logits: of each request, by the number of tokens they follow.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.logits: dict[RequestId, dict[int, list[Logits]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._free_blocks: tuple[BlockId, ...] = ()

    @property
    def last_id(self) -> RequestId:
        """Of the request submitted last."""
        return RequestId(self._next_id - 1)

    async def ask(self, prompt: Sequence[int], max_tokens: int = 6, **request: Any) -> Answered:
        """As `greedy`, with the logits."""
        request_id = RequestId(self._next_id)
        greedy = await self.greedy(prompt, max_tokens, **request)  # takes that id at once
        return Answered(greedy, self.logits[request_id])

    def rows_copied(self) -> int:
        """Token rows the device has copied from one place of the pool to another."""
        return sum(counters.rows_copied for counters in self.runtime.executor.counters.values())

    def _run_step(self, batch: StepBatch) -> Awaitable[tuple[Sampled, ...]]:
        self._free_blocks = tuple(
            block for cache in self.runtime.caches.values() for block in cache.pool.free_blocks
        )
        return super()._run_step(batch)

    def watching(self, run: Callable[[StepBatch], Logits]) -> Callable[[StepBatch], Logits]:
        """What stands in for the executor's `run`; called on the device thread."""

        def watched(batch: StepBatch) -> Logits:
            poison(self.runtime.executor, self._free_blocks)
            logits = run(batch)
            wanted = [row for row in batch.rows if row.sampler is not None]
            for row, values in zip(wanted, logits, strict=True):
                num_tokens = row.num_past + len(row.token_ids)
                self.logits[row.request_id][num_tokens].append(values.copy())
            return logits

        return watched


def poison(executor: Executor, blocks: tuple[BlockId, ...]) -> None:
    """Fills blocks with NaN, on the device thread and at once."""
    layout, pool = executor.layout, executor._pool
    num_bytes = layout.block_size * layout.group_token_bytes
    for group in range(layout.num_groups):
        for block in blocks:
            ptr = pool.run_ptr(group, block * layout.block_size, layout.block_size)
            code = executor._device.acl.rt.memset(ptr, num_bytes, POISON_BYTE, num_bytes)
            assert code == 0


@asynccontextmanager
async def watched(bundle: Bundle, **changes: Any) -> AsyncIterator[Watched]:
    """As `served.served`, watched."""
    async with opened_runtime(config_for(bundle, **changes)) as runtime:
        host, executor = Watched(runtime), runtime.executor
        with mock.patch.object(executor, "run", host.watching(executor.run)):
            yield host
        host.check_idle()
