"""Caches full of known prompts, as the daemon leaves them. No device: the KV is not there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from runtime_cache.cache import desk
from runtime_cache.cache.hashing import root_digest
from runtime_cache.cache.manager import CacheManager
from runtime_cache.engine.request import TokenArray
from runtime_cache.errors import ConfigError, InternalError

#: As many token ids as Llama-2 has.
VOCAB_SIZE = 32000
BLOCK_SIZE = 64


def empty_cache(num_blocks: int) -> CacheManager:
    """A cache of so many blocks that evicts when it is full and no earlier."""
    root = root_digest(bundle_digest=bytes(32), block_size=BLOCK_SIZE)
    return CacheManager(blocks=range(1, num_blocks + 1), block_size=BLOCK_SIZE, root=root)


def insert(manager: CacheManager, prompt: TokenArray) -> None:
    """A prompt's whole road: admitted, computed, committed, released.

    Raises:
        InternalError: the cache is too small for it.
    """
    chain = manager.new_chain()
    chain.extend(prompt)
    num_tokens = len(prompt)
    table = manager.admit(
        chain, num_tokens=num_tokens, max_tokens=num_tokens, max_hit_tokens=num_tokens - 1
    )
    if table is None:
        raise InternalError(f"no room for {num_tokens} tokens")
    manager.copied(table)
    manager.commit(table, chain, num_tokens, is_tail=True)
    manager.release(table)


class ResidentCache:
    """A cache whose every block holds a part of some random prompt; no two begin alike.

    Attributes:
        manager: the cache.
        num_prompts: prompts of full length in it; the rest of the blocks holds a shorter one.
    """

    def __init__(self, num_blocks: int, blocks_per_prompt: int, *, seed: int) -> None:
        """An empty cache; `fill` fills it.

        Raises:
            ConfigError: not a single prompt fits, or too many do.
        """
        self.manager = empty_cache(num_blocks)
        self.num_prompts = num_blocks // blocks_per_prompt
        if not 0 < self.num_prompts < VOCAB_SIZE:
            raise ConfigError(
                f"{num_blocks} blocks hold {self.num_prompts} prompts of {blocks_per_prompt} "
                f"blocks; 1 to {VOCAB_SIZE - 1} can be told apart"
            )
        self._blocks_per_prompt = blocks_per_prompt
        self._seed = seed
        self._oldest = 0

    def fill(self, note: Callable[[int], None]) -> None:
        """Insert prompts until every block is cached.

        Args:
            note: called after every prompt with the number of cached blocks.
        """
        for number in range(self.num_prompts):
            insert(self.manager, self.prompt(number))
            note(self.manager.num_evictable)
        if num_rest := self.manager.num_free:
            insert(self.manager, self.prompt(self.num_prompts)[: num_rest * BLOCK_SIZE])

    def prompt(self, number: int) -> TokenArray:
        """Token ids of a resident prompt; made anew with every call."""
        random = np.random.default_rng((self._seed, number))
        num_tokens = self._blocks_per_prompt * BLOCK_SIZE
        tokens = random.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)
        tokens[0] = number
        return tokens

    def evict(self, num_prompts: int) -> int:
        """Evict the prompts that were inserted first; returns how many blocks that were."""
        num_blocks = num_prompts * self._blocks_per_prompt
        return desk.plan_blocks(self.manager, num_blocks).carry_out(self.manager).num_evicted

    def refill(self, num_prompts: int) -> None:
        """Insert the prompts again that `evict` has just evicted."""
        for _ in range(num_prompts):
            insert(self.manager, self.prompt(self._oldest))
            self._oldest = (self._oldest + 1) % self.num_prompts
