"""In which order cached blocks go. Pure.

Blocks that nobody holds are *parked*. They go by priority, lowest first; within one priority by the
policy:

- `lru`: least recently used first.
- `slru` (segmented): blocks that were never reused go before those that were, each least recently
  used first. So a stream of one-off prompts, however long, pushes out only itself. The reused ones
  take at most four fifths of the cache; beyond that the oldest of them count as never reused again.

Why the front is always a leaf, so that eviction needs no search: whoever holds a block holds all
blocks before it in the prefix, and gives holds back tail first; so of two blocks in one queue the
child stands before its parent. And a parent is in no lower queue than its child, since everything
that lifts a block (a hit, a priority) lifts those before it. `invariants` checks both.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from runtime_cache.cache.policy import EvictionPolicy
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockId

if TYPE_CHECKING:
    from runtime_cache.cache.prefix_index import PrefixNode

#: Priority, then whether the block was reused (always False under `lru`); lowest goes first.
Rank = tuple[int, bool]
Queue = OrderedDict[BlockId, "PrefixNode"]

_MAX_PROTECTED_PART = (4, 5)


class EvictionQueue:
    """The parked nodes, next to go first. Every operation is O(1) in their number."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        """Args:
        num_blocks: blocks of the cache.
        """
        self._is_segmented = policy == "slru"
        numerator, denominator = _MAX_PROTECTED_PART
        self._max_protected = num_blocks * numerator // denominator
        self._num_protected = 0
        self._num_parked = 0
        self._queues: dict[Rank, Queue] = {}
        self._ranks: list[Rank] = []

    def __len__(self) -> int:
        return self._num_parked

    def __iter__(self) -> Iterator[PrefixNode]:
        return chain.from_iterable(self._queues[rank].values() for rank in self._ranks)

    def park(self, node: PrefixNode) -> None:
        """The last hold on `node` is gone: it is now the most recently used of its queue."""
        is_protected = self._is_segmented and node.num_hits > 0
        self._append(node, (node.priority, is_protected))
        self._num_parked += 1
        if is_protected:
            self._num_protected += 1
            if self._num_protected > self._max_protected:
                self._demote()

    def unpark(self, node: PrefixNode) -> None:
        """`node` is held again, or leaves the cache; nothing happens if it is not parked."""
        rank = node.rank
        if rank is None:
            return
        del self._queues[rank][node.block]
        node.rank = None
        self._num_parked -= 1
        self._num_protected -= rank[1]

    def oldest(self) -> PrefixNode:
        """The node that goes next.

        Raises:
            InternalError: nothing is parked.
        """
        for rank in self._ranks:
            if queue := self._queues[rank]:
                return next(iter(queue.values()))
        raise InternalError("nothing to evict")

    def _append(self, node: PrefixNode, rank: Rank) -> None:
        if rank not in self._queues:
            self._queues[rank] = OrderedDict()
            insort(self._ranks, rank)
        self._queues[rank][node.block] = node
        node.rank = rank

    def _demote(self) -> None:
        """The oldest protected node counts as never reused again."""
        rank = next(rank for rank in self._ranks if rank[1] and self._queues[rank])
        _, node = self._queues[rank].popitem(last=False)
        self._num_protected -= 1
        self._append(node, (rank[0], False))
