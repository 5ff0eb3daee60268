"""A client is gone, whatever its request was doing: its blocks are back within one step.

[40] of facts/peers.md (d). Through a real socket, on a tiny Llama; `House.check` says that the next
answer is right and nothing is left. That a process's client goes without a word is in
`tests/process/test_hostile.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ipc.client import Client
from om_models.bundle import Bundle
from runtime_cache.engine.batch import StepBatch
from tests.support.house import House, ask, is_decode, is_prefill, open_house

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: With the BOS token 100 tokens: four chunks of 32, 25 blocks.
LONG = "a" * 99
#: What is cached before: with the BOS token, five blocks and one token.
CACHED = "abcdefghijklmnopqrst"


@pytest.fixture
async def house(tiny_bundle: Bundle, tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tiny_bundle, tmp_path, max_running=1) as house:
        yield house


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    async with Client(house.server.endpoint) as client:
        yield client


def num_steps(house: House) -> int:
    counters = house.engine.state.snapshot().engine
    return counters.prefill_steps + counters.decode_steps


def is_copying(batch: StepBatch) -> bool:
    return any(row.copies for row in batch.rows)


@pytest.mark.parametrize(
    ("prompt", "is_stop", "num_live"),
    [
        (CACHED + "uvwxyz", is_copying, 8),  # five of its blocks are shared, one is copied from
        (LONG, is_prefill(0), 25),
        (LONG, is_prefill(64), 25),
        (LONG, is_decode(100), 26),
        (LONG, is_decode(110), 28),
    ],
    ids=["copying", "first chunk", "third chunk", "first token", "streaming"],
)
async def test_in_a_step(
    house: House,
    client: Client,
    prompt: str,
    is_stop: Callable[[StepBatch], bool],
    num_live: int,
) -> None:
    cache = house.runtime.cache
    if is_stop is is_copying:
        await ask(client, CACHED, max_tokens=1)
    num_cached = cache.num_evictable
    house.pause_at(is_stop)
    async with Client(house.server.endpoint) as doomed:
        doomed.generate(prompt, ignore_eos=True)
        await house.paused()
    gone = house.seen[-1]
    await house.send_until_it_fails(gone, pause_s=0.001)
    # The step in flight still uses its blocks; nobody gets them.
    assert (cache.num_live, house.service.num_unfinished) == (num_live, 0)
    before = num_steps(house)
    house.resume()
    while house.engine.state.snapshot().is_step_in_flight:
        await client.ping()
    assert num_steps(house) == before
    assert cache.num_live == 0
    assert cache.num_evictable >= num_cached
    assert house.engine.state.snapshot().engine.cancelled_by == {"client_gone": 1}
    await house.check(client)


async def test_in_the_queue(house: House, client: Client) -> None:
    """It holds nothing there; who is running feels nothing."""
    house.pause_at(is_decode(110))
    running = client.generate(LONG, temperature=0, max_tokens=20, ignore_eos=True)
    await house.paused()
    before = house.runtime.cache.num_live
    async with Client(house.server.endpoint) as doomed:
        doomed.generate(CACHED, ignore_eos=True)
        await doomed.ping()  # so it has arrived
        assert house.engine.state.snapshot().num_waiting == 1
    await house.send_until_it_fails(house.seen[-1], pause_s=0.001)
    snapshot = house.engine.state.snapshot()
    assert (snapshot.num_waiting, snapshot.num_live_blocks) == (0, before)
    house.resume()
    assert len((await running.result()).token_ids) == 20
    await house.check(client)
