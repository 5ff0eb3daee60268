"""Why a prompt was not reused further, from a match and what was evicted lately. Pure."""

from __future__ import annotations

from collections import OrderedDict

from runtime_cache.cache.hashing import HashChain, next_digest
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.prefix_index import PrefixIndex, PrefixNode
from runtime_cache.cache.results import CacheReport, Match
from runtime_cache.ids import BlockHash

_OFF = CacheReport(0, "disabled", detail="the prefix cache is off (cache.enable)")
_MAX_REMEMBERED = 1 << 16


class EvictedDigests:
    """The digests of blocks that were evicted lately, so that a miss can say so."""

    def __init__(self, num_blocks: int) -> None:
        """Args:
        num_blocks: of the cache; about as many digests are remembered.
        """
        self._max_digests = min(max(num_blocks, 1024), _MAX_REMEMBERED)
        self._digests: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, digest: BlockHash) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, node: PrefixNode) -> None:
        """Remember a node, also by what it held when it was shorter."""
        for digest in (*node.earlier, node.digest):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_digests:
            self._digests.popitem(last=False)


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
    if _next_digest(chain, common) in evicted:
        return CacheReport(cached, "evicted", common or None, nearest_tokens)
    if nearest_tokens is None:
        return CacheReport(cached, "cold")
    if nearest_tokens == common:
        return CacheReport(cached, "extended", common, nearest_tokens)
    return CacheReport(cached, "diverged", common, nearest_tokens)


def _next_digest(chain: HashChain, num_common: int) -> BlockHash:
    """Digest of the block in which the prompt goes on behind what is cached, as far as it goes."""
    position = num_common // chain.block_size
    if position < len(chain.digests):
        return chain.digests[position]
    return next_digest(chain.digest_before(position), chain.block(position))


def _nearest_tokens(match: Match, chain: HashChain, index: PrefixIndex) -> int | None:
    """Length of the entry that has most in common with the prompt; None if none has anything."""
    if match.num_common == 0:
        return None
    if match.closest is not None:
        return match.closest.longest_tokens
    last = index.get(chain.digests[match.num_common // chain.block_size - 1])
    return None if last is None else last.longest_tokens
