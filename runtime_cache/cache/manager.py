"""The prefix cache: match, reserve, commit, release. Pure.

A request's road: `admit` finds the longest cached prefix, holds it and reserves blocks for the
rest; a step writes KV into them; `commit` indexes what is now computed; `reserve` adds blocks as
the answer grows; `release` gives everything back, and what was committed stays cached until it is
evicted. (In the words of the Runtime article: `lookup` is `match`, `insert` is `commit`.)

- Whole blocks are shared in place. Inside the block after them the longest common run of committed
  tokens is reused by copying its rows into the request's first own block.
- Nothing is visible to other requests before the step that wrote it is done, so a step that fails
  leaves no trace but free blocks.
- Eviction is ahead of need: after every change, when fewer than `low_watermark_blocks` are free,
  the cache shrinks until `high_watermark_blocks` are or nothing is left to evict. Live requests may
  use those. What a request, a registration, a pin or a lease holds is never evicted.

What an operator does with the cache (pins, lists, evictions) is in `desk`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from runtime_cache.cache.ages import BlockAges
from runtime_cache.cache.block_pool import BlockPool
from runtime_cache.cache.block_table import BlockCopy, BlockTable
from runtime_cache.cache.hashing import HashChain, next_digest
from runtime_cache.cache.keeps import Keeps
from runtime_cache.cache.policy import DEFAULT_PRIORITY, CachePolicy
from runtime_cache.cache.prefix_index import PrefixIndex, PrefixNode
from runtime_cache.cache.reports import EvictedDigests, report
from runtime_cache.cache.results import CacheCounters, CacheReport, Keep, Match, MatchHint
from runtime_cache.errors import ConfigError, InternalError
from runtime_cache.ids import BlockHash, BlockId, PrefixId

_NO_MATCH = Match()
_FAILED = CacheReport(0, "disabled", detail="looking it up failed: a bug of the daemon")


class CacheManager:
    """Pool, index and keeps, kept consistent.

    The three gauges `num_live`, `num_evictable` and `num_free` always add up to `num_usable`.

    Attributes:
        block_size: tokens per block.
        root: where the hash chains of new requests start.
        policy: see `CachePolicy`.
        counters: see `CacheCounters`.
        ages: see `BlockAges`.
        now_s: the time of the event in work; set by the engine.
        pool, index, keeps: for reading.
    """

    def __init__(
        self,
        *,
        blocks: range,
        block_size: int,
        root: BlockHash,
        policy: CachePolicy = CachePolicy(),  # noqa: B008 (frozen)
    ) -> None:
        """Make an empty cache.

        Args:
            blocks: its blocks of the KV pool; never the null block.

        Raises:
            ConfigError: a size is out of range.
        """
        if len(blocks) < 1 or block_size < 1:
            raise ConfigError(
                f"a cache of {len(blocks)} blocks of {block_size} tokens is too small"
            )
        low, high = policy.low_watermark_blocks, policy.high_watermark_blocks
        if not 0 <= low <= len(blocks) or high > len(blocks):
            raise ConfigError(f"watermarks of {low} and {high} blocks do not fit {len(blocks)}")
        self.block_size = block_size
        self.root = root
        self.policy = policy
        self.counters = CacheCounters()
        self.ages = BlockAges()
        self.now_s = 0.0
        self.pool = BlockPool(blocks)
        self.index = PrefixIndex(policy.eviction, len(blocks))
        max_kept = policy.max_kept_blocks
        self.keeps = Keeps(len(blocks) // 2 if max_kept is None else max_kept)
        self._evicted = EvictedDigests(len(blocks), block_size)

    # -- gauges -------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """All blocks."""
        return self.pool.num_usable

    @property
    def num_live(self) -> int:
        """Blocks held by requests and keeps."""
        return self.pool.num_live

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody holds."""
        return len(self.index.parked)

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return self.pool.num_free

    @property
    def num_available(self) -> int:
        """Blocks a live request can get: the free ones, then the evictable."""
        return self.num_free + self.num_evictable

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    # -- looking ------------------------------------------------------------------------------

    def new_chain(self) -> HashChain:
        """An empty hash chain for a new request."""
        return HashChain(self.root, self.block_size)

    def match(self, chain: HashChain, max_tokens: int) -> Match:
        """Find the longest cached prefix, to the token. Changes nothing.

        Args:
            chain: extended over the prompt.
            max_tokens: the longest useful match; one less than the prompt for a request that
                needs logits, so that at least its last token is computed.
        """
        size = self.block_size
        limit = self.policy.within_limit(max_tokens)  # what the grid costs is counted
        nodes: list[PrefixNode] = []
        self.index.extend_match(nodes, chain, self.num_blocks_for(limit))
        num_common, closest = len(nodes) * size, None
        if num_common < limit:
            parent = nodes[-1] if nodes else None
            run = chain.block(len(nodes))
            closest, num_in_block = self.index.children_of(parent).closest(run)
            num_common += num_in_block
        num_tokens = self.policy.on_grid(min(num_common, limit))
        num_full, num_rows = divmod(num_tokens, size)
        source = None
        if num_rows:
            source = nodes[num_full] if num_full < len(nodes) else closest
        return Match(num_tokens, tuple(nodes[:num_full]), source, num_common, closest)

    def match_length(self, chain: HashChain, hint: MatchHint, max_tokens: int) -> int:
        """How many tokens of a waiting request are cached, in whole blocks.

        Costs little when it is asked again and again with the same hint.
        """
        nodes = hint.nodes
        while nodes and not nodes[-1].is_indexed:
            nodes.pop()
        max_blocks = self.policy.cacheable(max_tokens) // self.block_size
        try:
            self.index.extend_match(nodes, chain, max_blocks)
        except Exception:  # as in `_look_up`
            self.counters.failed_lookups += 1
            nodes.clear()
        return len(nodes) * self.block_size

    def report(self, chain: HashChain, max_hit_tokens: int) -> CacheReport:
        """What the cache would do for a prompt now, and why not more. Changes nothing."""
        return self._report(self.match(chain, max_hit_tokens), chain, max_hit_tokens)

    # -- the road of a request ----------------------------------------------------------------

    def admit(
        self,
        chain: HashChain,
        *,
        num_tokens: int,
        max_tokens: int,
        max_hit_tokens: int,
        priority: int = DEFAULT_PRIORITY,
        is_caching: bool = True,
        is_kept: bool = False,
        is_retry: bool = False,
    ) -> BlockTable | None:
        """Hold the longest cached prefix and reserve blocks for the rest of the tokens.

        Args:
            chain: extended over the tokens.
            num_tokens: tokens to have room for now.
            max_tokens: tokens the request can ever have KV for.
            max_hit_tokens: as `max_tokens` of `match`.
            priority: of what it uses and leaves, 0 to 100.
            is_caching: False to neither read nor write the cache.
            is_kept: it is a registration, which is kept also where requests leave nothing.
            is_retry: the request was admitted before, and is in the counters.

        Returns:
            The request's table, or None if there are too few blocks; then nothing has changed.
        """
        found = self._look_up(chain, num_tokens, max_hit_tokens) if is_caching else None
        match, best = found or (_NO_MATCH, _NO_MATCH)
        if not self._has_room(match, num_tokens):
            return None
        table = BlockTable(self.block_size, self.num_blocks_for(max(num_tokens, max_tokens)))
        table.is_caching = (
            is_caching and self.policy.is_enabled and (self.policy.is_auto or is_kept)
        )
        table.priority = priority
        if is_caching and found is None:
            # What it computes stays out of an index that may be broken.
            table.is_caching = False
            table.report = None if is_retry else _FAILED
        elif is_caching and not is_retry:
            self._count_match(match, num_tokens, max_hit_tokens)
            table.report = self._report(best, chain, max_hit_tokens)
            if match is not best:
                table.report = replace(
                    table.report, cached_tokens=match.num_tokens, reason="evicted"
                )
        self._take_match(table, match, is_retry=is_retry)
        self._append_new(table, self.num_blocks_for(num_tokens) - len(match.nodes))
        return table

    def copied(self, table: BlockTable) -> None:
        """The rows of `table.copy` are in the table's own block: give its source back."""
        if table.copy is not None:
            copy, table.copy = table.copy, None
            self._release_blocks((copy.source,))
            self._trim()

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

    def commit(
        self, table: BlockTable, chain: HashChain, num_tokens: int, *, is_tail: bool = False
    ) -> None:
        """Index what is computed of the first `num_tokens` tokens, whose KV is in the pool.

        A block that was computed by another request meanwhile is given up for the other's: so the
        parent of an indexed block is always indexed, and always held by who holds the block. Call
        this only while no step of the request is in flight, because it changes the table's slots.

        Args:
            chain: extended over at least those tokens.
            is_tail: index the partly filled last block too. The request may go on writing behind
                those tokens.
        """
        if not table.is_caching:
            return
        table.tail = None
        num_tokens = self.policy.cacheable(num_tokens)
        num_full, num_rest = divmod(num_tokens, self.block_size)
        for position in range(table.num_committed, num_full):
            if not self._commit_block(table, position, chain):
                break
            table.num_committed += 1
        if is_tail and num_rest and table.num_committed == num_full:
            self._commit_tail(table, chain, num_tokens)
        self._trim()

    def release(self, table: BlockTable) -> None:
        """Give back all holds. What is committed stays cached; the other blocks are free."""
        self.copied(table)
        self._release_blocks(table.clear())
        self._trim()

    def drop(self, table: BlockTable, *, is_all_suspect: bool = False) -> list[PrefixNode]:
        """Release a request whose step has failed: what that step wrote is suspect.

        Its blocks that are not full leave the index, also if someone else holds them. Nothing of
        the step may still be writing.

        Args:
            is_all_suspect: its full blocks are not to be reused either, nor the one it has copied
                from. Those that others hold, or that others' blocks continue, stay.

        Returns:
            Those that stay, first block first.
        """
        blocks = tuple(table.blocks)
        self.counters.dropped_blocks += len(blocks) - table.num_committed
        for block in blocks[table.num_committed :]:
            node = self.index.node_of(block)
            if node is not None:
                self.index.remove(node)
        self.release(table)
        if not is_all_suspect:
            return []
        nodes = (*map(self.index.node_of, blocks), table.copied_from)
        self._forget(nodes)
        return [node for node in nodes if node is not None and node.is_indexed]

    # -- registered prefixes ------------------------------------------------------------------

    def register(self, prefix_id: PrefixId, table: BlockTable) -> Keep | None:
        """Hold what is committed of `table`, its tail included, until `unregister`.

        Registering an id again replaces what it held, so repeating a registration changes nothing.

        Returns:
            None if there would be more keeps, or they would hold more, than they may; then
            nothing has changed.
        """
        nodes = [self._node_of(block) for block in table.blocks[: table.num_committed]]
        num_tokens = table.num_committed * self.block_size
        if table.tail is not None:
            nodes.append(table.tail)
            num_tokens += table.num_tail_tokens
        digest = nodes[-1].digest.hex() if nodes else ""
        blocks = tuple(node.block for node in nodes)
        keep = Keep(prefix_id, "registration", digest, num_tokens, blocks, self.now_s)
        return keep if self.keep(keep) else None

    def unregister(self, prefix_id: PrefixId) -> bool:
        """Give up a registration; its blocks become evictable unless someone else holds them.

        Returns:
            Whether there was one.
        """
        return self.give_up(self.keeps.pop("registration", prefix_id))

    def keep(self, keep: Keep) -> bool:
        """Hold the blocks of a keep in place of an earlier one of its name.

        Returns:
            False if that would exceed the limits; then nothing has changed.
        """
        if not self.keeps.has_room(keep):
            return False
        for block in keep.blocks:
            self._hold(block)
        self.give_up(self.keeps.add(keep))
        return True

    def give_up(self, keep: Keep | None) -> bool:
        """Give back the blocks of a keep that is struck off; False for None."""
        if keep is None:
            return False
        self._release_blocks(keep.blocks)
        self._trim()
        return True

    def expire(self) -> None:
        """Give up the leases whose time is over at `now_s`."""
        for keep in self.keeps.expired(self.now_s):
            self.give_up(self.keeps.pop(keep.kind, keep.name))

    # -- inside -------------------------------------------------------------------------------

    def _report(self, match: Match, chain: HashChain, max_hit_tokens: int) -> CacheReport:
        return report(match, chain, max_hit_tokens, self.policy, self.index, self._evicted)

    def _look_up(
        self, chain: HashChain, num_tokens: int, max_hit_tokens: int
    ) -> tuple[Match, Match] | None:
        """A match that there is room for, and the best one; None if looking fails.

        Looking changes nothing, so an error of our own in it costs a hit and no more.
        """
        try:
            match = best = self.match(chain, max_hit_tokens)
            while match.source is not None and not self._has_room(match, num_tokens):
                # The block to copy from may be the very one that is missing.
                match = self.match(chain, len(match.nodes) * self.block_size)
        except Exception:
            self.counters.failed_lookups += 1
            return None
        return match, best

    def _has_room(self, match: Match, num_tokens: int) -> bool:
        num_new = self.num_blocks_for(num_tokens) - len(match.nodes)
        num_unparked = sum(node.rank is not None for node in match.nodes)
        if match.source is not None:
            num_unparked += match.source.rank is not None
        return num_new <= self.num_available - num_unparked

    def _count_match(self, match: Match, num_tokens: int, max_hit_tokens: int) -> None:
        counters = self.counters
        counters.queried_tokens += num_tokens
        counters.hit_tokens += match.num_tokens
        counters.copied_tokens += match.num_tokens - len(match.nodes) * self.block_size
        num_reusable = self.policy.within_limit(min(match.num_common, max_hit_tokens))
        counters.rounded_tokens += num_reusable - self.policy.on_grid(num_reusable)
        last = match.source or (match.nodes[-1] if match.nodes else None)
        if last is not None:
            counters.reuses += 1
            gap_s = self.now_s - last.last_used_s
            counters.reuse_gap_s += gap_s
            self.ages.reuse_gap.observe(gap_s)

    def _take_match(self, table: BlockTable, match: Match, *, is_retry: bool) -> None:
        table.num_hit_tokens = match.num_tokens
        table.num_committed = len(match.nodes)
        for node in match.nodes:
            self._hold(node.block)
            self._credit(node, table.priority, is_retry=is_retry)
            table.append(node.block)
        if match.source is not None:
            num_rows = match.num_tokens - len(match.nodes) * self.block_size
            self._hold(match.source.block)
            if 2 * num_rows >= match.source.num_rows:
                # A few tokens in common, such as the first of every prompt, are no reuse.
                self._credit(match.source, table.priority, is_retry=is_retry)
            table.copy = BlockCopy(match.source.block, num_rows)
            table.copied_from = match.source

    def _credit(self, node: PrefixNode, priority: int, *, is_retry: bool) -> None:
        """A held block is reused; what a request finds of its own is not counted."""
        node.num_hits += not is_retry
        node.last_used_s = self.now_s
        node.priority = max(node.priority, priority)

    def _append_new(self, table: BlockTable, num_new: int) -> None:
        self.evict_oldest(num_new - self.num_free, "need")
        for block in self.pool.allocate(num_new):
            table.append(block)
        self._trim()

    def _commit_block(self, table: BlockTable, position: int, chain: HashChain) -> bool:
        """Index one full block, or move the request onto its twin. False on a collision."""
        parent = self._node_of(table.blocks[position - 1]) if position else None
        digest, tokens = chain.digests[position], chain.block(position)
        twin = self.index.get(digest)
        if twin is None:
            self._index(table, position, parent, digest, tokens)
            return True
        if twin.parent is not parent or twin.tokens != tokens:
            self.counters.collisions += 1
            return False
        block = table.blocks[position]
        if twin.block != block:
            self._hold(twin.block)
            twin.priority = max(twin.priority, table.priority)
            table.replace(position, twin.block)
            self._abandon(block)
            self.counters.duplicate_blocks += 1
        return True

    def _commit_tail(self, table: BlockTable, chain: HashChain, num_tokens: int) -> None:
        """Index the partly filled last block, unless another block begins with the same tokens."""
        position = num_tokens // self.block_size
        parent = self._node_of(table.blocks[position - 1]) if position else None
        tokens = chain.block(position, num_tokens)
        digest = next_digest(chain.digest_before(position), tokens)
        table.num_tail_tokens = num_tokens % self.block_size
        table.tail = self.index.children_of(parent).covering(tokens)
        if table.tail is not None:
            table.tail.stand_for(digest)
        elif self.index.get(digest) is not None:
            self.counters.collisions += 1
        elif table.copy is None:
            table.tail = self._index(table, position, parent, digest, tokens)

    def _index(
        self,
        table: BlockTable,
        position: int,
        parent: PrefixNode | None,
        digest: BlockHash,
        tokens: bytes,
    ) -> PrefixNode:
        """Make a block of the table known by `tokens`."""
        block = table.blocks[position]
        node = self.index.node_of(block)
        shorter = self.index.children_of(parent).covered(tokens)
        if node is None:
            node = self.index.insert(digest, tokens, block, parent, self.now_s)
            node.priority = table.priority
            self.counters.inserted_blocks += 1
        else:
            self.index.grow(node, digest, tokens)
        if shorter is not None and shorter is not node and shorter.rank is not None:
            self._supersede(shorter, node)
        node.last_used_s = self.now_s
        return node

    def _abandon(self, block: BlockId) -> None:
        """Give up a held block whose tokens are in another one too."""
        if self.pool.release(block):
            return
        node = self.index.node_of(block)
        if node is not None:
            self.index.remove(node)
        self.pool.free(block)

    def _node_of(self, block: BlockId) -> PrefixNode:
        node = self.index.node_of(block)
        if node is None:
            raise InternalError(f"block {block} is committed but not indexed")
        return node

    def _hold(self, block: BlockId) -> None:
        self.index.parked.unpark(self._node_of(block))
        self.pool.hold(block)

    def _release_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Drop one hold on each of a chain's blocks, tail first (see `eviction` for why)."""
        for block in reversed(tuple(blocks)):
            if self.pool.release(block):
                continue
            node = self.index.node_of(block)
            if node is None:
                self.pool.free(block)
                continue
            longer = self.index.children_of(node.parent).superseding(node)
            if longer is None:
                self.index.parked.park(node)
            else:
                self._supersede(node, longer)

    def _forget(self, nodes: Iterable[PrefixNode | None]) -> None:
        """Take what was released out of the cache, last first, as far as it is nobody else's."""
        for node in reversed(tuple(nodes)):
            if node is None or not node.is_indexed:
                continue  # it was never committed, or has been evicted just now
            if node.rank is not None and not node.children:
                self._remove(node)
                self.counters.dropped_blocks += 1

    def strike_off(self, node: PrefixNode) -> None:
        """Take a damaged block that nothing continues out of the cache; who holds it keeps it."""
        is_held = node.rank is None
        self.index.remove(node)
        if not is_held:
            self.pool.free(node.block)
        self.counters.damaged_blocks += 1

    # -- eviction -----------------------------------------------------------------------------

    def evict_oldest(self, num_blocks: int, reason: str) -> None:
        """Evict the next blocks in order, as many as there are; none for a number below 1."""
        for _ in range(min(num_blocks, self.num_evictable)):
            self.evict_node(self.index.parked.oldest(), reason)

    def evict_node(self, node: PrefixNode, reason: str) -> None:
        """Evict a block that nobody holds and nothing continues."""
        counters = self.counters
        counters.evicted_blocks += 1
        counters.evicted_by[reason] += 1
        counters.evicted_unused_blocks += node.num_hits == 0
        counters.evicted_idle_s += self.now_s - node.last_used_s
        self.ages.note_eviction(node, self.now_s)
        self._evicted.add(node)
        self._remove(node)

    def _supersede(self, node: PrefixNode, longer: PrefixNode) -> None:
        """Another block has all the tokens of this one and goes on: it takes over its standing."""
        self._remove(node)
        self.counters.superseded_blocks += 1
        is_parked = longer.rank is not None
        self.index.parked.unpark(longer)
        longer.take_over(node)
        if is_parked:
            self.index.parked.park(longer)

    def _remove(self, node: PrefixNode) -> None:
        self.index.remove(node)
        self.pool.free(node.block)

    def _trim(self) -> None:
        """Evict ahead of need, and what exceeds the number of prefixes."""
        policy = self.policy
        if self.num_free < policy.low_watermark_blocks:
            most = max(policy.low_watermark_blocks, policy.high_watermark_blocks)
            self.evict_oldest(most - self.num_free, "watermark")
        if policy.max_leaves is not None:
            while self.index.num_leaves > policy.max_leaves and self.num_evictable:
                self.evict_node(self.index.parked.oldest(), "max_cached_prefixes")
