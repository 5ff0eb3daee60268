"""A daemon under mixed traffic for a while: every answer right, nothing left, nothing grown."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from ipc.client import Client
from ipc.errors import ServerError
from ipc.sync_client import Client as AdminClient
from tests.support.process_state import look_at
from tests.support.rtcached import wait_until_idle
from tools.daemon_process import DaemonProcess

NUM_CLIENTS = 40
REQUESTS_PER_CLIENT = 1500
#: Requests per client before memory is looked at first: by then every cache has its size.
WARM_UP = 300
MAX_GROWTH_KIB = 32 * 1024


class Traffic:
    """Clients that ask, stop listening, cancel and set deadlines, all from one seed.

    Attributes:
        known: prompt → the longest answer seen so far; the model is greedy, so answers to one
            prompt are beginnings of each other.
    """

    def __init__(self, endpoint: str) -> None:
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.ends: dict[str, int] = {}
        self._endpoint = endpoint

    async def run(self, num_requests: int, seed: int) -> None:
        await asyncio.gather(
            *(self._client(random.Random(seed + i), num_requests) for i in range(NUM_CLIENTS))
        )

    async def _client(self, chance: random.Random, num_requests: int) -> None:
        async with Client(self._endpoint, timeout_s=60) as client:
            for _ in range(num_requests):
                await self._ask(client, chance)

    async def _ask(self, client: Client, chance: random.Random) -> None:
        stem = [chance.randrange(4)] * chance.choice((0, 64, 200, 700))
        prompt = (*stem, *(chance.randrange(200) for _ in range(chance.randint(1, 40))))
        deadline_ms = chance.choice((None, None, None, 5, 50))
        stop_after = chance.choice((None, None, 1, 3))
        stream = client.generate(
            prompt_ids=prompt,
            max_tokens=chance.randint(1, 12),
            temperature=0,
            ignore_eos=True,
            deadline_ms=deadline_ms,
            stream=chance.random() < 0.8,
        )
        tokens: list[int] = []
        end = "left"
        try:
            async for piece in stream:
                tokens += piece.token_ids
                if stop_after is not None and len(tokens) >= stop_after:
                    break
            else:
                end = (await stream.result()).finish_reason
        except ServerError as error:
            end = error.code
        finally:
            await stream.aclose()
        self.ends[end] = self.ends.get(end, 0) + 1
        self._compare(prompt, tuple(tokens))

    def _compare(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        known = self.known.get(prompt, ())
        shorter = min(len(known), len(tokens))
        assert tokens[:shorter] == known[:shorter], prompt
        self.known[prompt] = max(known, tokens, key=len)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_mixed_traffic(null_bundle: Path) -> None:
    with (
        DaemonProcess(null_bundle, "sim:0") as daemon,
        AdminClient(daemon.admin_endpoint) as admin,
    ):
        traffic = Traffic(daemon.endpoint)
        asyncio.run(traffic.run(WARM_UP, seed=0))
        before_kib = look_at(daemon.process.pid).resident_kib
        asyncio.run(traffic.run(REQUESTS_PER_CLIENT, seed=1000))
        growth_kib = look_at(daemon.process.pid).resident_kib - before_kib
        wait_until_idle(admin)
        stats = admin.stats()
    pool, engine = stats["pool"], stats["engine"]
    assert pool["live_blocks"] == 0
    assert pool["cached_blocks"] + pool["free_blocks"] == pool["num_blocks"]
    assert (engine["num_waiting"], engine["num_running"], engine["failed"]) == (0, 0, 0)
    ended = ("refused", "finished", "cancelled", "expired")
    assert sum(engine[name] for name in ended) == engine["arrived"]
    assert sum(traffic.ends.values()) == NUM_CLIENTS * (WARM_UP + REQUESTS_PER_CLIENT)
    assert set(traffic.ends) == {"left", "length", "deadline"}
    assert growth_kib < MAX_GROWTH_KIB
