"""Names of token prefixes: a SHA-256 chain over full blocks. Pure.

The digest of block i is SHA-256(digest of block i-1 | its token ids packed as little-endian int32),
so one digest stands for all tokens up to the end of its block. The chain starts at a root that
covers everything else the KV depends on. Digests are the same in every process and on every
machine; `tests/golden/prefix_digests.json` holds vectors for other implementations.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt

from runtime_cache.ids import BlockHash

#: Bumped whenever the encoding below changes, so that old and new digests never meet.
_LABEL = b"rtcache-prefix-v1"
_PACKED = np.dtype("<i4")
#: Bytes of one packed token id.
TOKEN_BYTES = 4


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
    return BlockHash(sha256(encoded).digest())


def next_digest(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Digest of the block with packed `tokens` that follows `parent` (a block or the root).

    The block need not be full: the last block of a prefix is known by its tokens so far.
    """
    return BlockHash(sha256(parent + tokens).digest())


class HashChain:
    """The digests of one sequence's full blocks, each hashed once, and its tokens packed.

    Belongs to a request for its whole life: it survives a preemption, and grows with the answer.

    Attributes:
        root: where the chain starts.
        block_size: tokens per block.
        digests: one per full block so far, in token order.
        packed: all tokens so far, packed [4 bytes each].
    """

    __slots__ = ("block_size", "digests", "packed", "root")

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self.digests: list[BlockHash] = []
        self.packed = b""

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those behind the last full block included."""
        return len(self.packed) // TOKEN_BYTES

    def extend(self, tokens: npt.NDArray[np.int32]) -> None:
        """Take in the tokens that are new, and hash the blocks they fill.

        Args:
            tokens: the whole sequence [int32, any length]; what was taken in before is not read.
        """
        self.packed += tokens[self.num_tokens :].astype(_PACKED, copy=False).tobytes()
        packed, digests, width = self.packed, self.digests, self.block_size * TOKEN_BYTES
        digest: bytes = digests[-1] if digests else self.root
        for start in range(len(digests) * width, len(packed) - width + 1, width):
            digest = sha256(digest + packed[start : start + width]).digest()
            digests.append(digest)  # type: ignore[arg-type]  # a NewType's call costs a tenth of this

    def block(self, position: int, end: int | None = None) -> bytes:
        """Packed tokens of the block at `position`, as far as there are any.

        Args:
            end: leave out the tokens of the sequence from here on; None for no limit.
        """
        width = self.block_size * TOKEN_BYTES
        stop = (position + 1) * width
        return self.packed[position * width : stop if end is None else min(stop, end * TOKEN_BYTES)]

    def digest_before(self, position: int) -> BlockHash:
        """Digest of the block before `position`; the root for the first block."""
        return self.digests[position - 1] if position else self.root


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two packed sequences have in common at the beginning."""
    num_bytes = min(len(one), len(other))
    difference = int.from_bytes(one[:num_bytes], "little") ^ int.from_bytes(
        other[:num_bytes], "little"
    )
    if not difference:
        return num_bytes // TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
