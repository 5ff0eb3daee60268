"""Names of token prefixes: a SHA-256 chain over full blocks. Pure.

The digest of block i is SHA-256(digest of block i-1 | its token ids packed as little-endian int32),
so one digest stands for all tokens up to the end of its block. The chain starts at a root that
covers everything else the KV depends on. Digests are the same in every process and on every
machine; `tests/golden/prefix_digests.json` holds vectors for other implementations.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime_cache.ids import BlockHash

#: Bumped whenever the encoding below changes, so that old and new digests never meet.
_LABEL = b"rtcache-prefix-v1"
_PACKED = np.dtype("<i4")


class BlockKey(NamedTuple):
    """What a full block is known by.

    Attributes:
        digest: chain digest [32 bytes].
        tokens: its token ids, packed [block_size * 4 bytes]; compared on every hit.
    """

    digest: BlockHash
    tokens: bytes


def root_digest(
    *, bundle_digest: bytes, block_size: int, adapter: str = "", tenant_salt: bytes = b""
) -> BlockHash:
    """Where a chain starts: everything besides the tokens that decides what KV a token has.

    Every field is written as its length in bytes (little-endian uint32) and then itself, so that
    no two different sets of fields give the same bytes.

    Args:
        bundle_digest: digest of weights, KV type and KV layout.
        block_size: tokens per block.
        adapter: name of the adapter in use; empty for none.
        tenant_salt: keeps the prefixes of tenants apart; empty for none.
    """
    fields = (
        _LABEL,
        bundle_digest,
        block_size.to_bytes(4, "little"),
        adapter.encode("utf-8"),
        tenant_salt,
    )
    encoded = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return BlockHash(hashlib.sha256(encoded).digest())


def next_digest(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Digest of the block with packed `tokens` that follows `parent` (a block or the root)."""
    return BlockHash(hashlib.sha256(parent + tokens).digest())


class HashChain:
    """The keys of one sequence's full blocks, each hashed once.

    Belongs to a request for its whole life: it survives a preemption, and grows with the answer.

    Attributes:
        root: where the chain starts.
        block_size: tokens per block.
        keys: one per full block hashed so far, in token order.
    """

    __slots__ = ("block_size", "keys", "root")

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self.keys: list[BlockKey] = []

    def extend(self, tokens: npt.NDArray[np.int32]) -> None:
        """Hash the full blocks of `tokens` that are not hashed yet.

        Args:
            tokens: the whole sequence [int32, any length]; what was hashed before is not read.
        """
        size = self.block_size
        packed = tokens.astype(_PACKED, copy=False)
        parent = self.keys[-1].digest if self.keys else self.root
        for start in range(len(self.keys) * size, len(packed) - size + 1, size):
            block = packed[start : start + size].tobytes()
            parent = next_digest(parent, block)
            self.keys.append(BlockKey(parent, block))
