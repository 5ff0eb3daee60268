"""A hit answers as a miss does, to the token, and the device computes only what was not cached.

A tiny Llama with random weights on the software device, blocks of four tokens. What "equal" means
is said in `tests.support.served`; ties are counted and reported. That the device was spared work is
read off the token rows it appended to the pool, not off the cache's own counters.

Bit-equality is promised in deterministic mode alone: `test_deterministic`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from om_models.bundle import Bundle
from tests.support.served import BLOCK, Comparison, Served, random_prompt, served
from tests.support.tiny import FAMILY_SPECS, make_bundle
from tests.support.watched import Watched, watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NUM_TOKENS = 6
#: As `LOGIT_BOUND`; a logit of 4 to 8 is known to 1 / 256 in fp16.
FP16_LOGIT_BOUND = 1e-2
#: Lengths around whole blocks and around the largest prefill gear.
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 21, 31, 32, 33, 65)


async def leave_cached(host: Served, prompt: list[int]) -> None:
    """Empty the cache, then compute a prompt whose length is whole blocks."""
    host.engine.evict(None)
    if prompt:
        await host.greedy(prompt, 1)


async def check_every_hit_length(host: Watched, prompt: list[int], comparison: Comparison) -> float:
    """Compare the miss with the hit of every length; returns the largest difference of logits."""
    await leave_cached(host, [])
    miss = await host.ask(prompt, NUM_TOKENS)
    assert miss.greedy.cached == 0
    worst = 0.0
    for num_cached in range(1, len(prompt)):
        await leave_cached(host, prompt[:num_cached])
        before = host.rows_appended()
        hit = await host.ask(prompt, NUM_TOKENS)
        # The last answer token is never fed.
        num_prompt_rows = host.rows_appended() - before - (NUM_TOKENS - 1)
        assert hit.greedy.cached == num_cached
        assert num_prompt_rows == hit.greedy.prefilled == len(prompt) - num_cached
        worst = max(worst, hit.check_like(miss, comparison))
    return worst


@pytest.mark.parametrize("length", LENGTHS)
async def test_every_hit_length(tiny_bundle: Bundle, length: int, record_property: Any) -> None:
    comparison = Comparison()
    async with watched(tiny_bundle) as host:
        await check_every_hit_length(host, random_prompt(length, length), comparison)
    assert comparison.num_equal == NUM_TOKENS * (length - 1) - comparison.num_ties
    comparison.report(record_property)


async def test_every_hit_length_in_fp16(tiny_fp16_bundle: Bundle, record_property: Any) -> None:
    comparison = Comparison(FP16_LOGIT_BOUND)
    async with watched(tiny_fp16_bundle) as host:
        for length in (6, 21, 33):
            await check_every_hit_length(host, random_prompt(length, length), comparison)
    assert comparison.num_equal > 300
    comparison.report(record_property)


@pytest.fixture(scope="module", params=FAMILY_SPECS)
def family_bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A model of one of the families that are not Llama."""
    return make_bundle(tmp_path_factory.mktemp("family"), FAMILY_SPECS[request.param])


async def test_every_hit_length_of_every_family(
    family_bundle: Bundle, record_property: Any
) -> None:
    comparison = Comparison()
    async with watched(family_bundle) as host:
        for length in (6, 33):
            await check_every_hit_length(host, random_prompt(length, length), comparison)
    assert comparison.num_equal > 150
    comparison.report(record_property)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_every_hit_length_of_200_prompts(tiny_bundle: Bundle, record_property: Any) -> None:
    comparison = Comparison()
    worst = 0.0
    async with watched(tiny_bundle) as host:
        for seed in range(200):
            prompt = random_prompt(seed, 2 + 97 * seed % 64)
            worst = max(worst, await check_every_hit_length(host, prompt, comparison))
    record_property("largest_difference_of_logits", worst)
    comparison.report(record_property)


async def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(
    tiny_bundle: Bundle,
) -> None:
    """Its logits are needed."""
    prompt = random_prompt(1, 4 * BLOCK)
    async with served(tiny_bundle) as host:
        await host.cold(prompt)
        assert (await host.greedy(prompt)).cached == 4 * BLOCK - 1


async def test_rows_of_prefill_steps_and_padding_are_told_apart(tiny_bundle: Bundle) -> None:
    prompt = random_prompt(2, 45)
    async with served(tiny_bundle) as host:
        await host.cold(prompt[:24], 1)
        before = host.runtime.executor.counters["prefill"]
        appended, padded = before.rows_appended, before.rows_padded
        host.batches.clear()
        await host.greedy(prompt, 1)
        after = host.runtime.executor.counters["prefill"]
        assert after.rows_appended - appended == 45 - 24
        assert [batch.gear.chunk for batch in host.batches] == [32]
        assert after.rows_padded - padded == 32 - 21


async def test_second_and_third_turns(tiny_bundle: Bundle, record_property: Any) -> None:
    """Prompt and answer of a turn begin the next prompt; both are reused."""
    comparison = Comparison()
    async with served(tiny_bundle) as host:
        for seed in range(6):
            prompt = random_prompt(seed, 20 + seed)
            for turn in range(3):
                warm = await host.greedy(prompt, 9)
                host.engine.evict(None)
                cold = await host.greedy(prompt, 9)
                comparison.check_runs(warm, cold)
                known = len(prompt) + len(cold.token_ids) - 1
                prompt += [*cold.token_ids, *random_prompt(10 * seed + turn, 5)]
                again = await host.greedy(prompt, 1)
                assert again.cached == known
    assert comparison.num_equal > 100
    comparison.report(record_property)


async def test_concurrent_requests_that_share_prefixes(
    tiny_bundle: Bundle, record_property: Any
) -> None:
    """Joined to each other's batches at any step, each answers as alone and cold."""
    comparison = Comparison()
    shared = random_prompt(7, 30)
    prompts = [shared[: 10 * (n % 4)] + random_prompt(n, 3 + 5 * n) for n in range(10)]
    async with served(tiny_bundle) as host:
        alone = [await host.cold(prompt, 12) for prompt in prompts]
        host.engine.evict(None)
        host.batches.clear()
        for _ in range(2):  # the second time everything is a hit
            together = await asyncio.gather(*(host.greedy(prompt, 12) for prompt in prompts))
            for found, expected in zip(together, alone, strict=True):
                comparison.check_runs(found, expected)
        assert max(len(batch.rows) for batch in host.batches) == 4
        assert [answer.cached for answer in together] == [len(prompt) - 1 for prompt in prompts]
    comparison.report(record_property)


async def test_after_preemption(tiny_bundle: Bundle, record_property: Any) -> None:
    comparison = Comparison()
    prompts = [random_prompt(n, 30) for n in range(4)]
    async with served(tiny_bundle, num_blocks=26) as host:
        assert host.runtime.cache.num_usable == 25
        alone = [await host.cold(prompt, 40) for prompt in prompts]
        host.engine.evict(None)
        together = await asyncio.gather(*(host.greedy(prompt, 40) for prompt in prompts))
        assert host.engine.state.snapshot().engine.preemptions > 0
        for found, expected in zip(together, alone, strict=True):
            comparison.check_runs(found, expected)
    comparison.report(record_property)


async def test_after_eviction(tiny_bundle: Bundle, record_property: Any) -> None:
    """Whatever part of a prompt an operator evicted, tail first."""
    comparison = Comparison()
    prompt = random_prompt(3, 41)
    async with served(tiny_bundle) as host:
        miss = await host.cold(prompt)
        for num_evicted in range(11):
            host.engine.evict(None)
            await host.greedy(prompt, 1)
            evicted = host.engine.evict(None, max_blocks=num_evicted)
            assert evicted.num_evicted == num_evicted
            hit = await host.greedy(prompt)
            # The first that goes is the tail, which holds the prompt's last token alone.
            assert hit.cached == min(40, 44 - BLOCK * num_evicted)
            comparison.check_runs(hit, miss)
    comparison.report(record_property)


async def test_eviction_under_load(tiny_bundle: Bundle, record_property: Any) -> None:
    """A pool that never holds all prompts: blocks change owners all the time."""
    comparison = Comparison()
    prompts = [random_prompt(n, 33) for n in range(6)]
    async with served(tiny_bundle, num_blocks=22) as host:
        alone = [await host.cold(prompt, 5) for prompt in prompts]
        for turn in range(4):
            order = [prompts[(5 * turn + step * (turn + 1)) % 6] for step in range(6)]
            for prompt in order:
                found = await host.greedy(prompt, 5)
                comparison.check_runs(found, alone[prompts.index(prompt)])
        assert host.runtime.cache.counters.evicted_blocks > 50
    comparison.report(record_property)


async def test_a_registered_prefix_survives_eviction(
    tiny_bundle: Bundle, record_property: Any
) -> None:
    comparison = Comparison()
    prefix, prompt = random_prompt(4, 18), random_prompt(4, 18) + random_prompt(5, 9)
    async with served(tiny_bundle) as host:
        miss = await host.cold(prompt)
        host.engine.evict(None)
        before = host.rows_appended()
        await host.register("p", prefix)
        assert host.rows_appended() - before == 18
        host.engine.evict(None)
        hit = await host.greedy(prompt)
        assert hit.cached == 18
        comparison.check_runs(hit, miss)
    comparison.report(record_property)


async def test_without_the_cache_every_prompt_is_computed(tiny_bundle: Bundle) -> None:
    prompt = random_prompt(6, 25)
    async with served(tiny_bundle, is_cached=False) as host:
        answers = [await host.greedy(prompt) for _ in range(2)]
        assert [answer.cached for answer in answers] == [0, 0]
        assert [answer.prefilled for answer in answers] == [25, 25]
        assert answers[0].token_ids == answers[1].token_ids
