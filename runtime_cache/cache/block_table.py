"""Where one admitted request's KV lies: its blocks, and the slot of each token. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime_cache.cache.policy import DEFAULT_PRIORITY
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheReport
from runtime_cache.ids import BlockId


class BlockCopy(NamedTuple):
    """Rows to copy into a table's first own block, before anything reads them.

    Attributes:
        source: the block they are in; the request has a hold on it until they are copied.
        num_tokens: how many, from the block's first row on.
    """

    source: BlockId
    num_tokens: int


class BlockTable:
    """A request's blocks in token order; the manager changes it, the engine reads it.

        tokens   0 ... committed | ... computed | ... reserved
        blocks   [0, num_committed): indexed, shared, never written again
                 [num_committed, len(blocks)): this request's own, written by its steps

    The request has one hold on every block, one on the source of a copy, and on nothing else.

    Attributes:
        block_size: tokens per block.
        blocks: the blocks.
        num_committed: how many of them, from the front, are in the prefix index.
        num_hit_tokens: tokens whose KV was there when the request was admitted, those of `copy`
            included.
        copy: what is still to be copied; goes into the block that `num_hit_tokens` ends in.
        copied_from: the node that `copy` was or is of; None for no copy.
        tail: the node that holds the tokens behind the last full block, if the last commit asked.
        num_tail_tokens: how many tokens those are, if there is a tail; its node may have more.
        is_caching: whether what it computes may enter the cache.
        priority: of the blocks it commits.
        report: what the cache did for it; None if it was admitted before.
        slots: slot of each token the blocks have room for, then garbage [int32, fixed length].
            Entries of computed tokens stay as they are until the next commit or release, so a
            step in flight may look at them.
    """

    __slots__ = (
        "_offsets",
        "block_size",
        "blocks",
        "copied_from",
        "copy",
        "is_caching",
        "num_committed",
        "num_hit_tokens",
        "num_tail_tokens",
        "priority",
        "report",
        "slots",
        "tail",
    )

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.blocks: list[BlockId] = []
        self.num_committed = 0
        self.num_hit_tokens = 0
        self.copy: BlockCopy | None = None
        self.copied_from: PrefixNode | None = None
        self.tail: PrefixNode | None = None
        self.num_tail_tokens = 0
        self.is_caching = True
        self.priority = DEFAULT_PRIORITY
        self.report: CacheReport | None = None
        # Not touched until used, so a long context costs address space rather than memory.
        self.slots: npt.NDArray[np.int32] = np.empty(max_blocks * block_size, dtype=np.int32)
        self._offsets = np.arange(block_size, dtype=np.int32)

    @property
    def num_reserved(self) -> int:
        """Tokens that the blocks have room for."""
        return len(self.blocks) * self.block_size

    def append(self, block: BlockId) -> None:
        """Add a block at the end."""
        self.blocks.append(block)
        self._write_slots(len(self.blocks) - 1)

    def replace(self, position: int, block: BlockId) -> None:
        """Use another block with the same content at `position`."""
        self.blocks[position] = block
        self._write_slots(position)

    def clear(self) -> list[BlockId]:
        """Give up all blocks and return them, first block first."""
        blocks, self.blocks = self.blocks, []
        self.num_committed = 0
        self.tail = None
        return blocks

    def distrust(self, damaged: Collection[PrefixNode]) -> None:
        """Damaged blocks have left the cache; if it has any, what it computes now stays out."""
        blocks = {node.block for node in damaged}
        # Rows may have come through a sibling that is not cached any more.
        source = self.copied_from
        is_copied = source is not None and any(source.parent is node.parent for node in damaged)
        if not is_copied and blocks.isdisjoint(self.blocks):
            return
        self.is_caching = False
        self.tail = None
        places = (i for i in range(self.num_committed) if self.blocks[i] in blocks)
        self.num_committed = next(places, self.num_committed)

    def _write_slots(self, position: int) -> None:
        size = self.block_size
        first = position * size
        np.add(self._offsets, self.blocks[position] * size, out=self.slots[first : first + size])
