"""What an operator does with a cache: list, pin, evict. Pure functions of a manager."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheEntry, Evicted, Keep
from runtime_cache.errors import InvalidRequest, UnknownEntry
from runtime_cache.ids import BlockHash

_DIGEST_CHARS = 64


def entries(
    cache: CacheManager, limit: int | None = None, offset: int = 0
) -> tuple[list[CacheEntry], int]:
    """What nothing continues, and each registration, pin and lease; and how many.

    Last used first. Of one block the keeps come in the order in which they were made;
    registrations of which nothing is kept come last.
    """
    kept = [(_end(cache, keep), keep) for keep in cache.keeps]
    ends = {end for end, _ in kept if end is not None}
    found: list[tuple[PrefixNode, Keep | None]]
    found = [(end, keep) for end, keep in kept if end is not None]
    found += [(node, None) for node in cache.index if not node.children and node not in ends]
    empty = [_empty_entry(keep) for end, keep in kept if end is None]
    total = len(found) + len(empty)
    stop = total if limit is None else offset + limit
    newest = heapq.nlargest(stop, found, key=lambda pair: pair[0].last_used_s)
    holds = Counter(block for keep in cache.keeps for block in keep.blocks)
    listed = [_entry(cache, node, keep, holds[node.block]) for node, keep in newest]
    return (listed + empty)[offset:stop], total


def pin(cache: CacheManager, digest: str, ttl_s: float | None) -> Keep | None:
    """Keep a cached prefix until it is unpinned, or for a time.

    Pinning it again changes how long.

    Args:
        digest: of its last block (hexadecimal), or an unambiguous beginning of that.

    Returns:
        None if there would be more keeps, or they would hold more, than they may; then nothing
        has changed.

    Raises:
        UnknownEntry, InvalidRequest: as `find`; nothing has changed.
    """
    node = find(cache, digest)
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
        ends = ((keep.name, _end(cache, keep)) for keep in pins)
        found = {
            name for name, end in ends if end is not None and end.digest.hex().startswith(digest)
        }
    keep = cache.keeps.pop("pin", _only(digest, sorted(found)))
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
        digest = _only(digest, found)
    node = cache.index.get(BlockHash(bytes.fromhex(digest)))
    if node is None:
        raise UnknownEntry(f"nothing cached has the digest `{digest}`")
    return node


def evict_blocks(cache: CacheManager, max_blocks: int | None) -> Evicted:
    """Evict cached blocks in order (None: all that nobody holds)."""
    num_wanted = cache.num_evictable if max_blocks is None else max_blocks
    num_evicted = min(num_wanted, cache.num_evictable)
    cache.evict_oldest(num_evicted, "operator")
    return Evicted(num_evicted, len(cache.index) - cache.num_evictable)


def evict_entry(cache: CacheManager, digest: str) -> Evicted:
    """Evict a prefix: its block, all that goes on from it, and what only led to it.

    In use are those blocks of the prefix, and of what goes on from it, that are held.

    Raises:
        UnknownEntry, InvalidRequest: as `find`; nothing has changed.
    """
    node = find(cache, digest)
    path = node.path
    branch = list(below(node))
    num_evicted = _evict_all(cache, branch)
    if not node.is_indexed:
        num_evicted += _evict_all(cache, path[-2::-1])
    held = (n for n in (*path[:-1], *branch) if n.is_indexed and n.rank is None)
    return Evicted(num_evicted, sum(1 for _ in held))


def evict_idle(cache: CacheManager, idle_s: float, max_blocks: int | None = None) -> Evicted:
    """Evict what nobody holds and nobody has used for so long (None: all of it)."""
    idle = [n for n in cache.index.parked if cache.now_s - n.last_used_s >= idle_s]
    num_evicted = _evict_all(cache, idle, max_blocks)
    return Evicted(num_evicted, len(cache.index) - cache.num_evictable)


def _evict_all(cache: CacheManager, nodes: list[PrefixNode], max_blocks: int | None = None) -> int:
    """Evict those that nobody holds and nothing continues, in this order; how many."""
    num_evicted = 0
    for node in nodes:
        if num_evicted == max_blocks:
            break
        if node.rank is not None and not node.children:
            cache.evict_node(node, "operator")
            num_evicted += 1
    return num_evicted


def below(node: PrefixNode) -> Iterator[PrefixNode]:
    """A node and all that goes on from it, children first."""
    stack, order = [node], []
    while stack:
        order.append(top := stack.pop())
        stack.extend(top.children or ())
    return reversed(order)


def _end(cache: CacheManager, keep: Keep) -> PrefixNode | None:
    """Where a keep ends: its last block that is still cached; None if there is none.

    That block may have more tokens now than when it was kept; or a failed step took it away.
    """
    nodes = (cache.index.node_of(block) for block in reversed(keep.blocks))
    return next((node for node in nodes if node is not None), None)


def _only(digest: str, found: list[str]) -> str:
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} digests begin with `{digest}`: give more of it")
    if not found:
        raise UnknownEntry(f"nothing cached or pinned has a digest that begins with `{digest}`")
    return found[0]


def _entry(cache: CacheManager, node: PrefixNode, keep: Keep | None, num_kept: int) -> CacheEntry:
    """Args:
    keep: of which `node` is the end, if the entry is that of a keep.
    num_kept: holds of keeps on `node`.
    """
    num_tokens = node.num_tokens if keep is None else min(node.num_tokens, keep.num_tokens)
    return CacheEntry(
        digest=node.digest.hex(),
        num_tokens=num_tokens,
        num_blocks=node.num_blocks,
        num_requests=cache.pool.num_holds(node.block) - num_kept,
        num_hits=node.path[0].num_hits,
        created_s=node.created_s,
        last_used_s=node.last_used_s,
        priority=node.priority,
        keep=keep,
    )


def _empty_entry(keep: Keep) -> CacheEntry:
    return CacheEntry(
        digest="",
        num_tokens=0,
        num_blocks=0,
        num_requests=0,
        num_hits=0,
        created_s=keep.created_s,
        last_used_s=keep.created_s,
        priority=0,
        keep=keep,
    )
