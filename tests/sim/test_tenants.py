"""Tenants of one pool: each sees and moves only its own part, and a changed bundle is nobody's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.messages import MessageId
from om_models.bundle import Bundle, load_bundle
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.config import DaemonConfig
from runtime_cache.errors import ConfigError
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.runtime import Runtime
from tests.sim.test_runtime import nothing_is_open
from tests.support.served import Served, config_for, opened_runtime, random_prompt, served

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ALICE, BOB = TenantName("alice"), TenantName("bob")
EVERYBODY = (DEFAULT_TENANT, ALICE, BOB)
SHARES = {"alice": 25.0, "bob": 25.0}


def facts_of(host: Served) -> DaemonFacts:
    return DaemonFacts(host.runtime, [])


def digests_of(host: Served, tenant: TenantName | None) -> set[str]:
    entries, total = facts_of(host).entries(EntryQuery(limit=1000), tenant)
    assert len(entries) == total
    assert tenant is None or {entry.tenant for entry in entries} <= {tenant}
    return {entry.digest for entry in entries}


async def test_each_finds_only_what_is_its_own(tiny_bundle: Bundle) -> None:
    prompt = random_prompt(1, 21)
    async with served(tiny_bundle, tenants=SHARES) as host:
        for tenant in EVERYBODY:
            answer = await host.greedy(prompt, tenant=tenant)
            assert answer.cached == 0
            assert answer.report is not None
            # A cold cache and one in which only others have been look the same.
            assert (answer.report.reason, answer.report.nearest_tokens) == ("cold", None)
        for tenant in EVERYBODY:
            assert (await host.greedy(prompt, tenant=tenant)).cached == 20
        found = [digests_of(host, tenant) for tenant in EVERYBODY]
        assert all(found)
        assert len(set.union(*found)) == sum(map(len, found))
        assert digests_of(host, None) == set.union(*found)


async def test_a_flood_of_one_evicts_nothing_of_the_others(tiny_bundle: Bundle) -> None:
    prompt = random_prompt(1, 41)
    async with served(tiny_bundle, num_blocks=81, tenants=SHARES) as host:
        for tenant in EVERYBODY:
            await host.greedy(prompt, tenant=tenant)
        before = {tenant: digests_of(host, tenant) for tenant in EVERYBODY}
        for seed in range(2, 8):  # six times 16 blocks, three times what alice has
            await host.greedy(random_prompt(seed, 60), tenant=ALICE)
        counters = {tenant: host.runtime.caches[tenant].counters for tenant in EVERYBODY}
        assert counters[ALICE].evicted_blocks >= 60
        for tenant in (DEFAULT_TENANT, BOB):
            assert counters[tenant].evicted_blocks == 0
            assert digests_of(host, tenant) == before[tenant]
            assert (await host.greedy(prompt, tenant=tenant)).cached == 40


async def test_what_is_kept_by_one_takes_no_room_of_the_others(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, num_blocks=81, tenants=SHARES) as host:
        await host.register("p", random_prompt(1, 40), tenant=ALICE)
        assert host.runtime.caches[ALICE].keeps.num_blocks == 10
        assert not host.engine.release_prefix("p", BOB)
        await host.register("p", random_prompt(1, 40), tenant=BOB)
        assert host.engine.release_prefix("p", ALICE)
        stats = facts_of(host).stats()
        kept = {name: tenant["kept_blocks"] for name, tenant in stats["tenants"].items()}
        assert kept == {"": 0, "alice": 0, "bob": 10}


async def test_stats_tell_each_part_and_the_sum(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, num_blocks=81, tenants={"alice": 25, "bob": 12.5}) as host:
        for tenant, num_tokens in zip(EVERYBODY, (40, 20, 10), strict=True):
            for _ in range(2):
                await host.greedy(random_prompt(1, num_tokens), max_tokens=1, tenant=tenant)
        stats = facts_of(host).stats()
        tenants = stats["tenants"]
        assert [t["num_blocks"] for t in tenants.values()] == [50, 20, 10]
        assert [t["share_percent"] for t in tenants.values()] == [62.5, 25.0, 12.5]
        assert [t["capacity_tokens"] for t in tenants.values()] == [200, 80, 40]
        assert [t["max_kept_blocks"] for t in tenants.values()] == [25, 10, 5]
        assert [t["queried_tokens"] for t in tenants.values()] == [80, 40, 20]
        assert [t["hit_tokens"] for t in tenants.values()] == [39, 19, 9]
        assert [t["hit_rate"] for t in tenants.values()] == [0.4875, 0.475, 0.45]
        for section in ("pool", "cache"):
            for name, total in stats[section].items():
                if name in tenants[""] and isinstance(total, int):
                    assert total == sum(tenant[name] for tenant in tenants.values()), name
        assert stats["cache"]["hit_rate"] == round(67 / 140, 4)
        assert stats["cache"]["requests_by_reason"] == {"cold": 3, "hit": 3}
        assert stats["pool"]["num_blocks"] == 80


async def test_a_client_is_told_of_its_own_part_alone(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, num_blocks=81, tenants={"alice": 25}) as host:
        facts = facts_of(host)
        infos = {tenant: facts.info(MessageId("1"), tenant) for tenant in (DEFAULT_TENANT, ALICE)}
        assert infos[ALICE].limits["cache_tokens"] == 80
        assert infos[ALICE].max_model_len == 81
        assert infos[DEFAULT_TENANT].limits["cache_tokens"] == 240
        assert infos[DEFAULT_TENANT].max_model_len == 128
        await host.greedy(random_prompt(1, 60), tenant=DEFAULT_TENANT)
        assert facts.info(MessageId("1"), ALICE) == infos[ALICE]


async def test_lists_of_all_tenants_are_merged_by_last_use(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, tenants=SHARES) as host:
        order = (BOB, DEFAULT_TENANT, ALICE, BOB)
        for seed, tenant in enumerate(order):
            await host.greedy(random_prompt(seed, 20), tenant=tenant)
        facts = facts_of(host)
        entries, total = facts.entries(EntryQuery(limit=10))
        assert total == 4
        assert [entry.tenant for entry in entries] == list(reversed(order))
        paged = [facts.entries(EntryQuery(limit=1, offset=i))[0][0].digest for i in range(4)]
        assert paged == [entry.digest for entry in entries]
        assert facts.entries(EntryQuery(limit=2, offset=3))[0][0].digest == entries[3].digest


async def test_without_tenants_stats_have_no_section_of_them(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle) as host:
        assert "tenants" not in facts_of(host).stats()
        assert facts_of(host).stats()["cache"]["hit_rate"] is None


async def test_parts_that_are_too_small_stop_the_start(tiny_bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match=r"tenant 'alice' gets 1 with 2\.5 percent"):
        await Runtime.open(config_for(tiny_bundle, num_blocks=42, tenants={"alice": 2.5}))
    assert nothing_is_open()


# --- identity -------------------------------------------------------------------------------------


async def roots_of(bundle: Bundle, state: Path | str, **changes: Any) -> dict[TenantName, bytes]:
    config = config_for(bundle, tenants={"alice": 50}, **changes)
    daemon = DaemonConfig(state_dir=str(state))
    async with opened_runtime(msgspec.structs.replace(config, daemon=daemon)) as runtime:
        return {name: cache.root for name, cache in runtime.caches.items()}


def another(bundle: Bundle, directory: Path) -> Bundle:
    """The same files under another digest, as other weights or another KV type have it."""
    copy = Path(shutil.copytree(bundle.path, directory / "bundle"))
    path = copy / "manifest.json"
    digest = bundle.manifest.digest
    path.write_text(path.read_text().replace(digest, digest[::-1]))
    return load_bundle(copy)


async def test_a_changed_bundle_makes_all_entries_unreachable(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    prompt = random_prompt(1, 41)
    found = []
    for bundle in (tiny_bundle, another(tiny_bundle, tmp_path), tiny_bundle):
        async with served(bundle) as host:
            assert (await host.greedy(prompt)).cached == 0
            found.append(digests_of(host, None))
    assert found[0] == found[2]  # names are the same in every process
    assert not found[0] & found[1]


async def test_what_is_in_the_root(tiny_bundle: Bundle, tmp_path: Path) -> None:
    state = tmp_path / "state"
    roots = await roots_of(tiny_bundle, state)
    assert await roots_of(tiny_bundle, state) == roots
    others = [
        await roots_of(tiny_bundle, state, cache={"block_size": 8}),
        await roots_of(another(tiny_bundle, tmp_path), state),
    ]
    salted = [await roots_of(tiny_bundle, where) for where in (tmp_path / "other", "", "")]
    assert {found[DEFAULT_TENANT] for found in salted} == {roots[DEFAULT_TENANT]}
    every = [root for found in (roots, *others) for root in found.values()]
    every += [found[ALICE] for found in salted]
    assert len(set(every)) == len(every)
