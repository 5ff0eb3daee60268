"""After a client that has sent anything at all, the service holds nothing of it: no task, no work.

In one process, where that can be seen; whole daemons are in `tests/process/test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import pytest

from ipc import messages as wire
from ipc.client import Client
from ipc.codec import Encoding, Limits, encode
from om_models.bundle import Bundle
from runtime_cache.work import Work
from tests.support.fuzz_target import FuzzClient
from tests.support.house import open_house
from tests.support.mutations import Corpus, framed, mutated

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NUM_FRAMES = 600
RESUME = encode(wire.Resume(wire.MessageId("resume")), Encoding.MSGPACK)


def spoil(endpoint: str) -> None:
    """Send spoilt frames, and read what is owed for them; then vanish."""
    chance, corpus = random.Random(1), Corpus()
    with FuzzClient(endpoint, Limits()) as client:
        for _ in range(NUM_FRAMES // 60):
            batch = [framed(chance, mutated(chance, corpus), corpus) for _ in range(60)]
            for message in batch:
                client.send(message)
            client.send([RESUME])
            client.settle(batch)


def is_busy(stats: dict[str, Any]) -> bool:
    busy = ("num_waiting", "num_running", "is_step_in_flight")
    return any(stats["engine"][name] for name in busy)


def num_works() -> int:
    gc.collect()
    return sum(isinstance(thing, Work) for thing in gc.get_objects())


async def test_nothing_is_left_of_a_client(tiny_bundle: Bundle, tmp_path: Path) -> None:
    num_before = num_works()
    async with open_house(tiny_bundle, tmp_path) as house:
        tasks = asyncio.all_tasks()
        await asyncio.to_thread(spoil, house.server.endpoint)
        async with Client(house.server.endpoint) as client:
            while is_busy(await client.stats()):
                pass
            # The server looks for clients that have gone by itself.
            while house.server.num_connections > 1:
                await client.ping()
        assert asyncio.all_tasks() == tasks
        assert house.service.num_unfinished == 0
        assert house.server.counters.handler_errors == 0
        assert num_works() == num_before
