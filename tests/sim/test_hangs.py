"""A step that does not end: nothing of it is reused before the device is idle, whoever asks.

The model of `tests.support.coded_model` says of every row that is read whether it is the right one;
the pool's hand-outs are watched against the software device's own queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.process import current_stream
from runtime_cache.engine import recovery
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.commands import FailRequest, FinishRequest
from runtime_cache.engine.request import BadLogits, Sampled
from runtime_cache.errors import DeviceHung, StepTimeout
from runtime_cache.ids import RequestId
from runtime_cache.runtime import Runtime
from tests.support import handing_out
from tests.support.coded_model import CODED_VARIANTS, answer, make_coded_bundle
from tests.support.served import Ear, Served, config_for, opened_runtime, random_prompt

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: Two chunks, then decode steps.
PROMPT, OTHER = random_prompt(1, 41), random_prompt(2, 30)
NUM_TOKENS = 4


class Hanging(Served):
    """Lets one step hang until it is told to end.

    Attributes:
        gate: holds the device's stream from the step on.
    """

    def __init__(self, runtime: Runtime, which: int) -> None:
        super().__init__(runtime)
        assert runtime._device is not None
        self.gate = inspect.hold(runtime._device.stream)
        self._is_holding = False
        self._which = which

    def _run_step(self, batch: StepBatch) -> Awaitable[tuple[Sampled | BadLogits, ...]]:
        if len(self.batches) == self._which:
            self._impatient(1)
            self._is_holding = True
            self.runtime.thread.start(self.gate.__enter__)
        return super()._run_step(batch)

    async def hung(self) -> None:
        """Until the step hangs; from then on the device has time again."""
        while self.engine.condition != "hung":  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._impatient(60_000)

    def end_hang(self) -> None:
        """May be called twice, and where nothing hangs."""
        if self._is_holding:
            self._is_holding = False
            self.gate.__exit__(None, None, None)

    def tokens_of(self, ear: Ear) -> list[int]:
        return [token for piece in ear.emitted for token in piece.token_ids]

    def _impatient(self, timeout_ms: int) -> None:
        self.runtime.executor._step_timeout_ms = timeout_ms


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the device thread between two turns does not wait long."""
    monkeypatch.setattr(recovery, "TURN_MS", 10)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_coded_bundle(tmp_path_factory.mktemp("hang"), CODED_VARIANTS["fp32"])


@asynccontextmanager
async def hanging(bundle: Bundle, which: int, **changes: object) -> AsyncIterator[Hanging]:
    async with opened_runtime(config_for(bundle, **changes)) as runtime:  # type: ignore[arg-type]
        host = Hanging(runtime, which)
        stream = await runtime.thread.run(current_stream, runtime._device.stream)  # type: ignore[union-attr]
        handing_out.watch(runtime.cache, lambda: not stream.is_idle)
        try:
            yield host
        finally:
            host.end_hang()  # of a test that failed: to close waits for it
        host.check_idle()
        inspect.clear()  # expired waits count as misuses


@contextmanager
def given_up(runtime: Runtime, which: int) -> Iterator[Hanging]:
    """For a runtime that is closed while its step hangs; the reset at the end waits for it."""
    host = Hanging(runtime, which)
    try:
        yield host
    finally:
        host.end_hang()
        inspect.reset()


@contextmanager
def nothing_moves(host: Hanging) -> Iterator[None]:
    """Blocks, index and steps are afterwards what they were before."""
    cache = host.runtime.cache

    def seen() -> tuple[object, ...]:
        free = cache.pool.free_blocks
        return cache.num_live, cache.num_evictable, free, len(cache.index), len(host.batches)

    before = seen()
    yield
    assert seen() == before


@pytest.mark.parametrize("which", range(5))
async def test_nothing_of_a_hung_step_is_reused_before_the_device_is_idle(
    bundle: Bundle, which: int
) -> None:
    """Two chunks or one of three decode steps hang; the pool has no room for another prompt."""
    async with hanging(bundle, which, num_blocks=13) as host:
        ear = host.submit(PROMPT, NUM_TOKENS)
        await host.hung()
        said = host.tokens_of(ear)
        with nothing_moves(host):
            late = [host.submit(OTHER, NUM_TOKENS), host.submit(PROMPT, 1)]
            with pytest.raises(StepTimeout):  # an operator who wants to verify
                await host.runtime.read_kv(4, 1)
            await host.runtime.memory.look()
            assert not ear.final.done()
        host.end_hang()
        for one, prompt, num_tokens in (
            (ear, PROMPT, NUM_TOKENS),
            (late[0], OTHER, NUM_TOKENS),
            (late[1], PROMPT, 1),
        ):
            assert isinstance(await one.final, FinishRequest)
            assert host.tokens_of(one) == answer(prompt, num_tokens)
        assert host.tokens_of(ear)[: len(said)] == said
        counters = host.engine.state.snapshot().engine
        assert (counters.hung_steps, counters.failed_steps, counters.recomputed) == (1, 1, 1)


@pytest.mark.parametrize("which", [0, 3])
async def test_a_request_that_is_cancelled_meanwhile_leaves_its_blocks_to_the_step(
    bundle: Bundle, which: int
) -> None:
    async with hanging(bundle, which, num_blocks=13) as host:
        ear = host.submit(PROMPT, NUM_TOKENS)
        await host.hung()
        with nothing_moves(host):
            host.engine.cancel(RequestId(1), "client")
            final = await ear.final
            assert isinstance(final, FinishRequest)
            assert final.reason == "cancelled"
            late = host.submit(OTHER, NUM_TOKENS)
            await host.runtime.memory.look()
        host.end_hang()
        assert isinstance(await late.final, FinishRequest)
        assert host.tokens_of(late) == answer(OTHER, NUM_TOKENS)


async def test_requests_that_are_not_computed_again_are_told_at_once(bundle: Bundle) -> None:
    async with hanging(bundle, 2, on_failed_step="fail") as host:
        ear = host.submit(PROMPT, NUM_TOKENS)
        await host.hung()
        final = await ear.final
        assert isinstance(final, FailRequest)
        assert (final.code, final.retryable) == ("step_timeout", True)
        assert host.runtime.cache.num_live > 0
        host.end_hang()
        assert (await host.greedy(PROMPT, NUM_TOKENS)).token_ids == tuple(
            answer(PROMPT, NUM_TOKENS)
        )


async def test_a_hang_beyond_its_limit_ends_everything(bundle: Bundle) -> None:
    inspect.reset()
    limits = {"step_timeout_ms": 1, "hang_limit_ms": 1}
    runtime = await Runtime.open(config_for(bundle, device=limits, max_running=1))
    with given_up(runtime, 0) as host:
        ears = [host.submit(PROMPT, NUM_TOKENS), host.submit(OTHER, NUM_TOKENS)]
        finals = [await ear.final for ear in ears]
        assert [getattr(final, "code", "") for final in finals] == ["device_hung", "device_hung"]
        assert isinstance(host.engine.fatal.result(), DeviceHung)
        assert host.engine.condition == "lost"
        assert await host.engine.drain(0) == 0
        num_alive = inspect.report().num_alive
        with pytest.raises(StepTimeout):  # what the step uses is not given back
            await runtime.close()
        assert inspect.report().num_alive == num_alive


async def test_a_drain_does_not_wait_for_a_hung_step(bundle: Bundle) -> None:
    inspect.reset()
    runtime = await Runtime.open(config_for(bundle))
    with given_up(runtime, 1) as host:
        ear = host.submit(PROMPT, NUM_TOKENS)
        await host.hung()
        assert await host.engine.drain(0) == 1
        final = await ear.final
        assert isinstance(final, FinishRequest)
        assert final.reason == "shutdown"
        assert isinstance(host.engine.fatal.result(), DeviceHung)
        with pytest.raises(StepTimeout):
            await runtime.close()
