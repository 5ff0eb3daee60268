"""The prefix cache: match, reserve, commit, release. Pure.

A request's road: `admit` finds the longest cached prefix, holds it and reserves blocks for the
rest; a step writes KV into them; `commit` indexes the blocks that are now full; `reserve` adds
blocks as the answer grows; `release` gives everything back, and what was committed stays cached
until it is evicted.

Nothing is visible to other requests before the step that wrote it is done, so a step that fails
leaves no trace but free blocks. Only whole blocks are reused.

Eviction is least recently used first, and ahead of need: after every change the cache shrinks until
`low_watermark_blocks` are free or nothing is left to evict. Live requests may use those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from runtime_cache.cache.block_pool import BlockPool
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import BlockKey, HashChain
from runtime_cache.cache.prefix_index import PrefixIndex, PrefixNode
from runtime_cache.cache.results import CacheCounters, CacheEntry, Evicted, Match, Registration
from runtime_cache.errors import ConfigError, InternalError
from runtime_cache.ids import BlockHash, BlockId, PrefixId


class CacheManager:
    """Pool, index and registrations, kept consistent.

    The three gauges `num_live`, `num_evictable` and `num_free` always add up to `num_usable`.

    Attributes:
        block_size: tokens per block.
        root: where the hash chains of new requests start.
        counters: see `CacheCounters`.
        now_s: the time of the event in work; set by the engine, for the ages of entries alone.
        max_registered_blocks: how many blocks registrations may hold together, and how many of
            them there may be: those shorter than a block hold none.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        root: BlockHash,
        low_watermark_blocks: int = 0,
        max_registered_blocks: int | None = None,
        is_enabled: bool = True,
    ) -> None:
        """Make an empty cache.

        Args:
            num_blocks: blocks of the KV pool, the null block included.
            low_watermark_blocks: how many blocks to keep free while something can be evicted.
            max_registered_blocks: how many blocks registrations may hold together; None for half
                of the pool, so that requests always find room.
            is_enabled: if False nothing is ever indexed, so every prompt is computed whole.

        Raises:
            ConfigError: a size is out of range.
        """
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(f"a pool of {num_blocks} blocks of {block_size} tokens is too small")
        if not 0 <= low_watermark_blocks < num_blocks:
            raise ConfigError(
                f"a low watermark of {low_watermark_blocks} blocks does not fit {num_blocks} blocks"
            )
        self.block_size = block_size
        self.root = root
        self.counters = CacheCounters()
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.max_registered_blocks = (
            self.pool.num_usable // 2 if max_registered_blocks is None else max_registered_blocks
        )
        self._low_watermark_blocks = low_watermark_blocks
        self._is_enabled = is_enabled
        self._registrations: dict[PrefixId, Registration] = {}

    # -- gauges -------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.pool.num_usable

    @property
    def num_live(self) -> int:
        """Blocks held by requests and registrations."""
        return self.pool.num_live

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody holds."""
        return self.index.num_parked

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return self.pool.num_free

    @property
    def num_available(self) -> int:
        """Blocks a live request can get: the free ones, then the evictable."""
        return self.pool.num_free + self.index.num_parked

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    # -- the road of a request ----------------------------------------------------------------

    def new_chain(self) -> HashChain:
        """An empty hash chain for a new request."""
        return HashChain(self.root, self.block_size)

    def match(self, chain: HashChain, max_tokens: int) -> Match:
        """Find the longest cached prefix, in whole blocks. Changes nothing.

        Args:
            chain: extended over the prompt.
            max_tokens: the longest useful match; one less than the prompt for a request that
                needs logits, so that at least its last token is computed.
        """
        nodes = self.index.longest_match(chain.keys, max_tokens // self.block_size)
        return Match(len(nodes) * self.block_size, tuple(node.block for node in nodes))

    def admit(
        self,
        chain: HashChain,
        *,
        num_tokens: int,
        max_tokens: int,
        max_hit_tokens: int,
        is_retry: bool = False,
    ) -> BlockTable | None:
        """Hold the longest cached prefix and reserve blocks for the rest of the tokens.

        Args:
            chain: extended over the tokens.
            num_tokens: tokens to have room for now.
            max_tokens: tokens the request can ever have KV for.
            max_hit_tokens: as `max_tokens` of `match`.
            is_retry: the request was admitted before, and is in the counters.

        Returns:
            The request's table, or None if there are too few blocks; then nothing has changed.
        """
        match = self.match(chain, max_hit_tokens)
        num_new = self.num_blocks_for(num_tokens) - len(match.blocks)
        num_unparked = sum(map(self.index.is_parked, match.blocks))
        if num_new > self.num_available - num_unparked:
            return None
        table = BlockTable(self.block_size, self.num_blocks_for(max(num_tokens, max_tokens)))
        for block in match.blocks:
            self._reuse(table, block)
        table.num_committed = len(match.blocks)
        table.num_hit_tokens = match.num_tokens
        if not is_retry:
            self.counters.queried_tokens += num_tokens
            self.counters.hit_tokens += match.num_tokens
        self._append_new(table, num_new)
        return table

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all.

        Returns:
            False if there are too few blocks; then nothing has changed.

        Raises:
            InternalError: more than the `max_tokens` the request was admitted with.
        """
        num_new = self.num_blocks_for(num_tokens) - len(table.blocks)
        if num_new <= 0:
            return True
        if num_tokens > len(table.slots):
            raise InternalError(f"{num_tokens} tokens asked of a table for {len(table.slots)}")
        if num_new > self.num_available:
            return False
        self._append_new(table, num_new)
        return True

    def commit(self, table: BlockTable, chain: HashChain, num_tokens: int) -> None:
        """Index the full blocks among the first `num_tokens` tokens, whose KV is in the pool.

        A block that was computed by another request meanwhile is given up for the other's: so the
        parent of an indexed block is always indexed, and always held by who holds the block. Call
        this only while no step is in flight, because it changes the table's slots.

        Args:
            chain: extended over at least those tokens.
        """
        num_full = num_tokens // self.block_size
        if num_full == table.num_committed or not self._is_enabled:
            return
        for position in range(table.num_committed, num_full):
            if not self._commit_block(table, position, chain.keys[position]):
                break
            table.num_committed += 1
        self._evict_to_watermark()

    def release(self, table: BlockTable) -> None:
        """Give back all holds. What is committed stays cached; the other blocks are free."""
        self._release_blocks(table.clear())

    def drop(self, table: BlockTable, *, is_all_suspect: bool = False) -> None:
        """Release a request whose step has failed: what that step wrote is suspect.

        A step only writes into blocks that are not committed, and those never enter the index
        now. Nothing of the step may still be writing.

        Args:
            is_all_suspect: its committed blocks are not to be reused either. Those that others
                hold, or that others' blocks continue, stay.
        """
        blocks = tuple(table.blocks)
        self.counters.dropped_blocks += len(blocks) - table.num_committed
        self.release(table)
        if is_all_suspect:
            self._forget(blocks)

    # -- registered prefixes ------------------------------------------------------------------

    @property
    def num_registered_blocks(self) -> int:
        """Blocks that registrations hold; a shared one counts once."""
        return len(self._registered_blocks())

    def register(self, prefix_id: PrefixId, table: BlockTable) -> Registration | None:
        """Hold the committed blocks of `table` until `unregister`.

        Registering an id again replaces what it held, so repeating a registration changes nothing.

        Returns:
            None if there would be more of them, or they would hold more, than they may; then
            nothing has changed.
        """
        limit = self.max_registered_blocks
        if prefix_id not in self._registrations and len(self._registrations) >= limit:
            return None
        blocks = tuple(table.blocks[: table.num_committed])
        if len(self._registered_blocks(besides=prefix_id) | set(blocks)) > limit:
            return None
        for block in blocks:
            self.pool.hold(block)
        self.unregister(prefix_id)
        registration = Registration(prefix_id, len(blocks) * self.block_size, blocks, self.now_s)
        self._registrations[prefix_id] = registration
        return registration

    def unregister(self, prefix_id: PrefixId) -> bool:
        """Give up a registration; its blocks become evictable unless someone else holds them.

        Returns:
            Whether there was one.
        """
        registration = self._registrations.pop(prefix_id, None)
        if registration is None:
            return False
        self._release_blocks(registration.blocks)
        return True

    def registrations(self) -> list[Registration]:
        """All registrations, in the order they were made."""
        return list(self._registrations.values())

    def _registered_blocks(self, besides: PrefixId | None = None) -> set[BlockId]:
        others = (r.blocks for r in self._registrations.values() if r.prefix_id != besides)
        return set().union(*others)

    # -- for operators ------------------------------------------------------------------------

    def evict(self, max_blocks: int | None = None) -> Evicted:
        """Evict cached blocks, least recently used first.

        Args:
            max_blocks: how many at the most; None for all that nobody holds.
        """
        num_wanted = self.num_evictable if max_blocks is None else max_blocks
        num_evicted = min(num_wanted, self.num_evictable)
        self._evict(num_evicted)
        return Evicted(num_evicted, len(self.index) - self.num_evictable)

    def entries(self) -> list[CacheEntry]:
        """The cached prefixes that nothing continues or that are registered; last used first.

        Registered ones that are shorter than a block, of which nothing is kept, come last.
        """
        ids_by_block: dict[BlockId, list[PrefixId]] = {}
        num_registered: Counter[BlockId] = Counter()
        for registration in self._registrations.values():
            num_registered.update(registration.blocks)
            if registration.blocks:
                ids_by_block.setdefault(registration.blocks[-1], []).append(registration.prefix_id)
        nodes = [n for n in self.index if n.num_children == 0 or n.block in ids_by_block]
        nodes.sort(key=lambda node: node.last_used_s, reverse=True)
        entries = [
            self._entry(n, num_registered[n.block], tuple(ids_by_block.get(n.block, ())))
            for n in nodes
        ]
        return entries + [_empty_entry(r) for r in self._registrations.values() if not r.blocks]

    def _entry(
        self, node: PrefixNode, num_registered: int, prefix_ids: tuple[PrefixId, ...]
    ) -> CacheEntry:
        return CacheEntry(
            digest=node.key.digest.hex(),
            num_tokens=node.num_blocks * self.block_size,
            num_blocks=node.num_blocks,
            num_requests=self.pool.num_holds(node.block) - num_registered,
            num_hits=node.first.num_hits,
            created_s=node.created_s,
            last_used_s=node.last_used_s,
            prefix_ids=prefix_ids,
        )

    # -- inside -------------------------------------------------------------------------------

    def _reuse(self, table: BlockTable, block: BlockId) -> None:
        node = self._node_of(block)
        self._hold(node)
        node.num_hits += 1
        node.last_used_s = self.now_s
        table.append(block)

    def _append_new(self, table: BlockTable, num_new: int) -> None:
        self._evict(max(0, num_new - self.pool.num_free))
        for block in self.pool.allocate(num_new):
            table.append(block)
        self._evict_to_watermark()

    def _commit_block(self, table: BlockTable, position: int, key: BlockKey) -> bool:
        """Index one block, or move the request onto its twin. False on a digest collision."""
        parent = self._node_of(table.blocks[position - 1]) if position else None
        block = table.blocks[position]
        twin = self.index.get(key.digest)
        if twin is None:
            self.index.insert(key, block, parent, self.now_s)
            self.counters.inserted_blocks += 1
            return True
        if not twin.is_same(key, parent):
            self.counters.collisions += 1
            return False
        self._hold(twin)
        table.replace(position, twin.block)
        self._release_blocks((block,))
        self.counters.duplicate_blocks += 1
        return True

    def _node_of(self, block: BlockId) -> PrefixNode:
        node = self.index.node_of(block)
        if node is None:
            raise InternalError(f"block {block} is committed but not indexed")
        return node

    def _hold(self, node: PrefixNode) -> None:
        self.index.unpark(node)
        self.pool.hold(node.block)

    def _release_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Drop one hold on each of a chain's blocks, tail first (see `prefix_index` for why)."""
        for block in reversed(tuple(blocks)):
            if self.pool.release(block):
                continue
            node = self.index.node_of(block)
            if node is None:
                self.pool.free(block)
            else:
                self.index.park(node)
        self._evict_to_watermark()

    def _forget(self, blocks: tuple[BlockId, ...]) -> None:
        """Take a released chain out of the cache, tail first, as far as it is nobody else's."""
        for block in reversed(blocks):
            node = self.index.node_of(block)
            if node is None:
                continue  # it was never committed, or has been evicted just now
            if node.num_children or not self.index.is_parked(block):
                return
            self.index.evict(node)
            self.pool.free(block)
            self.counters.evicted_blocks += 1

    def _evict_to_watermark(self) -> None:
        self._evict(min(self._low_watermark_blocks - self.pool.num_free, self.index.num_parked))

    def _evict(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            self.pool.free(self.index.evict_oldest().block)
            self.counters.evicted_blocks += 1


def _empty_entry(registration: Registration) -> CacheEntry:
    return CacheEntry(
        digest="",
        num_tokens=0,
        num_blocks=0,
        num_requests=0,
        num_hits=0,
        created_s=registration.created_s,
        last_used_s=registration.created_s,
        prefix_ids=(registration.prefix_id,),
    )
