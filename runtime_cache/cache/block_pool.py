"""Which blocks of the KV pool are free, and how many holds are on the others. Pure.

A block with holds is live. A block without holds is either free (in the free list, content
worthless) or parked by the prefix index (content cached). The pool knows nothing of the index:
whoever drops the last hold says what becomes of the block. Block 0 is the null block, which
padding points at; it is never in a pool.
"""

from __future__ import annotations

from collections import deque

from runtime_cache.errors import InternalError
from runtime_cache.ids import NULL_BLOCK, BlockId


class BlockPool:
    """Free list and hold counts of a range of the KV pool's blocks.

    The free list is first in, first out and starts in ascending order.

    Attributes:
        blocks: the blocks; never the null block.
    """

    def __init__(self, blocks: range) -> None:
        if not blocks or blocks.step != 1 or blocks.start <= NULL_BLOCK:
            raise InternalError(f"{blocks} is no range of blocks behind the null block")
        self.blocks = blocks
        self._holds = [0] * blocks.stop
        self._free = deque(map(BlockId, blocks))
        self._num_live = 0

    @property
    def num_usable(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out at once."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Blocks with at least one hold."""
        return self._num_live

    @property
    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free list, next to be handed out first."""
        return tuple(self._free)

    def num_holds(self, block: BlockId) -> int:
        """Holds on `block`."""
        return self._holds[block]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks from the front of the free list, with one hold each.

        Raises:
            InternalError: fewer are free; nothing was taken. Callers look at `num_free` first.
        """
        if num_blocks > len(self._free):
            raise InternalError(f"{num_blocks} blocks asked, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._holds[block] = 1
        self._num_live += num_blocks
        return blocks

    def hold(self, block: BlockId) -> None:
        """Add a hold to a block that is live or parked; never to a free one."""
        if block not in self.blocks:
            raise InternalError(f"block {block} is not of this pool")
        if self._holds[block] == 0:
            self._num_live += 1
        self._holds[block] += 1

    def release(self, block: BlockId) -> int:
        """Drop one hold.

        Returns:
            The holds that are left. At 0 the caller must `free` the block or park it in the index.

        Raises:
            InternalError: the block has no hold; nothing has changed.
        """
        if self._holds[block] == 0:
            raise InternalError(f"block {block} is released without a hold")
        self._holds[block] -= 1
        if self._holds[block] == 0:
            self._num_live -= 1
        return self._holds[block]

    def free(self, block: BlockId) -> None:
        """Put a block without holds at the end of the free list.

        Raises:
            InternalError: the block is held, or not of this pool; nothing has changed.
        """
        if block not in self.blocks or self._holds[block] != 0:
            raise InternalError(f"block {block} is held or not of this pool and cannot be freed")
        self._free.append(block)
