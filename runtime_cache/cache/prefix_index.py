"""Which prefixes are in the pool: a tree of blocks, found by digest. Pure.

Every indexed block is a node; its parent, the block before it in the prefix, is indexed too. A node
is full, or it is the partly filled last block of a prefix; then it has no children, and its owner
may still write behind the tokens it is known by. No node is only the beginning of a sibling, unless
someone holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from runtime_cache.cache.children import Children
from runtime_cache.cache.eviction import EvictionQueue, Rank
from runtime_cache.cache.hashing import TOKEN_BYTES, HashChain
from runtime_cache.cache.policy import DEFAULT_PRIORITY, EvictionPolicy
from runtime_cache.errors import InternalError
from runtime_cache.ids import BlockHash, BlockId


class Seal(NamedTuple):
    """What was seen of a block's KV, to see later that it is still the same.

    Attributes:
        checksum: when it was read for the first time.
        seen_s: when it was last read, and was still so.
    """

    checksum: bytes
    seen_s: float


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One committed block.

    Attributes:
        digest: chain digest [32 bytes].
        tokens: its token ids, packed [4 bytes each]; compared on every hit.
        block: where its KV is.
        parent: the block before it; None for the first block of a prefix.
        num_tokens: length of the prefix that ends here.
        num_blocks: the same in blocks.
        created_s: when it was inserted, on the clock of the engine's events.
        last_used_s: when it was last hit, or inserted.
        priority: the highest of the requests that used it; the lowest goes first.
        num_hits: how often a request was admitted with this block, or with half of its rows.
        children: the blocks that directly follow; None for none.
        earlier: digests of beginnings of its tokens that it was known by or took the place of.
        seal: None until its KV, as far as it goes now, has been read (see `verification`).
        rank: the queue it is parked in; None while someone holds it.
        is_indexed: False once it has left the index.
    """

    digest: BlockHash
    tokens: bytes
    block: BlockId
    parent: PrefixNode | None
    num_tokens: int
    num_blocks: int
    created_s: float
    last_used_s: float
    priority: int = DEFAULT_PRIORITY
    num_hits: int = 0
    children: Children | None = None
    earlier: tuple[BlockHash, ...] = ()
    seal: Seal | None = None
    rank: Rank | None = None
    is_indexed: bool = True

    @property
    def num_rows(self) -> int:
        """Tokens in this block."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_children(self) -> int:
        """Indexed blocks that directly follow this one."""
        return 0 if self.children is None else len(self.children)

    @property
    def path(self) -> list[PrefixNode]:
        """The nodes of the prefix that ends here, first block first."""
        nodes, node = [], self
        while node is not None:
            nodes.append(node)
            node = node.parent  # type: ignore[assignment]
        return nodes[::-1]

    def stand_for(self, digest: BlockHash) -> None:
        """A beginning of its tokens is cached because it is; a miss can say that it was there."""
        if digest != self.digest and digest not in self.earlier:
            self.earlier += (digest,)

    def take_over(self, shorter: PrefixNode) -> None:
        """Take the place of a block that held only a beginning: it stays as much worth keeping."""
        self.priority = max(self.priority, shorter.priority)
        self.num_hits = max(self.num_hits, shorter.num_hits)
        self.last_used_s = max(self.last_used_s, shorter.last_used_s)
        for digest in (*shorter.earlier, shorter.digest):
            self.stand_for(digest)

    @property
    def longest_tokens(self) -> int:
        """Length of a cached prefix that goes through this node to its end [tokens]."""
        node = self
        while node.children:
            node = next(iter(node.children))
        return node.num_tokens


class PrefixIndex:
    """The nodes by digest, by block and by parent, and the queue of the parked ones.

    Attributes:
        parked: nodes without holds, next to be evicted first.
        num_leaves: nodes without children: prefixes that no other continues.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self.parked = EvictionQueue(policy, num_blocks)
        self.num_leaves = 0
        self._by_digest: dict[BlockHash, PrefixNode] = {}
        self._by_block: dict[BlockId, PrefixNode] = {}
        self._first = Children()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._by_digest.values())

    def get(self, digest: BlockHash) -> PrefixNode | None:
        """The node with this digest."""
        return self._by_digest.get(digest)

    def node_of(self, block: BlockId) -> PrefixNode | None:
        """The node whose KV is in `block`."""
        return self._by_block.get(block)

    def is_parked(self, block: BlockId) -> bool:
        """Whether `block` is indexed and has no hold."""
        node = self._by_block.get(block)
        return node is not None and node.rank is not None

    def children_of(self, parent: PrefixNode | None) -> Children:
        """What directly follows `parent`; the first blocks of all prefixes for None."""
        if parent is None:
            return self._first
        return _NO_CHILDREN if parent.children is None else parent.children

    def extend_match(self, nodes: list[PrefixNode], chain: HashChain, max_blocks: int) -> None:
        """Lengthen `nodes`, a match of the chain's first blocks, as far as the index goes.

        With equal digests only a SHA-256 collision makes the comparison of parent and tokens
        false. By making it at every block, a match never rests on a digest alone.
        """
        by_digest, packed = self._by_digest, chain.packed
        num_found = len(nodes)
        if num_found >= max_blocks or num_found >= len(chain.digests):
            return
        if nodes and chain.digests[num_found] not in by_digest:
            return  # nothing new since the last look; the digests are not copied for that
        width = chain.block_size * TOKEN_BYTES
        parent = nodes[-1] if nodes else None
        start = num_found * width
        for digest in chain.digests[num_found:max_blocks]:
            node = by_digest.get(digest)
            if node is None or node.parent is not parent:
                return
            if not packed.startswith(node.tokens, start) or len(node.tokens) != width:
                return
            nodes.append(node)
            parent = node
            start += width

    def insert(
        self,
        digest: BlockHash,
        tokens: bytes,
        block: BlockId,
        parent: PrefixNode | None,
        now_s: float,
    ) -> PrefixNode:
        """Index a held block behind `parent`, which is full.

        Raises:
            InternalError: digest or block is indexed already, or the parent is not; nothing has
                changed.
        """
        if digest in self._by_digest or block in self._by_block:
            raise InternalError(f"block {block} or its digest is indexed already")
        if parent is not None and not parent.is_indexed:
            raise InternalError(f"the parent of block {block} is not indexed")
        num_tokens, num_blocks = len(tokens) // TOKEN_BYTES, 1
        if parent is not None:
            num_tokens += parent.num_tokens
            num_blocks += parent.num_blocks
        node = PrefixNode(digest, tokens, block, parent, num_tokens, num_blocks, now_s, now_s)
        self._by_digest[digest] = self._by_block[block] = node
        self._attach(node)
        return node

    def grow(self, node: PrefixNode, digest: BlockHash, tokens: bytes) -> None:
        """A partly filled block has more tokens now, and is known by all of them.

        Raises:
            InternalError: the digest is indexed already, or the tokens do not go on from the
                node's; nothing has changed.
        """
        if digest in self._by_digest or not tokens.startswith(node.tokens):
            raise InternalError(f"block {node.block} cannot grow")
        siblings = self.children_of(node.parent)
        siblings.remove(node)
        del self._by_digest[node.digest]
        node.earlier += (node.digest,)
        node.num_tokens += (len(tokens) - len(node.tokens)) // TOKEN_BYTES
        node.digest, node.tokens, node.seal = digest, tokens, None
        self._by_digest[digest] = node
        siblings.add(node)

    def remove(self, node: PrefixNode) -> None:
        """Take a node without children out of the index, held or not.

        Raises:
            InternalError: it has children; nothing has changed.
        """
        if node.children:
            raise InternalError(f"block {node.block} would leave the index before its children")
        self.parked.unpark(node)
        del self._by_digest[node.digest]
        del self._by_block[node.block]
        node.is_indexed = False
        self._detach(node)

    def _attach(self, node: PrefixNode) -> None:
        parent = node.parent
        if parent is None:
            self._first.add(node)
            self.num_leaves += 1
            return
        if parent.children is None:
            parent.children = Children()
        else:
            self.num_leaves += 1
        parent.children.add(node)

    def _detach(self, node: PrefixNode) -> None:
        parent = node.parent
        if parent is None or parent.children is None:
            self._first.remove(node)
            self.num_leaves -= 1
            return
        parent.children.remove(node)
        if parent.children:
            self.num_leaves -= 1
        else:
            parent.children = None


#: What follows a node that nothing follows; never added to.
_NO_CHILDREN = Children()
