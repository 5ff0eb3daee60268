"""What `stats` exports, by name, and that its rates weigh tokens.

[50, 52] of facts/peers.md (d). The counters are those of the answers, and of what the device did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim.settings import SimSettings
from runtime_cache.facts import DaemonFacts
from tests.support.served import Greedy, Served, random_prompt, served

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

PAGE = (Path(__file__).parents[2] / "docs" / "cache.md").read_text("utf-8")
POOL = {"num_blocks", "live_blocks", "cached_blocks", "free_blocks", "kept_blocks"}
POOL |= {"registered_prefixes", "pins", "block_size", "bytes_per_block", "capacity_tokens"}
CACHE = {"queried_tokens", "hit_tokens", "hit_rate", "copied_tokens", "rounded_tokens"}
CACHE |= {"requests_by_reason", "inserted_blocks", "evicted_blocks", "evicted_by"}
CACHE |= {"evicted_unused_blocks", "evicted_idle_s", "superseded_blocks", "duplicate_blocks"}
CACHE |= {"dropped_blocks", "damaged_blocks", "collisions", "failed_lookups"}
CACHE |= {"reuses", "reuse_gap_s"}
TENANT = {"share_percent", "capacity_tokens", "max_kept_blocks", "num_waiting", "num_running"}
TENANT |= CACHE | POOL - {"block_size", "bytes_per_block"}


def stats(host: Served) -> dict[str, Any]:
    return DaemonFacts(host.runtime, []).stats()


async def test_the_names(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, tenants={"a": 50}) as host:
        found = stats(host)
        assert set(found["pool"]) == POOL
        assert set(found["cache"]) == CACHE
        assert {name: set(tenant) for name, tenant in found["tenants"].items()} == {
            "": TENANT,
            "a": TENANT,
        }
        memory = set(found["device"]["memory"])
        assert memory == {"free_bytes", "total_bytes", "loaded_bytes", "planned_bytes", "is_low"}
    assert [name for name in CACHE | TENANT | memory if f"`{name}`" not in PAGE] == []


async def test_one_long_hit_weighs_more_than_many_short_misses(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle) as host:
        answers: list[Greedy] = []
        for prompt in (random_prompt(1, 101), random_prompt(1, 101), *([n] for n in range(9))):
            answers.append(await host.greedy(prompt, max_tokens=1))
        found = stats(host)
        cache, engine = found["cache"], found["engine"]
        assert cache["queried_tokens"] == 101 + 101 + 9
        assert cache["hit_tokens"] == sum(answer.cached for answer in answers) == 100
        assert cache["reuse_gap_s"] == round(cache["reuse_gap_s"], 3)
        assert cache["hit_rate"] == round(100 / 211, 4)
        assert cache["reuses"] == 1  # of requests it is one of eleven
        assert cache["requests_by_reason"] == {"cold": 1, "hit": 1, "too_short": 9}
        assert engine["prefill_tokens"] == sum(answer.prefilled for answer in answers) == 111
        # What the device did, which counts by itself.
        assert host.rows_appended() == engine["prefill_tokens"] + engine["decode_tokens"] == 111


async def test_what_loading_took_stands_beside_what_was_planned(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle) as host:
        memory = stats(host)["device"]["memory"]
        used = memory["total_bytes"] - memory["free_bytes"]
        assert memory["loaded_bytes"] == used - SimSettings().initial_use_bytes
        # Each allocation of the device rounds up to a huge page.
        assert host.runtime.layout.pool_bytes < memory["planned_bytes"]
        assert abs(memory["planned_bytes"] - memory["loaded_bytes"]) < 16 << 20
