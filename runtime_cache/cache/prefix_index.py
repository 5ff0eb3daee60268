"""Which prefixes are in the pool: digest to block, and the order of eviction. Pure.

Every indexed block is a node; its parent, the block before it in the prefix, is indexed too. Nodes
without holds are *parked* in one queue, least recently released first, and evicted from its front.

Why the front is always a leaf, so that eviction is O(1) and needs no search: whoever holds a node
holds all its ancestors, and gives holds back tail first. So the last hold on a node goes before the
last hold on its parent, and a child always stands before its parent in the queue. `invariants`
checks this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from runtime_cache.cache.hashing import BlockKey
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockHash, BlockId


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One committed full block.

    Attributes:
        key: digest and packed tokens.
        block: where its KV is.
        parent: the block before it; None for the first block of a prefix.
        num_blocks: length of the prefix that ends here [blocks].
        num_children: indexed blocks that directly follow this one.
        num_hits: how often a request was admitted with this block.
        created_s: when it was inserted, on the clock of the engine's events.
        last_used_s: when it was last hit, or inserted.
    """

    key: BlockKey
    block: BlockId
    parent: PrefixNode | None
    num_blocks: int
    created_s: float
    last_used_s: float
    num_children: int = 0
    num_hits: int = 0

    @property
    def first(self) -> PrefixNode:
        """The first block of the prefix that ends here."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def is_same(self, key: BlockKey, parent: PrefixNode | None) -> bool:
        """Whether this node really holds `key` after `parent`.

        With equal digests only a SHA-256 collision makes this false. By comparing the tokens at
        every block on the way, a match never rests on a digest alone.
        """
        return self.parent is parent and self.key.tokens == key.tokens


class PrefixIndex:
    """The nodes by digest and by block, and the queue of the parked ones."""

    def __init__(self) -> None:
        self._by_digest: dict[BlockHash, PrefixNode] = {}
        self._by_block: dict[BlockId, PrefixNode] = {}
        self._parked: OrderedDict[BlockId, PrefixNode] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._by_digest.values())

    @property
    def num_parked(self) -> int:
        """Nodes without holds: what eviction can take."""
        return len(self._parked)

    @property
    def parked(self) -> tuple[PrefixNode, ...]:
        """The parked nodes, next to be evicted first."""
        return tuple(self._parked.values())

    def get(self, digest: BlockHash) -> PrefixNode | None:
        """The node with this digest."""
        return self._by_digest.get(digest)

    def node_of(self, block: BlockId) -> PrefixNode | None:
        """The node whose KV is in `block`."""
        return self._by_block.get(block)

    def is_parked(self, block: BlockId) -> bool:
        """Whether `block` is indexed and has no hold."""
        return block in self._parked

    def longest_match(self, keys: list[BlockKey], max_blocks: int) -> list[PrefixNode]:
        """The nodes of the longest indexed prefix of `keys`, first block first. Changes nothing."""
        nodes: list[PrefixNode] = []
        parent: PrefixNode | None = None
        for key in keys[:max_blocks]:
            node = self._by_digest.get(key.digest)
            if node is None or not node.is_same(key, parent):
                break
            nodes.append(node)
            parent = node
        return nodes

    def insert(
        self, key: BlockKey, block: BlockId, parent: PrefixNode | None, now_s: float
    ) -> PrefixNode:
        """Index a held block behind `parent`.

        Raises:
            InternalError: digest or block is indexed already, or the parent is not; nothing has
                changed.
        """
        if key.digest in self._by_digest or block in self._by_block:
            raise InternalError(f"block {block} or its digest is indexed already")
        if parent is not None and self._by_block.get(parent.block) is not parent:
            raise InternalError(f"the parent of block {block} is not indexed")
        num_blocks = 1 if parent is None else parent.num_blocks + 1
        node = PrefixNode(key, block, parent, num_blocks, created_s=now_s, last_used_s=now_s)
        self._by_digest[key.digest] = node
        self._by_block[block] = node
        if parent is not None:
            parent.num_children += 1
        return node

    def park(self, node: PrefixNode) -> None:
        """The last hold on `node` is gone: it is now the most recently used of the evictable."""
        self._parked[node.block] = node

    def unpark(self, node: PrefixNode) -> None:
        """`node` is held (again) and cannot be evicted."""
        self._parked.pop(node.block, None)

    def evict_oldest(self) -> PrefixNode:
        """Take the least recently used parked node out of the index.

        Raises:
            InternalError: nothing is parked, or the front of the queue has children.
        """
        if not self._parked:
            raise InternalError("nothing to evict")
        node = next(iter(self._parked.values()))
        self.evict(node)
        return node

    def evict(self, node: PrefixNode) -> None:
        """Take a parked node out of the index.

        Raises:
            InternalError: it is held, or has children; nothing has changed.
        """
        if node.block not in self._parked:
            raise InternalError(f"block {node.block} is held and cannot be evicted")
        if node.num_children:
            raise InternalError(f"block {node.block} would be evicted before its children")
        del self._parked[node.block]
        del self._by_digest[node.key.digest]
        del self._by_block[node.block]
        if node.parent is not None:
            node.parent.num_children -= 1
