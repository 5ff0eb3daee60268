"""Why a prompt was not reused further, from a match and what was evicted lately. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict

from runtime_cache.cache.hashing import TOKEN_BYTES, HashChain, next_digest
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.prefix_index import PrefixIndex, PrefixNode
from runtime_cache.cache.results import CacheReport, Match
from runtime_cache.ids import BlockHash

_OFF = CacheReport(0, "disabled", detail="the prefix cache is off (cache.enable)")
_MAX_REMEMBERED = 1 << 16


#: Digest of the block before, None for the first block of a prefix; and how many rows.
_Place = tuple[BlockHash | None, int]


class EvictedDigests:
    """The digests of blocks that were evicted lately, so that a miss can say so."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Args:
        num_blocks: of the cache; about as many digests are remembered.
        """
        self._block_size = block_size
        self._max_digests = min(max(num_blocks, 1024), _MAX_REMEMBERED)
        #: Of ends of prefixes, the partly filled ones, where they were.
        self._places: OrderedDict[BlockHash, _Place | None] = OrderedDict()
        self._num_at: Counter[_Place] = Counter()
        self._rows_behind: dict[BlockHash | None, set[int]] = {}

    def __contains__(self, digest: BlockHash) -> bool:
        return digest in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, node: PrefixNode) -> None:
        """Remember a node, also by what it held when it was shorter."""
        for digest in node.earlier:
            self._add(digest, None)
        if node.num_rows == self._block_size:
            self._add(node.digest, None)
            return
        before = None if node.parent is None else node.parent.digest
        self._add(node.digest, (before, node.num_rows))

    def has_more(self, chain: HashChain, num_common: int) -> bool:
        """Whether a block was evicted that the chain goes on with behind `num_common` tokens.

        Either it began with the whole rest of the chain's block, or it was the end of a prefix
        that the chain continues.
        """
        position, num_found = divmod(num_common, chain.block_size)
        before = chain.digest_before(position)
        rest = chain.block(position)
        if next_digest(before, rest) in self:
            return True
        ends = self._rows_behind.get(before if position else None, ())
        return any(
            num_found < num_rows <= len(rest) // TOKEN_BYTES
            and next_digest(before, rest[: num_rows * TOKEN_BYTES]) in self
            for num_rows in ends
        )

    def _add(self, digest: BlockHash, place: _Place | None) -> None:
        if digest in self._places:
            self._forget(digest)
        self._places[digest] = place
        if place is not None:
            self._num_at[place] += 1
            self._rows_behind.setdefault(place[0], set()).add(place[1])
        if len(self._places) > self._max_digests:
            self._forget(next(iter(self._places)))

    def _forget(self, digest: BlockHash) -> None:
        place = self._places.pop(digest)
        if place is None:
            return
        self._num_at[place] -= 1
        if self._num_at[place]:
            return
        del self._num_at[place]
        before, num_rows = place
        self._rows_behind[before].remove(num_rows)
        if not self._rows_behind[before]:
            del self._rows_behind[before]


def report(
    match: Match,
    chain: HashChain,
    max_hit_tokens: int,
    policy: CachePolicy,
    index: PrefixIndex,
    evicted: EvictedDigests,
) -> CacheReport:
    """What `match` does for the prompt in `chain`.

    Args:
        max_hit_tokens: what could be reused at the most without the policy's limits.
    """
    if not policy.is_enabled:
        return _OFF
    cached, most = match.num_tokens, policy.on_grid(max_hit_tokens)
    if most == 0:
        return CacheReport(0, "too_short")
    if cached == most:
        return CacheReport(cached, "hit")
    if cached == policy.cacheable(max_hit_tokens):
        return CacheReport(cached, "limit")
    common = match.num_common
    nearest_tokens = _nearest_tokens(match, chain, index)
    if evicted.has_more(chain, common):
        return CacheReport(cached, "evicted", common or None, nearest_tokens)
    if nearest_tokens is None:
        return CacheReport(cached, "cold")
    if nearest_tokens == common:
        return CacheReport(cached, "extended", common, nearest_tokens)
    return CacheReport(cached, "diverged", common, nearest_tokens)


def _nearest_tokens(match: Match, chain: HashChain, index: PrefixIndex) -> int | None:
    """Length of the entry that has most in common with the prompt; None if none has anything."""
    if match.num_common == 0:
        return None
    if match.closest is not None:
        return match.closest.longest_tokens
    last = index.get(chain.digests[match.num_common // chain.block_size - 1])
    return None if last is None else last.longest_tokens
