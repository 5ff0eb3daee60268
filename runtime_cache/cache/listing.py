"""What the caches hold, as an operator sees it: prefixes in an order, filtered, by pages. Pure.

An entry is what nothing continues, and each registration, pin and lease.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheEntry, Keep, KeepKind
from runtime_cache.ids import BlockId, TenantName

SortKey = Literal["used", "age", "size", "hits", "tokens"]


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """Which entries, and in which order.

    Attributes:
        limit, offset: of the page; no limit for None.
        sort: what comes first: `used` the last used, `age` the oldest, `size` the most blocks,
            `hits` the most often reused, `tokens` the longest.
        is_reversed: the other way round. Registrations of which nothing is kept are last anyway.
        created_until_s, used_until_s: not what was committed, or used, later; on the clock of the
            engine's events.
        min_blocks, min_hits, max_hits: both ends included.
        kept: what is kept for one of these reasons; nothing that is kept if empty; None for all.
    """

    limit: int | None = None
    offset: int = 0
    sort: SortKey = "used"
    is_reversed: bool = False
    created_until_s: float | None = None
    used_until_s: float | None = None
    min_blocks: int = 0
    min_hits: int = 0
    max_hits: int | None = None
    kept: frozenset[KeepKind] | None = None


class Page(NamedTuple):
    """A part of the entries, in order, and how many there are in all."""

    entries: list[tuple[TenantName, CacheEntry]]
    total: int


class _Found(NamedTuple):
    """What becomes an entry if it is of the page; `node` is None for an empty registration."""

    tenant: TenantName
    node: PrefixNode | None
    keep: Keep | None


def page(caches: Mapping[TenantName, CacheManager], query: EntryQuery) -> Page:
    """The entries of these caches that are asked for.

    Of one block the keeps come in the order in which they were made, before what else is equal.
    """
    found = _all_of(caches)
    if query != EntryQuery(query.limit, query.offset, query.sort, query.is_reversed):
        found = [f for f in found if _is_meant(f, query)]
    full = [f for f in found if f.node is not None]
    empty = [f for f in found if f.node is None]
    stop = len(found) if query.limit is None else query.offset + query.limit
    pick = heapq.nsmallest if query.is_reversed else heapq.nlargest
    listed = (pick(stop, full, key=_KEYS[query.sort]) + empty)[query.offset : stop]
    holds = {tenant: holds_of_keeps(caches[tenant]) for tenant in {f.tenant for f in listed}}
    return Page(
        [(f.tenant, _entry(caches[f.tenant], f, holds[f.tenant])) for f in listed], len(found)
    )


def entry_of(cache: CacheManager, node: PrefixNode, keep: Keep | None = None) -> CacheEntry:
    """One block's prefix as an entry.

    Args:
        keep: of which `node` is the end, if the entry is that of a keep.
    """
    return _entry(cache, _Found(TenantName(""), node, keep), holds_of_keeps(cache))


def holds_of_keeps(cache: CacheManager) -> Counter[BlockId]:
    """Block → holds on it that are registrations, pins and leases."""
    return Counter(block for keep in cache.keeps for block in keep.blocks)


def end_of(cache: CacheManager, keep: Keep) -> PrefixNode | None:
    """Where a keep ends: its last block that is still cached; None if there is none.

    That block may have more tokens now than when it was kept; or a failed step took it away.
    """
    nodes = (cache.index.node_of(block) for block in reversed(keep.blocks))
    return next((node for node in nodes if node is not None), None)


def _all_of(caches: Mapping[TenantName, CacheManager]) -> list[_Found]:
    found: list[_Found] = []
    for tenant, cache in caches.items():
        kept = [_Found(tenant, end_of(cache, keep), keep) for keep in cache.keeps]
        ends = {each.node for each in kept}
        leaves = (node for node in cache.index if not node.children)
        found += kept
        found += [_Found(tenant, node, None) for node in leaves if node not in ends]
    return found


def _is_meant(found: _Found, query: EntryQuery) -> bool:
    keep, kept = found.keep, query.kept
    if kept is not None and (keep.kind not in kept if keep is not None else bool(kept)):
        return False
    if query.created_until_s is not None and _created_s(found) > query.created_until_s:
        return False
    if query.used_until_s is not None and _used_s(found) > query.used_until_s:
        return False
    if _num_blocks(found) < query.min_blocks:
        return False
    if not query.min_hits and query.max_hits is None:
        return True  # most often; the hits are those of a prefix's first block
    most = query.max_hits
    return query.min_hits <= _num_hits(found) and (most is None or _num_hits(found) <= most)


def _created_s(found: _Found) -> float:
    if found.node is not None:
        return found.node.created_s
    return 0.0 if found.keep is None else found.keep.created_s


def _used_s(found: _Found) -> float:
    return _created_s(found) if found.node is None else found.node.last_used_s


def _num_blocks(found: _Found) -> int:
    return 0 if found.node is None else found.node.num_blocks


def _num_hits(found: _Found) -> int:
    node = found.node
    if node is None:
        return 0
    while (parent := node.parent) is not None:
        node = parent
    return node.num_hits


def _num_tokens(found: _Found) -> int:
    """Of a kept one those that are kept, even if its last block has more."""
    node, keep = found.node, found.keep
    if node is None:
        return 0
    return node.num_tokens if keep is None else min(node.num_tokens, keep.num_tokens)


#: What is larger comes first.
_KEYS: dict[SortKey, Callable[[_Found], float]] = {
    "used": _used_s,
    "age": lambda found: -_created_s(found),
    "size": _num_blocks,
    "hits": _num_hits,
    "tokens": _num_tokens,
}


def _entry(cache: CacheManager, found: _Found, holds: Counter[BlockId]) -> CacheEntry:
    node = found.node
    num_requests = 0 if node is None else cache.pool.num_holds(node.block) - holds[node.block]
    return CacheEntry(
        digest="" if node is None else node.digest.hex(),
        num_tokens=_num_tokens(found),
        num_blocks=_num_blocks(found),
        num_requests=num_requests,
        num_hits=_num_hits(found),
        created_s=_created_s(found),
        last_used_s=_used_s(found),
        priority=0 if node is None else node.priority,
        keep=found.keep,
    )
