"""Every cache option from the configuration to what a request feels, one step to either side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from om_models.bundle import Bundle
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.engine.commands import FailRequest
from runtime_cache.engine.request import NewRequest, SamplingParams
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import PrefixId, RequestId
from tests.support.served import BLOCK, Ear, Served, random_prompt, served

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: A block of the tiny bundle takes this much [MiB].
BLOCK_MIB = 1024 / 2**20


@asynccontextmanager
async def with_options(
    bundle: Bundle, *, num_blocks: int = 81, **options: Any
) -> AsyncIterator[Served]:
    async with served(bundle, num_blocks=num_blocks, cache=options) as host:
        yield host


async def reused(host: Served, prompt: list[int]) -> int:
    """Tokens of a prompt that are reused the second time."""
    await host.greedy(prompt, max_tokens=1)
    return (await host.greedy(prompt, max_tokens=1)).cached


def stats(host: Served) -> dict[str, Any]:
    return DaemonFacts(host.runtime, []).stats()


async def test_a_block_is_as_large_as_the_tests_think(tiny_bundle: Bundle) -> None:
    async with with_options(tiny_bundle) as host:
        assert host.runtime.layout.block_bytes == BLOCK_MIB * 2**20


async def test_off(tiny_bundle: Bundle) -> None:
    async with with_options(tiny_bundle, enable=False) as host:
        await host.greedy(random_prompt(1, 21))
        answer = await host.greedy(random_prompt(1, 21))
        assert answer.cached == 0
        assert answer.report is not None
        assert (answer.report.reason, bool(answer.report.detail)) == ("disabled", True)
        assert stats(host)["pool"]["free_blocks"] == 80


async def test_without_auto_detect_only_registered_prefixes_are_kept(tiny_bundle: Bundle) -> None:
    async with with_options(tiny_bundle, auto_detect=False) as host:
        prefix = random_prompt(1, 21)
        assert await reused(host, prefix) == 0
        await host.register("p", prefix)
        assert await reused(host, [*prefix, 1, 2, 3]) == 21
        assert stats(host)["pool"]["cached_blocks"] == 0  # all that is there is kept
        assert host.engine.release_prefix(PrefixId("p"))
        assert await reused(host, prefix) == 20  # as long as it is not evicted


@pytest.mark.parametrize(
    ("limit", "num_tokens", "cached"),
    [(9, 9, 8), (9, 10, 9), (9, 11, 9), (8, 11, 8), (1, 9, 1), (None, 11, 10)],
)
async def test_max_prefix_length(
    tiny_bundle: Bundle, limit: int | None, num_tokens: int, cached: int
) -> None:
    async with with_options(tiny_bundle, max_prefix_length=limit) as host:
        prompt = random_prompt(1, num_tokens)
        assert await reused(host, prompt) == cached
        report = (await host.greedy(prompt, max_tokens=1)).report
        assert report is not None
        assert report.reason == ("hit" if cached == num_tokens - 1 else "limit")


@pytest.mark.parametrize(("limit", "left"), [(1, 1), (3, 3), (4, 4), (5, 4), (None, 4)])
async def test_max_cached_prefixes_counts_those_that_nothing_continues(
    tiny_bundle: Bundle, limit: int | None, left: int
) -> None:
    async with with_options(tiny_bundle, max_cached_prefixes=limit) as host:
        prompts = [random_prompt(seed, 12) for seed in range(4)]
        for prompt in prompts:
            await host.greedy(prompt, max_tokens=1)
            await host.greedy([*prompt, *random_prompt(9, 4)], max_tokens=1)  # goes on from it
        facts = DaemonFacts(host.runtime, [])
        assert facts.entries(EntryQuery(limit=9))[1] == left
        for prompt in prompts[-left:]:
            assert (await host.greedy(prompt, max_tokens=1)).cached == 11


@pytest.mark.parametrize(("policy", "cached"), [("lru", 0), ("slru", 40)])
async def test_the_eviction_policy_decides_whether_a_scan_pushes_out_what_is_hot(
    tiny_bundle: Bundle, policy: str, cached: int
) -> None:
    """One-off prompts of three times the capacity; the hot prefix is not asked for meanwhile."""
    hot = random_prompt(0, 41)
    async with with_options(tiny_bundle, num_blocks=41, eviction_policy=policy) as host:
        assert await reused(host, hot) == 40
        for seed in range(1, 9):
            await host.greedy(random_prompt(seed, 61), max_tokens=1)
        assert host.runtime.cache.counters.evicted_blocks > 80
        assert (await host.greedy(hot, max_tokens=1)).cached == cached


@pytest.mark.parametrize(
    ("low", "high", "free"),
    [(0, 0, 0), (1, 1, 1), (9, 9, 9), (10, 10, 10), (11, 11, 11), (10, 20, 20), (10, 30, 20)],
)
async def test_watermarks_keep_blocks_free(
    tiny_bundle: Bundle, low: int, high: int, free: int
) -> None:
    """Of 80 blocks an eighth is 10, a quarter 20; just as many are left when the cache is full."""
    options = {"low_watermark_mb": low * BLOCK_MIB, "high_watermark_mb": high * BLOCK_MIB}
    async with with_options(tiny_bundle, **options) as host:
        for seed in range(4):
            await host.greedy(random_prompt(seed, 80), max_tokens=1)
        assert stats(host)["pool"]["free_blocks"] == free


async def refusal_of_registration(host: Served, prompt: list[int]) -> FailRequest:
    ear = Ear()
    tokens = np.array(prompt, dtype=np.int32)
    params = SamplingParams(temperature=0.0)
    request = NewRequest(RequestId(999), tokens, params, kind="register", prefix_id=PrefixId("q"))
    host.engine.submit(request, ear)
    answer = await ear.final
    assert isinstance(answer, FailRequest)
    return answer


@pytest.mark.parametrize(
    ("percent", "num_blocks"), [(0, 0), (10, 8), (11, 8), (12, 9), (13, 10), (100, 80)]
)
async def test_max_kept_percent_bounds_what_is_registered(
    tiny_bundle: Bundle, percent: int, num_blocks: int
) -> None:
    async with with_options(tiny_bundle, max_kept_percent=percent) as host:
        keeps = host.runtime.cache.keeps
        assert keeps.max_blocks == num_blocks
        if 0 < num_blocks < 20:
            await host.register("p", random_prompt(1, num_blocks * BLOCK))
            assert keeps.num_blocks == num_blocks
            assert "hold" in (await refusal_of_registration(host, random_prompt(2, 4))).message
            prompt = random_prompt(3, num_blocks * BLOCK + 1)
            assert (await refusal_of_registration(host, prompt)).code == "too_long"


async def test_a_warning_before_the_limit_of_keeps_is_reached(tiny_bundle: Bundle) -> None:
    async with with_options(tiny_bundle, max_kept_percent=13) as host:  # ten blocks
        await host.register("p", random_prompt(1, 36))
        assert stats(host)["warnings"] == []
        await host.register("q", random_prompt(2, 4))
        (warning,) = stats(host)["warnings"]
        assert warning.startswith("registrations, pins and leases: 2, blocks they hold: 10; ")


async def test_deterministic_mode_reuses_whole_chunks_and_says_what_that_costs(
    tiny_bundle: Bundle,
) -> None:
    async with with_options(tiny_bundle, deterministic=True) as host:
        chunk = host.runtime.gears.chunk
        assert chunk >= BLOCK
        assert host.runtime.gears.max_batch == 1
        prompt = random_prompt(1, 2 * chunk + 1)
        assert await reused(host, prompt) == 2 * chunk
        assert await reused(host, prompt[:-1]) == chunk
        cost = stats(host)["cache"]["deterministic"]
        # Of each of the two prompts but one token, which is computed anyhow.
        assert cost == {"grid_tokens": chunk, "rounded_tokens": 2 * (chunk - 1)}
        short = await host.greedy(random_prompt(2, chunk), max_tokens=1)
        assert short.report is not None
        assert short.report.reason == "too_short"


async def test_outside_deterministic_mode_there_is_no_such_cost(tiny_bundle: Bundle) -> None:
    async with with_options(tiny_bundle) as host:
        assert "deterministic" not in stats(host)["cache"]
