"""Whether cached KV is still what it was: which blocks to read, and what a reading says. Pure.

The KV of a committed token never changes, so a block that is read twice gives the same bytes. One
that does not, or that holds something that is no finite number, is damaged: it leaves the cache
with all that was computed from it. Who holds it goes on with it; nobody finds it any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from runtime_cache.cache import desk
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import TOKEN_BYTES
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode, Seal
from runtime_cache.ids import BlockId


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What one block was found to hold.

    Attributes:
        num_tokens: how many of its tokens were read, from the first on.
        begun_s: when, on the clock of the engine's events.
        checksum: of their KV.
        is_finite: whether every value in it is a finite number.
    """

    node: PrefixNode
    num_tokens: int
    begun_s: float
    checksum: bytes
    is_finite: bool


class Verdict(NamedTuple):
    """What a reading says of its block.

    Attributes:
        finding: `gone`: nothing, the block has left the cache meanwhile or holds more tokens now.
            `new`: it was read for the first time. `same`, `changed`: as it was then, or not.
            `not_finite`: some of it is no finite number.
        num_dropped: blocks that left the cache because of it.
        num_in_use: those of them that requests or keeps still hold.
    """

    finding: Literal["gone", "new", "same", "changed", "not_finite"]
    num_dropped: int = 0
    num_in_use: int = 0


def blocks_to_read(
    cache: CacheManager, digest: str | None, first_block: int
) -> Iterator[PrefixNode]:
    """The cached blocks in the order of their numbers.

    Args:
        digest: only those of this prefix.
        first_block: leave out those with smaller numbers.

    Raises:
        UnknownEntry, InvalidRequest: as `desk.find`.
    """
    if digest is not None:
        path = desk.find(cache, digest).path
        yield from sorted((n for n in path if n.block >= first_block), key=lambda n: n.block)
        return
    blocks = cache.pool.blocks
    for block in range(max(first_block, blocks.start), blocks.stop):
        node = cache.index.node_of(BlockId(block))
        if node is not None:
            yield node


def judge(cache: CacheManager, reading: Reading, tables: Sequence[BlockTable]) -> Verdict:
    """Remember the checksum of a block, or compare it; drop the block if it is damaged.

    Args:
        tables: of all live requests. What those go on to compute that have a damaged block stays
            out of the cache.
    """
    node = reading.node
    if not node.is_indexed or node.num_rows != reading.num_tokens:
        return Verdict("gone")
    if not reading.is_finite:
        return Verdict("not_finite", *drop(cache, node, tables))
    if node.seal is None:
        node.seal = Seal(reading.checksum, reading.begun_s)
        return Verdict("new")
    if node.seal.checksum != reading.checksum:
        return Verdict("changed", *drop(cache, node, tables))
    node.seal = Seal(reading.checksum, reading.begun_s)
    return Verdict("same")


def drop(cache: CacheManager, node: PrefixNode, tables: Iterable[BlockTable]) -> tuple[int, int]:
    """Drop a block and what may have come of it; how many, and how many of them are held."""
    suspects = [s for root in (*_copies(cache, node), node) for s in desk.below(root)]
    num_held = sum(suspect.rank is None for suspect in suspects)
    for suspect in suspects:
        cache.strike_off(suspect)
    for table in tables:
        table.distrust(suspects)
    return len(suspects), num_held


def _copies(cache: CacheManager, node: PrefixNode) -> list[PrefixNode]:
    """The siblings into which rows of it may have been copied since it was last found right."""
    since_s = -math.inf if node.seal is None else node.seal.seen_s
    first = node.tokens[:TOKEN_BYTES]
    return [
        sibling
        for sibling in cache.index.children_of(node.parent)
        if sibling is not node and sibling.created_s >= since_s and sibling.tokens.startswith(first)
    ]
