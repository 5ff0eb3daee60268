"""Pool full, device memory gone: evict, then wait, then refuse; never crash, never be wrong.

[34, 37] of facts/peers.md (d): what fits is told before it is reached, and what happens then is
what was told.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import inspect
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.cache.results import CacheReport
from runtime_cache.engine.commands import FailRequest, FinishRequest
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT
from tests.support.served import BLOCK, Comparison, Served, oracle, random_prompt, served
from tests.support.tiny import tiny_reference

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: Five blocks.
NUM_TOKENS = 20


def stats(host: Served) -> dict[str, Any]:
    return DaemonFacts(host.runtime, []).stats()


def explain(host: Served, prompt: list[int]) -> CacheReport:
    """Without running it, and so without needing a block."""
    return host.engine.explain(DEFAULT_TENANT, np.array(prompt, dtype=np.int32)).report


# --- as many as fit, and one more -----------------------------------------------------------------


async def test_as_many_prompts_as_the_capacity_says_stay(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, num_blocks=41) as host:
        pool = stats(host)["pool"]
        assert pool["capacity_tokens"] == 8 * NUM_TOKENS
        kv = tiny_bundle.manifest.kv
        token_bytes = 2 * kv.num_groups * kv.layers_per_group * kv.row_elements * 4
        assert pool["bytes_per_block"] == BLOCK * token_bytes
        prompts = [random_prompt(seed, NUM_TOKENS) for seed in range(8)]
        for prompt in prompts:
            await host.greedy(prompt, max_tokens=1)
        pool = stats(host)["pool"]
        assert (pool["cached_blocks"], pool["free_blocks"]) == (40, 0)
        assert [explain(host, prompt).reason for prompt in prompts] == ["hit"] * 8
        entries, total = DaemonFacts(host.runtime, []).entries(EntryQuery(limit=8))
        assert (total, {entry.num_tokens for entry in entries}) == (8, {NUM_TOKENS})
        idle = [entry.idle_s for entry in entries]
        assert idle == sorted(idle)  # the oldest comes last
        assert stats(host)["cache"]["evicted_blocks"] == 0


async def test_one_more_takes_the_room_of_the_oldest(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, num_blocks=41) as host:
        prompts = [random_prompt(seed, NUM_TOKENS) for seed in range(9)]
        for prompt in prompts:
            await host.greedy(prompt, max_tokens=1)
        reasons = [explain(host, prompt).reason for prompt in prompts]
        assert reasons == ["evicted", *["hit"] * 8]
        cache = stats(host)["cache"]
        assert (cache["evicted_blocks"], cache["evicted_by"]) == (5, {"need": 5})
        assert DaemonFacts(host.runtime, []).entries(EntryQuery(limit=1))[1] == 8


# --- and no memory on the device ------------------------------------------------------------------


async def test_another_process_takes_all_memory_while_the_pool_fills_up(
    tiny_bundle: Bundle, record_property: Any
) -> None:
    """The pool is one allocation from the start, so all that is left of it can still be used."""
    comparison = Comparison()
    block_mib = 1024 / 2**20
    watermark = {"low_watermark_mb": 5 * block_mib}
    async with served(tiny_bundle, num_blocks=41, cache=watermark, max_waiting=4) as host:
        free_bytes = stats(host)["device"]["memory"]["free_bytes"]
        num_mallocs = inspect.report().calls["acl.rt.malloc"]
        with inspect.occupy(free_bytes):
            await host.runtime.memory.look()
            memory = stats(host)["device"]["memory"]
            assert (memory["free_bytes"], memory["is_low"]) == (0, True)
            assert stats(host)["warnings"][0].startswith("only 0 MiB of device memory are free")
            await fill_up(host)
            await ask_too_much(host, comparison)
            assert stats(host)["device"]["memory"]["is_low"]
        assert inspect.report().calls["acl.rt.malloc"] == num_mallocs
        comparison.report(record_property)


async def fill_up(host: Served) -> None:
    """First: eviction, ahead of need."""
    for seed in range(9):
        await host.greedy(random_prompt(seed, NUM_TOKENS), max_tokens=1)
    cache, pool = stats(host)["cache"], stats(host)["pool"]
    # 45 blocks of 40, of which five are to be free.
    assert (cache["evicted_by"], pool["free_blocks"]) == ({"watermark": 10}, 5)


async def ask_too_much(host: Served, comparison: Comparison) -> None:
    """Then: waiting, and refusals that say when to try again; whoever waits is served right."""
    prompts = [random_prompt(100 + seed, 30) for seed in range(8)]
    ears = [host.submit(prompt, 60) for prompt in prompts]
    assert stats(host)["engine"]["num_waiting"] == 4
    finals = await asyncio.gather(*(ear.final for ear in ears))
    served_ones, refused = finals[:5], finals[5:]
    assert all(isinstance(final, FinishRequest) for final in served_ones)
    for final in refused:
        assert isinstance(final, FailRequest)
        assert (final.code, final.retryable) == ("queue_full", True)
        assert final.retry_after_ms is not None
        assert final.retry_after_ms > 0
    # 23 blocks each in the end, of 40: they cannot all have theirs at once.
    assert host.engine.state.snapshot().engine.preemptions > 0
    for prompt, ear in zip(prompts[:5], ears[:5], strict=True):
        tokens = [token for piece in ear.emitted for token in piece.token_ids]
        comparison.check(tokens, *oracle(tiny_reference(), prompt, 60))
    for prompt in prompts[5:]:
        assert len((await host.greedy(prompt, 6)).token_ids) == 6
