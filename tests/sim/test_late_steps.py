"""A device that is late: nothing is seen, reused or handed out before the step that wrote it ended.

[6, 43] of facts/peers.md (d). The model of `tests.support.coded_model` says of every row that is
read whether it is the right one; blocks that nobody has are poisoned before every step.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.aclsim.streams import Stream, Task
from runtime_cache.engine.commands import FinishRequest
from runtime_cache.ids import DEFAULT_TENANT, RequestId
from tests.sim.test_coded_kv import check
from tests.support.served import Served, random_prompt
from tests.support.watched import Watched, watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: Two chunks: 32 tokens and 9.
PROMPT = random_prompt(1, 41)
EXECUTE = "acl.mdl.execute_async"


@asynccontextmanager
async def standing_still(host: Served) -> AsyncIterator[None]:
    """Whatever is queued on the device from now on has to wait until the block ends."""
    runtime = host.runtime
    assert runtime._device is not None
    gate = inspect.hold(runtime._device.stream)
    await runtime.thread.run(gate.__enter__)
    try:
        yield
    finally:
        gate.__exit__(None, None, None)


async def turns(number: int = 50) -> None:
    """Let the event loop do whatever it could do without the device."""
    for _ in range(number):
        await asyncio.sleep(0)


def reason(host: Served) -> str:
    """What the cache says of the prompt now."""
    tokens = np.array(PROMPT, dtype=np.int32)
    return host.engine.explain(DEFAULT_TENANT, tokens).report.reason


async def test_a_second_request_reads_only_what_has_been_written(coded_bundle: Bundle) -> None:
    async with watched(coded_bundle) as host:
        async with standing_still(host):
            asked = [asyncio.ensure_future(check(host, PROMPT)) for _ in range(2)]
            await turns()
            # The first chunk is queued; until it is done there is nothing to find.
            assert [len(batch.rows[0].token_ids) for batch in host.batches] == [32]
            assert (host.rows_appended(), len(host.runtime.cache.index)) == (0, 0)
            assert reason(host) == "cold"
        assert await asyncio.gather(*asked) == [0, 40]
        first, second = (batch.rows[0] for batch in host.batches[:2])
        assert (first.request_id, second.request_id, second.num_past) == (1, 1, 32)
        ids = [batch.rows[-1].request_id for batch in host.batches]
        assert ids.index(RequestId(2)) >= 2


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_cancelled_producer_publishes_only_what_was_written(
    coded_bundle: Bundle, is_failing: bool
) -> None:
    """It is answered at once, but its step goes on, and may fail; a waiter takes over then."""
    async with watched(coded_bundle) as host:
        if is_failing:
            faults.inject(EXECUTE, code=507011, when="run")
        async with standing_still(host):
            ear = host.submit(PROMPT, 6)
            await turns()
            host.engine.cancel(host.last_id, "client")
            final = await ear.final
            assert isinstance(final, FinishRequest)
            assert final.reason == "cancelled"
            cache = host.runtime.cache
            assert (len(cache.index), cache.num_live) == (0, 11)  # the step still writes there
            asked = asyncio.ensure_future(check(host, PROMPT))
            await turns()
            assert (len(host.batches), len(cache.index), reason(host)) == (1, 0, "cold")
        assert await asked == (0 if is_failing else 32)
        assert host.rows_appended() == 5 + (41 if is_failing else 32 + 9)
        inspect.clear()  # what ran behind the dropped work read what nobody had written


async def test_right_rows_whatever_the_device_is_late_with(
    coded_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any copy and any run may take some time, and blocks change owners."""
    chance, do = random.Random(1), Stream._do

    def do_late(stream: Stream, task: Task) -> None:
        if chance.random() < 0.2:
            time.sleep(chance.random() / 1000)
        do(stream, task)

    monkeypatch.setattr(Stream, "_do", do_late)
    prompts = [PROMPT[: 5 * n] + random_prompt(n, 38 - 5 * n) for n in range(7)]
    async with watched(coded_bundle, num_blocks=30) as host:
        for _ in range(2):
            await asyncio.gather(*(load(host, prompt) for prompt in prompts))
        snapshot = host.engine.state.snapshot()
        assert snapshot.engine.preemptions > 0
        assert snapshot.cache.evicted_blocks > 30
        assert host.rows_copied() > 0


async def load(host: Watched, prompt: list[int]) -> None:
    """An answer, and one that goes on from its beginning."""
    await check(host, prompt, 20)
    await check(host, [*prompt[:-3], 1, 2, 3], 5)
