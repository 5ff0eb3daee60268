"""The cache as a client and an operator meet it: through a socket, on a tiny Llama.

Server, service and runtime in one process, with a clock that the test turns.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from ipc.client import Client
from ipc.errors import ServerError
from ipc.messages import CacheReport
from om_models.bundle import Bundle
from tests.support.house import House, ask, open_house
from tests.support.served import BLOCK

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: With the BOS token 21 tokens: five blocks and one token.
PROMPT = "abcdefghijklmnopqrst"
NUM_PROMPT = 21


@pytest.fixture
async def house(tiny_bundle: Bundle, tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tiny_bundle, tmp_path) as house:
        yield house


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    async with Client(house.server.endpoint) as client:
        yield client


async def digest_of(client: Client) -> str:
    """Of the prefix that was used last."""
    return (await client.list(limit=1)).entries[0].digest


def saw(answer: Any) -> tuple[int, CacheReport]:
    return answer.usage.cached_tokens, answer.cache


@pytest.mark.parametrize("stream", [True, False])
async def test_every_answer_says_how_much_was_cached_and_why_not_more(
    house: House, client: Client, stream: bool
) -> None:
    async def seen(prompt: str, **options: Any) -> tuple[int, CacheReport]:
        return saw(await ask(client, prompt, max_tokens=1, stream=stream, **options))

    unwanted = CacheReport("disabled", detail="the request says so (use_cache)")
    assert await seen(PROMPT, use_cache=False) == (0, unwanted)
    assert await seen(PROMPT) == (0, CacheReport("cold"))
    assert await seen(PROMPT, use_cache=False) == (0, unwanted)
    assert await seen(PROMPT) == (20, CacheReport("hit"))
    assert await seen(PROMPT + "uvw") == (21, CacheReport("extended", 21, 21))
    assert await seen("abcXY") == (4, CacheReport("diverged", 4, 24))
    await client.evict(all=True)
    assert await seen(PROMPT) == (0, CacheReport("evicted"))
    await house.check(client)


async def test_a_req_client_is_told_in_its_one_message(house: House) -> None:
    socket = zmq.asyncio.Context.instance().socket(zmq.REQ)
    socket.set(zmq.LINGER, 0)
    socket.connect(house.server.endpoint)
    request = {"type": "generate", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    reports = []
    for number in range(2):
        await socket.send(json.dumps(request | {"id": f"{number}"}).encode())
        done = json.loads(await socket.recv())
        reports.append((done["usage"]["cached_tokens"], done["cache"]))
    socket.close()
    assert reports == [(0, {"reason": "cold"}), (20, {"reason": "hit"})]


async def test_explain_foresees_the_answer_and_changes_nothing(
    house: House, client: Client
) -> None:
    prompts = [PROMPT, PROMPT, PROMPT + "uvw", "abcXY", "", PROMPT[:3]]
    for prompt in prompts:
        foreseen = [await client.explain(prompt) for _ in range(2)]
        answer = await ask(client, prompt, max_tokens=1)
        told = (answer.usage.prompt_tokens, *saw(answer))
        for one in foreseen:
            assert (one.prompt_tokens, one.cached_tokens, one.cache) == told
    await house.check(client)


async def test_a_lease_ends_when_its_time_is_over_and_not_before(
    house: House, client: Client
) -> None:
    await ask(client, PROMPT, max_tokens=1)
    digest = await digest_of(client)
    leased = await client.pin(digest[:8], 10)
    assert (leased.digest, leased.expires_in_s) == (digest, 10)
    assert (leased.num_tokens, leased.num_blocks) == (NUM_PROMPT, 6)
    assert leased.num_bytes == 6 * house.runtime.layout.block_bytes
    for passed_s, num_evicted in ((9.999, 0), (0.001, 6)):
        house.clock.now_s += passed_s
        assert (await client.evict(all=True)).num_blocks == num_evicted
    await house.check(client)


async def test_a_lease_is_renewed_becomes_a_pin_and_is_given_up(
    house: House, client: Client
) -> None:
    await ask(client, PROMPT, max_tokens=1)
    digest = await digest_of(client)
    await client.pin(digest, 1)
    assert (await client.pin(digest, 20)).expires_in_s == 20
    house.clock.now_s += 5
    assert (await client.evict(digest=digest)).num_blocks == 0
    assert (await client.pin(digest)).expires_in_s is None
    house.clock.now_s += 1000
    assert (await client.evict(idle_s=0)).num_blocks == 0
    assert (await client.unpin(digest[:8])).digest == digest
    with pytest.raises(ServerError, match="unknown_entry"):
        await client.unpin(digest)
    assert (await client.evict(idle_s=1006)).num_blocks == 0
    assert (await client.evict(idle_s=1005)).num_blocks == 6
    await house.check(client)


async def test_a_registration_is_exact_to_the_token(house: House, client: Client) -> None:
    prefix = await client.register(PROMPT)
    assert (prefix.num_tokens, prefix.cached_tokens) == (NUM_PROMPT, 0)
    assert prefix.num_bytes == 6 * house.runtime.layout.block_bytes
    again = await client.register(PROMPT)
    assert again.prefix_id == prefix.prefix_id
    answer = await ask(client, "x", prefix_id=prefix.prefix_id, max_tokens=1)
    assert answer.usage.cached_tokens == NUM_PROMPT
    await client.release(prefix.prefix_id)
    await house.check(client)


@pytest.mark.parametrize(
    ("limit", "num_blocks"), [(BLOCK, 1), (BLOCK + 1, 2), (NUM_PROMPT - 1, 5), (NUM_PROMPT, 6)]
)
async def test_what_a_limit_leaves_of_a_registration_is_what_its_bytes_say(
    tiny_bundle: Bundle, tmp_path: Path, limit: int, num_blocks: int
) -> None:
    house_with_limit = open_house(tiny_bundle, tmp_path, cache={"max_prefix_length": limit})
    async with house_with_limit as house, Client(house.server.endpoint) as client:
        prefix = await client.register(PROMPT)
        assert prefix.num_tokens == NUM_PROMPT
        assert prefix.num_bytes == num_blocks * house.runtime.layout.block_bytes
        (entry,) = (await client.list()).entries
        assert (entry.num_tokens, entry.num_blocks, entry.kept) == (limit, num_blocks, "registered")
        await client.release(prefix.prefix_id)


async def test_what_goes_first_is_what_has_least_priority(house: House, client: Client) -> None:
    for prompt, priority in (("aaaa", 80), ("bbbb", 20), ("cccc", 50)):
        await ask(client, prompt, max_tokens=1, cache_priority=priority)
    await client.evict(max_blocks=2)
    left = {entry.priority for entry in (await client.list()).entries}
    assert left == {80, 50}
    await house.check(client)
