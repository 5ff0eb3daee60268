"""Small builders for tests of the cache, and a pool whose rows say what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime_cache.cache import desk, listing
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.desk import EvictionPlan
from runtime_cache.cache.hashing import HashChain, root_digest
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import DEFAULT_PRIORITY, CachePolicy
from runtime_cache.cache.results import CacheEntry, Keep
from runtime_cache.ids import DEFAULT_TENANT, PrefixId

BLOCK_SIZE = 4
ROOT = root_digest(bundle_digest=b"\x11" * 32, block_size=BLOCK_SIZE)

#: As the fixture `make_cache` of tests/unit: `make_manager` whose caches are checked in the end.
MakeCache = Callable[..., CacheManager]


def make_manager(num_blocks: int, *, policy: CachePolicy | None = None) -> CacheManager:
    """A cache with blocks of four tokens; block 0 is not of it."""
    return CacheManager(
        blocks=range(1, num_blocks),
        block_size=BLOCK_SIZE,
        root=ROOT,
        policy=policy or CachePolicy(),
    )


def chain_of(tokens: Sequence[int]) -> HashChain:
    """The hash chain of `tokens`."""
    chain = HashChain(ROOT, BLOCK_SIZE)
    chain.extend(np.asarray(tokens, dtype=np.int32))
    return chain


def digests_of(tokens: Sequence[int]) -> list[str]:
    """The digests of the full blocks of `tokens` [hexadecimal]."""
    return [digest.hex() for digest in chain_of(tokens).digests]


# -- the road of a request ----------------------------------------------------------------------


def admit(
    cache: CacheManager,
    tokens: Sequence[int],
    *,
    room: int = 0,
    priority: int = DEFAULT_PRIORITY,
    is_caching: bool = True,
    is_retry: bool = False,
) -> BlockTable | None:
    """Admit a prompt as the engine does, with room for `room` more tokens later."""
    return cache.admit(
        chain_of(tokens),
        num_tokens=len(tokens),
        max_tokens=len(tokens) + room,
        max_hit_tokens=len(tokens) - 1,
        priority=priority,
        is_caching=is_caching,
        is_retry=is_retry,
    )


def admitted(
    cache: CacheManager,
    tokens: Sequence[int],
    *,
    room: int = 0,
    priority: int = DEFAULT_PRIORITY,
    is_caching: bool = True,
    is_retry: bool = False,
) -> BlockTable:
    """As `admit`, where it must succeed."""
    table = admit(
        cache,
        tokens,
        room=room,
        priority=priority,
        is_caching=is_caching,
        is_retry=is_retry,
    )
    assert table is not None
    return table


def commit(cache: CacheManager, table: BlockTable, tokens: Sequence[int]) -> None:
    """A step has computed all of `tokens`: its copy is done, everything is indexed."""
    cache.copied(table)
    cache.commit(table, chain_of(tokens), len(tokens), is_tail=True)


def computed(
    cache: CacheManager,
    tokens: Sequence[int],
    *,
    room: int = 0,
    priority: int = DEFAULT_PRIORITY,
) -> BlockTable:
    """Admit, compute and commit a prompt; it is still running."""
    table = admitted(cache, tokens, room=room, priority=priority)
    commit(cache, table, tokens)
    return table


def serve(
    cache: CacheManager, tokens: Sequence[int], *, priority: int = DEFAULT_PRIORITY
) -> list[int]:
    """Admit, compute, commit and release a prompt; returns its blocks."""
    table = computed(cache, tokens, priority=priority)
    blocks = [int(block) for block in table.blocks]
    cache.release(table)
    return blocks


def register(cache: CacheManager, prefix_id: str, tokens: Sequence[int]) -> Keep | None:
    """Register a prefix as the engine does: all of its rows may be there already."""
    table = cache.admit(
        chain_of(tokens),
        num_tokens=len(tokens),
        max_tokens=len(tokens),
        max_hit_tokens=len(tokens),
        is_kept=True,
    )
    assert table is not None
    if table.num_hit_tokens < len(tokens):
        cache.copied(table)
    cache.commit(table, chain_of(tokens), len(tokens), is_tail=True)
    keep = cache.register(PrefixId(prefix_id), table)
    cache.release(table)
    return keep


# -- what an operator asks ----------------------------------------------------------------------


def entries(
    cache: CacheManager, limit: int | None = None, offset: int = 0, **query: Any
) -> tuple[list[CacheEntry], int]:
    """A page of a cache's entries, and how many there are in all."""
    caches = {DEFAULT_TENANT: cache}
    page = listing.page(caches, EntryQuery(limit, offset, **query))
    return [entry for _, entry in page.entries], page.total


def plan_idle(cache: CacheManager, idle_s: float, max_blocks: int | None = None) -> EvictionPlan:
    """To evict what was not used for so long."""
    until_s = cache.now_s - idle_s
    return desk.plan_old(cache, lambda node: node.last_used_s <= until_s, max_blocks)


def plan_aged(cache: CacheManager, age_s: float, max_blocks: int | None = None) -> EvictionPlan:
    """To evict what was committed so long ago."""
    until_s = cache.now_s - age_s
    return desk.plan_old(cache, lambda node: node.created_s <= until_s, max_blocks)


# -- what is where ------------------------------------------------------------------------------


def parked_blocks(cache: CacheManager) -> list[int]:
    """The eviction queue, next to go first."""
    return [int(node.block) for node in cache.index.parked]


def free_blocks(cache: CacheManager) -> list[int]:
    """The free list, next to be handed out first."""
    return [int(block) for block in cache.pool.free_blocks]


def gauges(cache: CacheManager) -> tuple[int, int, int]:
    """Live, evictable and free blocks."""
    return cache.num_live, cache.num_evictable, cache.num_free


def num_cached(cache: CacheManager, tokens: Sequence[int]) -> int:
    """How many of these tokens could be reused if all could be."""
    return cache.match(chain_of(tokens), len(tokens)).num_tokens


class RowPool:
    """A KV pool whose rows remember all tokens up to their own.

    A row that nobody wrote, or that a failed step wrote, holds nothing that anybody expects.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, ...]] = {}

    def copy(self, table: BlockTable) -> None:
        """Do the table's pending copy."""
        if table.copy is None:
            return
        source, num_tokens = table.copy
        first = source * BLOCK_SIZE
        rows = [self._rows.get(slot, ()) for slot in range(first, first + num_tokens)]
        end = table.num_hit_tokens
        self._rows.update(zip(table.slots[end - num_tokens : end].tolist(), rows, strict=True))

    def write(self, table: BlockTable, tokens: Sequence[int], start: int, stop: int) -> None:
        """Compute the rows of `tokens[start:stop]`."""
        for position, slot in enumerate(table.slots[start:stop].tolist(), start):
            self._rows[slot] = tuple(tokens[: position + 1])

    def spoil(self, table: BlockTable, start: int, stop: int) -> None:
        """A step that failed: these rows hold anything."""
        for slot in table.slots[start:stop].tolist():
            self._rows[slot] = ()

    def expect(self, table: BlockTable, tokens: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` rows of a request are those of its tokens."""
        for position, slot in enumerate(table.slots[:num_tokens].tolist()):
            self._expect_row(slot, tokens, position)

    def expect_block(self, block: int, tokens: Sequence[int], start: int, stop: int) -> None:
        """The rows of a block, from its first on, are those of `tokens[start:stop]`."""
        for position in range(start, stop):
            self._expect_row(block * BLOCK_SIZE + position - start, tokens, position)

    def _expect_row(self, slot: int, tokens: Sequence[int], position: int) -> None:
        row = self._rows.get(slot, ())
        expected = tuple(tokens[: position + 1])
        assert row == expected, f"slot {slot} is to hold {expected}, it holds {row}"
