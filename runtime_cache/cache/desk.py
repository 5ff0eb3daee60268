"""What an operator does with a cache: find, pin, show, evict. Pure functions of a manager."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from runtime_cache.cache.eviction import Rank
from runtime_cache.cache.listing import end_of, entry_of, holds_of_keeps
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import BlockFacts, Evicted, Keep, ShownEntry
from runtime_cache.errors import InvalidRequest, UnknownEntry, UnknownPrefix
from runtime_cache.ids import BlockHash, BlockId, PrefixId

_DIGEST_CHARS = 64


def pin(cache: CacheManager, digest: str, ttl_s: float | None) -> Keep | None:
    """Keep a cached prefix until it is unpinned, or for a time.

    Pinning it again changes how long; but a pin never becomes a lease: it was promised to stay
    until it is unpinned.

    Args:
        digest: of its last block (hexadecimal), or an unambiguous beginning of that.

    Returns:
        None if there would be more keeps, or they would hold more, than they may; then nothing
        has changed.

    Raises:
        UnknownEntry, InvalidRequest: as `find`; nothing has changed.
    """
    node = find(cache, digest)
    earlier = cache.keeps.get("pin", node.digest.hex())
    if earlier is not None and earlier.kind == "pin":
        ttl_s = None
    keep = Keep(
        name=node.digest.hex(),
        kind="pin" if ttl_s is None else "lease",
        digest=node.digest.hex(),
        num_tokens=node.num_tokens,
        blocks=tuple(n.block for n in node.path),
        created_s=cache.now_s,
        expires_s=None if ttl_s is None else cache.now_s + ttl_s,
    )
    return keep if cache.keep(keep) else None


def unpin(cache: CacheManager, digest: str) -> Keep:
    """Give up a pin or lease.

    Raises:
        UnknownEntry: nothing of that digest is pinned.
        InvalidRequest: several are. In both cases nothing has changed.
    """
    pins = [keep for keep in cache.keeps if keep.kind != "registration"]
    found = {keep.name for keep in pins if keep.name.startswith(digest)}
    if not found:
        # Its last block may have got more tokens since.
        ends = ((keep.name, end_of(cache, keep)) for keep in pins)
        found = {
            name for name, end in ends if end is not None and end.digest.hex().startswith(digest)
        }
    keep = cache.keeps.pop("pin", _only(digest, sorted(found), "pinned or leased"))
    cache.give_up(keep)
    if keep is None:
        raise UnknownEntry(f"no pin or lease `{digest}`")
    return keep


def find(cache: CacheManager, digest: str) -> PrefixNode:
    """The cached block with this digest or an unambiguous beginning of it (hexadecimal).

    Raises:
        UnknownEntry: there is none.
        InvalidRequest: there are several.
    """
    if len(digest) < _DIGEST_CHARS:
        found = [name for node in cache.index if (name := node.digest.hex()).startswith(digest)]
        digest = _only(digest, found, "cached")
    node = cache.index.get(BlockHash(bytes.fromhex(digest)))
    if node is None:
        raise UnknownEntry(f"nothing cached has the digest `{digest}`")
    return node


# -- showing ------------------------------------------------------------------------------------


def show(cache: CacheManager, digest: str) -> ShownEntry:
    """A cached prefix, block by block.

    Raises:
        UnknownEntry, InvalidRequest: as `find`.
    """
    node = find(cache, digest)
    kept = (k for k in cache.keeps if end_of(cache, k) is node)
    return _shown(cache, node, next(kept, None))


def show_registered(cache: CacheManager, prefix_id: PrefixId) -> ShownEntry:
    """The same of a registered prefix.

    Raises:
        UnknownPrefix: it is not registered.
        UnknownEntry: nothing of it is kept.
    """
    keep = cache.keeps.get("registration", prefix_id)
    if keep is None:
        raise UnknownPrefix(f"no prefix `{prefix_id}` is registered")
    node = end_of(cache, keep)
    if node is None:
        raise UnknownEntry(f"nothing of `{prefix_id}` is kept")
    return _shown(cache, node, keep)


def _shown(cache: CacheManager, node: PrefixNode, keep: Keep | None) -> ShownEntry:
    holds = holds_of_keeps(cache)
    entry = entry_of(cache, node, keep)
    blocks = tuple(_block(cache, n, holds) for n in node.path)
    tokens = b"".join(n.tokens for n in node.path)
    return ShownEntry(entry, blocks, node.num_children, tokens)


def _block(cache: CacheManager, node: PrefixNode, holds: Counter[BlockId]) -> BlockFacts:
    num_kept = holds[node.block]
    return BlockFacts(
        digest=node.digest.hex(),
        num_tokens=node.num_rows,
        num_hits=node.num_hits,
        last_used_s=node.last_used_s,
        num_requests=cache.pool.num_holds(node.block) - num_kept,
        is_kept=num_kept > 0,
    )


# -- evicting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What an operator's eviction does, looked at before it is done.

    Attributes:
        nodes: the blocks that go, in this order: each after all that goes on from it.
        num_in_use: blocks it is about that live requests hold.
        num_kept: those that only registrations, pins and leases hold.
    """

    nodes: list[PrefixNode]
    num_in_use: int
    num_kept: int

    def carry_out(self, cache: CacheManager) -> Evicted:
        """Evict; nothing may have happened in the cache since the plan was made."""
        for node in self.nodes:
            cache.evict_node(node, "operator")
        return self.result

    @property
    def result(self) -> Evicted:
        """What was, or would be, evicted and not."""
        return Evicted(len(self.nodes), self.num_in_use, self.num_kept)


def next_of_all(caches: Sequence[CacheManager], max_blocks: int) -> list[int]:
    """How many of each cache's blocks are among those that go next, as if all were one cache.

    That is by rank (`eviction`), and in one rank by when they were last used.
    """
    if sum(cache.num_evictable for cache in caches) <= max_blocks:
        return [cache.num_evictable for cache in caches]
    queues = (zip(cache.index.parked, repeat(number)) for number, cache in enumerate(caches))
    counts = Counter(number for _, number in islice(heapq.merge(*queues, key=_turn), max_blocks))
    return [counts[number] for number in range(len(caches))]


def _turn(parked: tuple[PrefixNode, int]) -> tuple[Rank, float]:
    node, _ = parked
    assert node.rank is not None  # as it is parked
    return node.rank, node.last_used_s


def plan_blocks(cache: CacheManager, max_blocks: int | None) -> EvictionPlan:
    """The cached blocks that go next (None: all that nobody holds)."""
    nodes = list(islice(cache.index.parked, max_blocks))
    holds = holds_of_keeps(cache)
    num_kept = sum(
        cache.pool.num_holds(block) == num_holds and cache.index.node_of(block) is not None
        for block, num_holds in holds.items()
    )
    return EvictionPlan(nodes, len(cache.index) - cache.num_evictable - num_kept, num_kept)


def plan_entry(cache: CacheManager, digest: str) -> EvictionPlan:
    """A prefix: its block, all that goes on from it, and what only led to it.

    In use, or kept, are those blocks of the prefix, and of what goes on from it, that are held.

    Raises:
        UnknownEntry, InvalidRequest: as `find`.
    """
    node = find(cache, digest)
    branch, way = list(below(node)), node.path[-2::-1]
    nodes = _that_can_go(branch)
    if nodes and nodes[-1] is node:
        nodes = _that_can_go([*branch, *way])
    return EvictionPlan(nodes, *_held(cache, [*branch, *way]))


def plan_old(
    cache: CacheManager, is_old: Callable[[PrefixNode], bool], max_blocks: int | None = None
) -> EvictionPlan:
    """What nobody holds, is old, and is continued by nothing that is not (None: all of it)."""
    old = (node for node in cache.index.parked if is_old(node))
    nodes = _that_can_go(old, max_blocks)
    return EvictionPlan(nodes, *_held(cache, filter(is_old, cache.index)))


def _that_can_go(nodes: Iterable[PrefixNode], max_blocks: int | None = None) -> list[PrefixNode]:
    """Those that nobody holds, and that nothing continues once those before them have gone."""
    going: list[PrefixNode] = []
    num_gone: Counter[BlockId] = Counter()
    for node in nodes:
        if len(going) == max_blocks:
            break
        if node.rank is not None and node.num_children == num_gone[node.block]:
            going.append(node)
            if node.parent is not None:
                num_gone[node.parent.block] += 1
    return going


def _held(cache: CacheManager, nodes: Iterable[PrefixNode]) -> tuple[int, int]:
    """How many of these live requests hold, and how many only keeps do."""
    holds = holds_of_keeps(cache)
    held = [node.block for node in nodes if node.rank is None]
    num_in_use = sum(cache.pool.num_holds(block) > holds[block] for block in held)
    return num_in_use, len(held) - num_in_use


def below(node: PrefixNode) -> Iterator[PrefixNode]:
    """A node and all that goes on from it, children first."""
    stack, order = [node], []
    while stack:
        order.append(top := stack.pop())
        stack.extend(top.children or ())
    return reversed(order)


def _only(digest: str, found: list[str], what: str) -> str:
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} digests begin with `{digest}`: give more of it")
    if not found:
        raise UnknownEntry(f"nothing {what} has a digest that begins with `{digest}`")
    return found[0]
