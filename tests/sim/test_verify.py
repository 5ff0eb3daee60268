"""`verify` on a tiny Llama: what changes in the pool is found, all else stays and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from ipc.client import Client
from ipc.errors import ServerError
from ipc.messages import Verified
from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.cache import desk
from runtime_cache.errors import DeviceError
from runtime_cache.runtime import Runtime
from tests.support.aclsim import download, put
from tests.support.caching import entries
from tests.support.house import House, ask, is_decode, open_house
from tests.support.served import BLOCK, config_for

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: With the BOS token 21 tokens: five blocks and one token.
PROMPT = "abcdefghijklmnopqrst"
NUM_BLOCKS = 6


@pytest.fixture
async def house(tiny_bundle: Bundle, tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tiny_bundle, tmp_path) as house:
        yield house


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    async with Client(house.server.endpoint) as client:
        yield client


def blocks_of(runtime: Runtime) -> list[int]:
    """Of the prefix that was used last, in the order of its tokens."""
    cache = runtime.cache
    ((entry,), _) = entries(cache, 1)
    return [int(node.block) for node in desk.find(cache, entry.digest).path]


async def flip_bit(runtime: Runtime, block: int, *, token: int = 0, bit: int = 0) -> None:
    """Something changes one bit of the KV of a token."""
    ptr = runtime.executor._pool.run_ptr(0, block * BLOCK + token, 1) + bit // 8

    def flip() -> None:
        byte = download(ptr, np.uint8, 1)
        put(ptr, byte ^ np.uint8(1 << bit % 8))

    await runtime.thread.run(flip)


async def poison(runtime: Runtime, block: int) -> None:
    """A value of a block is what fresh device memory holds."""
    ptr = runtime.executor._pool.run_ptr(0, block * BLOCK + 1, 1)
    await runtime.thread.run(put, ptr, np.frombuffer(bytes.fromhex("fe7ffe7f"), np.uint8).copy())


def counts(reply: Verified) -> tuple[int, int, int, int, int, int]:
    return (
        reply.num_blocks,
        reply.num_new,
        reply.num_changed,
        reply.num_not_finite,
        reply.dropped_blocks,
        reply.in_use_blocks,
    )


# -- nothing has changed ------------------------------------------------------------------------


async def test_what_has_not_changed_stays(house: House, client: Client) -> None:
    assert counts(await client.verify()) == (0, 0, 0, 0, 0, 0)
    await ask(client, PROMPT, max_tokens=1)
    entries = (await client.list()).entries
    token_bytes = house.runtime.layout.token_bytes
    for num_new in (NUM_BLOCKS, 0, 0):
        reply = await client.verify()
        assert counts(reply) == (NUM_BLOCKS, num_new, 0, 0, 0, 0)
        assert (reply.num_bytes, reply.next_block) == (21 * token_bytes, None)
    again = (await client.list()).entries
    assert [(e.digest, e.hits) for e in again] == [(e.digest, e.hits) for e in entries]
    assert (await ask(client, PROMPT, max_tokens=1)).usage.cached_tokens == 20
    await house.check(client)


async def test_every_way_to_compute_a_row_gives_finite_ones(house: House, client: Client) -> None:
    """Padding of rows and gears included: nothing that was never written is read."""
    for prompt in (PROMPT, PROMPT[:7] + "xyz", PROMPT + "more", "q" * 40):
        await ask(client, prompt)
    for num_new in (1, 0):
        reply = await client.verify()
        assert (reply.num_changed, reply.num_not_finite) == (0, 0)
        assert (reply.num_new > 0) == num_new
    await house.check(client)


async def test_half_precision(tiny_fp16_bundle: Bundle, tmp_path: Path) -> None:
    async with (
        open_house(tiny_fp16_bundle, tmp_path) as house,
        Client(house.server.endpoint) as client,
    ):
        await ask(client, PROMPT)
        assert (await client.verify()).num_not_finite == 0
        await poison(house.runtime, blocks_of(house.runtime)[1])
        assert (await client.verify()).num_not_finite == 1


async def test_a_digest_reads_one_prefix(house: House, client: Client) -> None:
    await ask(client, PROMPT, max_tokens=1)
    digest = (await client.list()).entries[0].digest
    await ask(client, "another one", max_tokens=1)
    assert (await client.verify(digest[:8])).num_blocks == NUM_BLOCKS
    last = max(int(node.block) for node in house.runtime.cache.index)
    assert (await client.verify(first_block=last)).num_blocks == 1
    with pytest.raises(ServerError, match="unknown_entry"):
        await client.verify("0" * 64)
    with pytest.raises(ServerError, match="no tenant 'nobody' is configured"):
        await client.verify(tenant="nobody")
    await house.check(client)


# -- a bit has changed --------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "cached"), [(0, 0), (1, 4), (4, 16), (5, 20)])
async def test_a_flipped_bit_is_found_and_the_next_request_is_right_again(
    house: House, client: Client, place: int, cached: int
) -> None:
    cold = await ask(client, PROMPT)
    await client.evict(all=True)
    await ask(client, PROMPT, max_tokens=1)
    assert (await client.verify()).num_new == NUM_BLOCKS
    block = blocks_of(house.runtime)[place]
    await flip_bit(house.runtime, block, bit=5)
    # What went on from it has left before its turn.
    assert counts(await client.verify()) == (place + 1, 0, 1, 0, NUM_BLOCKS - place, 0)
    again = await ask(client, PROMPT)
    assert again.usage.cached_tokens == cached
    assert again.token_ids == cold.token_ids
    stats = await client.stats()
    assert stats["cache"]["damaged_blocks"] == NUM_BLOCKS - place
    assert "found damaged KV" in stats["warnings"][0]
    assert (await client.verify()).num_changed == 0
    await house.check(client)


async def test_one_bit_anywhere_in_a_block_is_enough(house: House, client: Client) -> None:
    await ask(client, PROMPT, max_tokens=1)
    bits = 8 * house.runtime.layout.token_bytes
    for token, bit in ((0, 0), (BLOCK - 1, bits - 1), (2, bits // 2 + 3)):
        await client.verify()
        block = blocks_of(house.runtime)[-2]
        await flip_bit(house.runtime, block, token=token, bit=bit)
        assert (await client.verify()).num_changed == 1
        await ask(client, PROMPT, max_tokens=1)
    await house.check(client)


async def test_rows_behind_the_tokens_of_a_block_do_not_count(house: House, client: Client) -> None:
    await ask(client, PROMPT, max_tokens=1)
    await client.verify()
    await flip_bit(house.runtime, blocks_of(house.runtime)[-1], token=1)
    assert counts(await client.verify()) == (NUM_BLOCKS, 0, 0, 0, 0, 0)
    await house.check(client)


async def test_poison_is_found_at_first_sight(house: House, client: Client) -> None:
    cold = await ask(client, PROMPT)
    await client.evict(all=True)
    await ask(client, PROMPT, max_tokens=1)
    await poison(house.runtime, blocks_of(house.runtime)[2])
    reply = await client.verify()
    assert (reply.num_not_finite, reply.dropped_blocks, reply.num_changed) == (1, 4, 0)
    again = await ask(client, PROMPT)
    assert (again.usage.cached_tokens, again.token_ids) == (8, cold.token_ids)
    await house.check(client)


async def test_a_registered_prefix_is_kept_right_by_registering_it_again(
    house: House, client: Client
) -> None:
    prefix = await client.register(PROMPT)
    await client.verify()
    await flip_bit(house.runtime, blocks_of(house.runtime)[0])
    assert counts(await client.verify())[2:] == (1, 0, NUM_BLOCKS, NUM_BLOCKS)
    assert (await client.list()).entries[0].num_blocks == 0
    again = await client.register(PROMPT)
    assert (again.prefix_id, again.cached_tokens) == (prefix.prefix_id, 0)
    answer = await ask(client, "x", prefix_id=prefix.prefix_id, max_tokens=1)
    assert answer.usage.cached_tokens == 21
    await client.release(prefix.prefix_id)
    await house.check(client)


# -- while others are served --------------------------------------------------------------------


async def test_a_request_in_work_holds_the_damaged_block_and_leaves_nothing(
    house: House, client: Client
) -> None:
    house.pause_at(is_decode(num_past=24))
    answer = asyncio.ensure_future(ask(client, PROMPT))
    await house.paused()
    verifying = asyncio.ensure_future(client.verify())
    first = await verifying  # the step has not reached the device yet
    assert first.num_new == 6
    await flip_bit(house.runtime, blocks_of(house.runtime)[0])
    reply = await client.verify()
    assert (reply.num_changed, reply.in_use_blocks) == (1, 6)
    house.resume()
    await answer
    assert (await client.list()).entries == ()
    await house.check(client)


async def test_serving_goes_on_while_everything_is_read_again_and_again(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    """Requests that evict each other's blocks, cancels, and a verify after the other."""
    async with (
        open_house(tiny_bundle, tmp_path, num_blocks=40) as house,
        Client(house.server.endpoint) as client,
        Client(house.server.endpoint) as operator,
    ):
        prompts = [chr(97 + number) * 30 for number in range(8)]
        expected = [(await ask(client, prompt)).token_ids for prompt in prompts]
        is_over = False

        async def verify() -> int:
            number = 0
            while not is_over:
                reply = await operator.verify()
                assert counts(reply)[2:] == (0, 0, 0, 0)
                number += 1
            return number

        verifying = asyncio.ensure_future(verify())
        for _ in range(3):
            answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
            assert [answer.token_ids for answer in answers] == expected
        is_over = True
        assert await verifying > 0
        await house.check(client)


async def test_an_operator_that_vanishes_leaves_no_hold(house: House, client: Client) -> None:
    await ask(client, PROMPT)
    house.pause_at(is_decode())
    answer = asyncio.ensure_future(ask(client, PROMPT))
    await house.paused()
    async with Client(house.server.endpoint) as operator:
        lost = asyncio.ensure_future(operator.verify())
        while house.service.num_unfinished < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    house.resume()
    await answer
    with pytest.raises(Exception, match="closed"):
        await lost
    assert (await client.verify()).num_changed == 0
    await house.check(client)


async def test_a_read_that_fails_costs_no_request_anything(house: House, client: Client) -> None:
    await ask(client, PROMPT)
    for when in ("call", "run"):
        fault = faults.inject("acl.rt.memcpy_async", code=507015, when=when)
        with pytest.raises(ServerError, match="acl") as caught:
            await client.verify()
        assert fault.has_fired
        assert caught.value.retryable
    assert (await client.verify()).num_blocks == 7
    await house.check(client)


async def test_a_device_that_is_lost_while_it_is_read(tiny_bundle: Bundle, tmp_path: Path) -> None:
    inspect.reset()
    runtime = await Runtime.open(config_for(tiny_bundle))
    house = House(runtime, f"ipc://{tmp_path}/s")
    async with house.server, Client(house.server.endpoint) as client:
        await ask(client, PROMPT)
        faults.inject("acl.rt.synchronize_stream_with_timeout", code=507010)
        with pytest.raises(ServerError, match="device_lost"):
            await client.verify()
        assert house.engine.fatal.done()
        with pytest.raises(ServerError, match="device_lost"):
            await ask(client, PROMPT)
        await house.service.close()
    with pytest.raises(DeviceError):
        await runtime.close()
    await runtime.close()
    inspect.reset()


async def test_a_step_is_never_split_by_a_read(house: House, client: Client) -> None:
    """A read is a job of its own on the device thread: it allocates nothing and is awaited once."""
    await ask(client, PROMPT, max_tokens=1)
    inspect.clear()
    await client.verify()
    report = inspect.report()
    assert report.copies == {"D2H": NUM_BLOCKS * house.runtime.layout.num_groups}
    assert report.copied_bytes == {"D2H": 21 * house.runtime.layout.token_bytes}
    assert report.calls["acl.rt.synchronize_stream_with_timeout"] == NUM_BLOCKS
    assert not {"acl.rt.malloc", "acl.rt.malloc_host"} & report.calls.keys()
    await house.check(client)
