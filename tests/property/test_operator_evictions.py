"""A dry run of an operator's eviction changes nothing and tells what the real one then does.

Also when that goes in parts, over several tenants, while requests hold some blocks and operators
keep others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages import Evict, Evicted, MessageId
from runtime_cache import evicting
from runtime_cache.cache import desk, invariants
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.results import Evicted as EvictedBlocks
from runtime_cache.engine import questions
from runtime_cache.engine.commands import ReportEvicted
from runtime_cache.engine.events import EvictAsked
from runtime_cache.evicting import Eviction
from runtime_cache.ids import BlockHash, TenantName
from tests.support.caching import BLOCK_SIZE, ROOT

ID = MessageId("1")
BYTES_PER_BLOCK = 100
TENANTS = (TenantName(""), TenantName("a"))
NUM_BLOCKS = 24


class House:
    """Two tenants' caches, asked as the engine's loop asks them."""

    bytes_per_block = BYTES_PER_BLOCK

    def __init__(self, policy: CachePolicy) -> None:
        self.now_s = 0.0
        self.tables: dict[TenantName, list[BlockTable]] = {tenant: [] for tenant in TENANTS}
        self.caches: Mapping[TenantName, CacheManager] = {
            tenant: CacheManager(
                blocks=range(1 + NUM_BLOCKS * number, 1 + NUM_BLOCKS * (number + 1)),
                block_size=BLOCK_SIZE,
                root=BlockHash(ROOT if not number else bytes(32)),
                policy=policy,
            )
            for number, tenant in enumerate(TENANTS)
        }

    def num_evictable(self, tenant: TenantName | None) -> int:
        caches = self.caches.values() if tenant is None else (self.caches[tenant],)
        return sum(cache.num_evictable for cache in caches)

    def evict(
        self,
        tenant: TenantName | None,
        *,
        max_blocks: int | None = None,
        digest: str | None = None,
        used_until_s: float | None = None,
        created_until_s: float | None = None,
        is_dry_run: bool = False,
    ) -> EvictedBlocks:
        asked = EvictAsked(
            self.now_s, tenant, max_blocks, digest, used_until_s, created_until_s, is_dry_run
        )
        tables = list(chain.from_iterable(self.tables.values()))
        answer = questions.answer(self.caches, asked, tables=tables, retry_after_ms=1)
        assert isinstance(answer, ReportEvicted)
        return answer.evicted

    def happen(self, tenant: TenantName, tokens: list[int], *, stays: bool, pins: bool) -> None:
        """A request comes, is computed, and goes on running, or leaves its blocks to be kept."""
        cache = self.caches[tenant]
        self.now_s += 1
        cache.now_s = self.now_s
        prompt = cache.new_chain()
        prompt.extend(np.asarray(tokens, dtype=np.int32))
        num_tokens = len(tokens)
        table = cache.admit(
            prompt, num_tokens=num_tokens, max_tokens=num_tokens, max_hit_tokens=num_tokens - 1
        )
        if table is None:
            return
        cache.copied(table)
        cache.commit(table, prompt, num_tokens, is_tail=True)
        if stays:
            self.tables[tenant].append(table)
        else:
            cache.release(table)
        if pins:
            nodes = list(cache.index)
            desk.pin(cache, nodes[-1].digest.hex(), None)

    def standing(self) -> list[tuple[object, ...]]:
        """All that an eviction could change."""
        return [
            (tenant, n.digest, n.rank, n.num_children, cache.pool.num_holds(n.block))
            for tenant, cache in self.caches.items()
            for n in cache.index
        ]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
requests = st.tuples(st.sampled_from(TENANTS), prompts, st.booleans(), st.booleans())
policies = st.sampled_from([CachePolicy(), CachePolicy(eviction="slru")])


@st.composite
def what_to_evict(draw: st.DrawFn, house: House) -> dict[str, Any]:
    """The fields of one `evict`."""
    tenant = draw(st.none() | st.sampled_from(TENANTS))
    caches = house.caches.values() if tenant is None else (house.caches[tenant],)
    digests = [node.digest.hex() for cache in caches for node in cache.index]
    choices: list[st.SearchStrategy[dict[str, Any]]] = [
        st.just({"all": True}),
        st.fixed_dictionaries({"max_blocks": st.integers(1, 9)}),
        st.fixed_dictionaries({"max_bytes": st.integers(1, 9 * BYTES_PER_BLOCK)}),
        st.fixed_dictionaries({"min_bytes": st.integers(1, 9 * BYTES_PER_BLOCK)}),
        st.fixed_dictionaries({"idle_s": st.integers(0, 12)}),
        st.fixed_dictionaries({"age_s": st.integers(0, 12)}),
    ]
    if digests:
        choices.append(st.fixed_dictionaries({"digest": st.sampled_from(digests)}))
    return {"tenant": tenant} | draw(st.one_of(choices))


def in_parts(house: House, message: Evict) -> Evicted:
    """As the service does it."""
    tenant = None if message.tenant is None else TenantName(message.tenant)
    eviction = Eviction(house, house, message, tenant, house.now_s)
    while (reply := eviction.next_part()) is None:
        house.now_s += 0.25  # others are served meanwhile
    return reply


@given(policy=policies, traffic=st.lists(requests, max_size=12), data=st.data())
def test_a_dry_run_tells_what_the_real_one_does(
    policy: CachePolicy,
    traffic: list[tuple[TenantName, list[int], bool, bool]],
    data: st.DataObject,
) -> None:
    house = House(policy)
    for tenant, tokens, stays, pins in traffic:
        house.happen(tenant, tokens, stays=stays, pins=pins)
    what = data.draw(what_to_evict(house))
    before, num_before = house.standing(), house.num_evictable(None)
    with mock.patch.object(evicting, "_PART_BLOCKS", data.draw(st.integers(1, 4))):
        foreseen = in_parts(house, Evict(ID, dry_run=True, **what))
        assert (house.standing(), house.num_evictable(None)) == (before, num_before)
        done = in_parts(house, Evict(ID, **what))
    assert done == msgspec.structs.replace(foreseen, dry_run=False)
    assert done.num_blocks == num_before - house.num_evictable(None)
    assert done.num_bytes == BYTES_PER_BLOCK * done.num_blocks
    if "max_bytes" in what:
        assert done.num_bytes <= what["max_bytes"]
    if "min_bytes" in what:
        is_all = house.num_evictable(what["tenant"]) == 0
        assert done.num_bytes >= what["min_bytes"] or is_all
        assert done.num_bytes < what["min_bytes"] + BYTES_PER_BLOCK
    held = sum(cache.num_live for cache in house.caches.values())
    assert done.in_use_blocks + done.kept_blocks <= held
    for tenant, cache in house.caches.items():
        invariants.check(cache, house.tables[tenant])
