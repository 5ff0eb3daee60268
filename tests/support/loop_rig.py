"""An `EngineLoop` on a device that ends its steps when told to, and sinks that remember."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.commands import EmitTokens, FailRequest, FinishRequest
from runtime_cache.engine.limits import EngineLimits
from runtime_cache.engine.loop import Answer, EngineLoop
from runtime_cache.engine.recovery import Recovery
from runtime_cache.engine.request import Detokenizer, NewRequest, Sampled, SamplingParams
from runtime_cache.engine.state import EngineState
from runtime_cache.ids import PrefixId, RequestId
from tests.support.engine_rig import FakePool, Letters, make_caches, small_gears


class Clock:
    """Stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class RunningStep:
    """A step on the fake device."""

    def __init__(self, batch: StepBatch, pool: FakePool) -> None:
        self.batch = batch
        self.future: asyncio.Future[tuple[Sampled, ...]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pool = pool

    @property
    def request_ids(self) -> list[int]:
        return [int(row.request_id) for row in self.batch.rows]

    def finish(self) -> None:
        self.future.set_result(self._pool.run(self.batch))

    def finish_with(self, *samples: Sampled) -> None:
        self.future.set_result(samples)

    def fail(self, error: Exception) -> None:
        self._pool.poison(self.batch)
        self.future.set_exception(error)


class Heard:
    """The sink of one request.

    Attributes:
        answers: all of them, in order.
        final: done with the last one.
        then: called with each answer after it was noted; what a sink may do besides.
        problems: what the engine did wrong. Kept rather than raised: it survives sinks that raise.
    """

    def __init__(self, request_id: RequestId, journal: list[str]) -> None:
        self.problems: list[str] = []
        self.answers: list[Answer] = []
        self.final: asyncio.Future[FinishRequest | FailRequest]
        self.final = asyncio.get_running_loop().create_future()
        self.then: Callable[[Answer], None] = lambda answer: None
        self.request_id = request_id
        self._journal = journal
        self._is_called = False

    def __call__(self, answer: Answer) -> None:
        if self._is_called:
            self.problems.append(f"{answer} came before the sink had returned")
        if self.final.done():
            self.problems.append(f"{answer} came after the final answer")
            return
        self._is_called = True
        try:
            self._take(answer)
        finally:
            self._is_called = False

    def _take(self, answer: Answer) -> None:
        self._journal.append(f"{type(answer).__name__} {self.request_id}")
        self.answers.append(answer)
        if not isinstance(answer, EmitTokens):
            self.final.set_result(answer)
        self.then(answer)

    @property
    def token_ids(self) -> list[int]:
        emitted = [a for a in self.answers if isinstance(a, EmitTokens)]
        return [token for answer in emitted for token in answer.token_ids]

    async def finished(self) -> FinishRequest:
        final = await self.final
        assert isinstance(final, FinishRequest), final
        return final

    async def failed(self) -> FailRequest:
        final = await self.final
        assert isinstance(final, FailRequest), final
        return final


class LoopRig:
    """The engine, its device, its clock.

    Attributes:
        journal: steps begun and answers delivered, in order.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 24,
        max_running: int | None = None,
        on_failed_step: Literal["recompute", "fail"] = "fail",
        recovery: Recovery | None = None,
    ) -> None:
        caches = make_caches(num_blocks)
        (self.cache,) = caches.values()
        config = EngineLimits(
            max_waiting=8,
            interleave_chunk_tokens=8,
            max_running=max_running,
            on_failed_step=on_failed_step,
        )
        state = EngineState(caches, small_gears(), config)
        self.clock = Clock()
        self.journal: list[str] = []
        self.engine = EngineLoop(state, self._begin, self.clock, recovery)
        self._pool = FakePool([self.cache])
        self._begun: asyncio.Queue[RunningStep] = asyncio.Queue()
        self._next_id = 1
        self._heard: list[Heard] = []

    @property
    def problems(self) -> list[str]:
        """What the sinks found wrong."""
        return [problem for heard in self._heard for problem in heard.problems]

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 3,
        *,
        deadline_s: float | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> Heard:
        """Submit a greedy request."""
        heard = self._new_sink()
        request = NewRequest(
            heard.request_id,
            np.asarray(prompt, dtype=np.int32),
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            detokenizer=detokenizer or Letters(),
            deadline_s=deadline_s,
        )
        self.engine.submit(request, heard)
        return heard

    def register(self, prefix_id: str, prompt: Sequence[int]) -> Heard:
        """Submit a registration."""
        heard = self._new_sink()
        request = NewRequest(
            heard.request_id,
            np.asarray(prompt, dtype=np.int32),
            SamplingParams(temperature=0.0),
            kind="register",
            prefix_id=PrefixId(prefix_id),
        )
        self.engine.submit(request, heard)
        return heard

    async def step(self) -> RunningStep:
        """The next step, as soon as it has begun."""
        return await self._begun.get()

    async def run(self, *heard: Heard) -> None:
        """End steps as they come until all of these have their final answer."""
        answers = asyncio.gather(*(one.final for one in heard))
        while not answers.done():
            step = asyncio.ensure_future(self.step())
            await asyncio.wait({step, answers}, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                step.result().finish()
            else:
                step.cancel()

    @property
    def is_idle(self) -> bool:
        """No step is begun that nobody has taken."""
        return self._begun.empty()

    def _new_sink(self) -> Heard:
        self._next_id += 1
        heard = Heard(RequestId(self._next_id - 1), self.journal)
        self._heard.append(heard)
        return heard

    def _begin(self, batch: StepBatch) -> asyncio.Future[tuple[Sampled, ...]]:
        step = RunningStep(batch, self._pool)
        self.journal.append(f"step {batch.step_id}")
        self._begun.put_nowait(step)
        return step.future
