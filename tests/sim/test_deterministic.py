"""Deterministic mode: a hit is a miss, bit for bit.

Tiny Llamas on the software device. Hits end on the grid of prefill chunks, every prompt is computed
in one gear and every answer in another, so whatever was cached, evicted or in flight meanwhile, the
same tokens go through the same arithmetic. Compared are the bytes of all logits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from om_models.bundle import Bundle
from tests.support.served import BLOCK, random_prompt
from tests.support.watched import Answered, Logits, Watched, watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NUM_TOKENS = 6
#: The bundles' smallest prefill chunk that holds a block.
CHUNK = 8
DETERMINISTIC = {"deterministic": True}


@pytest.fixture(params=["fp32", "fp16"])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    names = {"fp32": "tiny_bundle", "fp16": "tiny_fp16_bundle"}
    found: Bundle = request.getfixturevalue(names[request.param])
    return found


def logits_bytes(logits: Mapping[int, Sequence[Logits]]) -> dict[int, set[bytes]]:
    """What followed so many tokens; one value each, however often it was computed."""
    return {length: {one.tobytes() for one in several} for length, several in logits.items()}


def assert_same_bits(found: Answered, expected: Answered) -> None:
    """The answers and all logits, to the bit."""
    assert found.greedy.token_ids == expected.greedy.token_ids
    bits = logits_bytes(found.logits)
    assert all(len(different) == 1 for different in bits.values())
    assert bits == logits_bytes(expected.logits)


async def cold(host: Watched, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Answered:
    """The answer with nothing in the cache."""
    host.engine.evict(None)
    found = await host.ask(prompt, num_tokens)
    assert found.greedy.cached == 0
    return found


async def test_every_hit_length(bundle: Bundle) -> None:
    prompt = random_prompt(1, 4 * CHUNK + 3)
    async with watched(bundle, cache=DETERMINISTIC) as host:
        assert host.runtime.gears.chunk == CHUNK
        miss = await cold(host, prompt)
        for num_cached in range(1, len(prompt) + 1):
            host.engine.evict(None)
            await host.greedy(prompt[:num_cached], 1)
            hit = await host.ask(prompt, NUM_TOKENS)
            assert hit.greedy.cached == num_cached // CHUNK * CHUNK
            assert_same_bits(hit, miss)


async def test_only_what_the_grid_lets_through_is_promised(tiny_bundle: Bundle) -> None:
    """That the bytes do differ otherwise: the comparison is not for nothing."""
    prompt = random_prompt(1, 4 * CHUNK + 3)
    num_different = 0
    async with watched(tiny_bundle) as host:
        miss = await cold(host, prompt)
        for num_cached in range(1, len(prompt)):
            host.engine.evict(None)
            await host.greedy(prompt[:num_cached], 1)
            hit = await host.ask(prompt, NUM_TOKENS)
            num_different += logits_bytes(hit.logits) != logits_bytes(miss.logits)
    assert num_different > 0


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 100])
async def test_the_same_prompt_again(bundle: Bundle, length: int) -> None:
    prompt = random_prompt(length, length)
    async with watched(bundle, cache=DETERMINISTIC) as host:
        miss = await cold(host, prompt)
        for _ in range(2):
            hit = await host.ask(prompt, NUM_TOKENS)
            assert hit.greedy.cached == (length - 1) // CHUNK * CHUNK
            assert_same_bits(hit, miss)


async def test_every_place_of_divergence(bundle: Bundle) -> None:
    """Another prompt has left the beginning, computed together with other tokens."""
    prompt = random_prompt(2, 2 * CHUNK + 5)
    async with watched(bundle, cache=DETERMINISTIC) as host:
        miss = await cold(host, prompt)
        for place in range(len(prompt)):
            host.engine.evict(None)
            await host.greedy([*prompt[:place], (prompt[place] + 1) % 256, *range(20)])
            hit = await host.ask(prompt, NUM_TOKENS)
            assert hit.greedy.cached == place // CHUNK * CHUNK
            assert_same_bits(hit, miss)


async def test_turns_of_a_conversation(bundle: Bundle) -> None:
    """The tokens of an answer are computed again as part of the next prompt, on the grid."""
    async with watched(bundle, cache=DETERMINISTIC) as host:
        prompt = random_prompt(3, 11)
        for turn in range(4):
            host.engine.evict(None)
            expected = await host.ask(prompt, 9)
            host.engine.evict(None)
            for end in range(4, len(prompt), 7):  # turns before this one, answers and all
                await host.greedy(prompt[:end], 7)
            assert_same_bits(await host.ask(prompt, 9), expected)
            prompt += [*expected.greedy.token_ids, *random_prompt(turn, 5)]


async def test_with_other_requests_in_flight(bundle: Bundle) -> None:
    """Hits and misses, prompts and answers, whatever else each step would have had room for."""
    shared = random_prompt(4, 40)
    prompts = [shared[: 11 * (n % 4)] + random_prompt(n, 3 + 6 * n) for n in range(10)]
    async with watched(bundle, cache=DETERMINISTIC) as host:
        alone = [await cold(host, prompt, 12) for prompt in prompts]
        host.engine.evict(None)
        for _ in range(2):  # the second time everything is a hit
            together = await asyncio.gather(*(host.ask(prompt, 12) for prompt in prompts))
            for found, expected in zip(together, alone, strict=True):
                assert_same_bits(found, expected)
        assert [found.greedy.cached for found in together] == [
            (len(prompt) - 1) // CHUNK * CHUNK for prompt in prompts
        ]


async def test_after_preemption(bundle: Bundle) -> None:
    """Prompt and answer so far are computed again, each in its own way."""
    prompts = [random_prompt(n, 29 + n) for n in range(4)]
    async with watched(bundle, num_blocks=26, cache=DETERMINISTIC, max_running=4) as host:
        alone = [await cold(host, prompt, 40) for prompt in prompts]
        host.engine.evict(None)
        assert host.engine.state.snapshot().engine.preemptions == 0
        together = await asyncio.gather(*(host.ask(prompt, 40) for prompt in prompts))
        assert host.engine.state.snapshot().engine.preemptions > 0
        for found, expected in zip(together, alone, strict=True):
            assert_same_bits(found, expected)


async def test_a_pool_that_never_holds_all_prompts(bundle: Bundle) -> None:
    shared = random_prompt(5, 30)
    prompts = [shared[: 5 * n] + random_prompt(n, 33 - 5 * n) for n in range(6)]
    async with watched(bundle, num_blocks=22, cache=DETERMINISTIC) as host:
        alone = [await cold(host, prompt) for prompt in prompts]
        for turn in range(4):
            for step in range(6):
                place = (5 * turn + step * (turn + 1)) % 6
                assert_same_bits(await host.ask(prompts[place], NUM_TOKENS), alone[place])
        assert host.runtime.cache.counters.evicted_blocks > 50


async def test_where_the_rows_lie_does_not_matter(bundle: Bundle) -> None:
    prompt = random_prompt(6, 50)
    found: list[Answered] = []
    for num_blocks in (None, 22):
        async with watched(bundle, num_blocks=num_blocks, cache=DETERMINISTIC) as host:
            await host.greedy(random_prompt(7, 3 * BLOCK))
            found.append(await host.ask(prompt, NUM_TOKENS))
    assert_same_bits(*found)


async def test_with_several_threads(bundle: Bundle) -> None:
    prompt = random_prompt(8, 90)
    async with watched(bundle, threads=2, cache=DETERMINISTIC) as host:
        miss = await cold(host, prompt)
        for num_chunks in range(1, 90 // CHUNK + 1):
            host.engine.evict(None)
            await host.greedy(prompt[: num_chunks * CHUNK], 1)
            hit = await host.ask(prompt, NUM_TOKENS)
            assert hit.greedy.cached == num_chunks * CHUNK
            assert_same_bits(hit, miss)
