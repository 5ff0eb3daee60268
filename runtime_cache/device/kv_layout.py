"""Where each token's KV lies in the pool. Pure arithmetic, no device.

The pool is cut into equal groups of layers. Within a group the KV of one token is contiguous:
`2 * layers_per_group` rows (K, V, K, V, ...) of `row_elements` elements, so a run of slots is one
copy. Each group is a sub-range of one allocation and a model input of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from om_models.manifest import KvSpec
from runtime_cache.errors import BundleError, ConfigError, InternalError

#: Both ends of an asynchronous copy start on this boundary [bytes].
ALIGNMENT_BYTES = 64


def sub_range_stride(num_bytes: int) -> int:
    """Distance between the starts of equal sub-ranges of one allocation [bytes].

    Source: "secondary allocation" in the pyACL guide (0110, aclpythondevg_0051): a sub-range of
    `len` bytes takes `ALIGN_UP(len, 32) + 32` and starts on a 64-byte boundary.
    """
    return _align_up(_align_up(num_bytes, 32) + 32, ALIGNMENT_BYTES)


def _align_up(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The pool a bundle was compiled for, cut into blocks.

    Attributes:
        num_slots: token slots compiled in, those of the null block included.
        num_groups: equal groups of layers.
        layers_per_group: layers in each.
        row_elements: elements of one pool row (one layer's K or V of one token, padded).
        dtype: `float16` or `float32`.
        block_size: tokens per block.
    """

    num_slots: int
    num_groups: int
    layers_per_group: int
    row_elements: int
    dtype: str
    block_size: int

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "float32"):
            raise BundleError(f"KV dtype is {self.dtype!r}; known are float16 and float32")
        if min(self.num_groups, self.layers_per_group, self.row_elements) < 1:
            raise BundleError("KV groups, layers per group and row elements must be at least 1")
        if self.row_bytes % ALIGNMENT_BYTES:
            raise BundleError(
                f"a KV row of {self.row_elements} {self.dtype} elements takes {self.row_bytes}"
                f" bytes, which is not a multiple of {ALIGNMENT_BYTES}"
            )
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; it must be at least 1")
        if self.num_blocks < 2:
            raise ConfigError(
                f"the bundle's {self.num_slots} KV slots hold {self.num_blocks} blocks of"
                f" {self.block_size} tokens; at least 2 are needed (block 0 is the null block)"
            )

    @classmethod
    def from_spec(cls, kv: KvSpec, block_size: int) -> KvLayout:
        """The layout a manifest records, cut into blocks of `block_size` tokens.

        Raises:
            BundleError: the manifest's numbers make no pool.
            ConfigError: the block size does not suit the pool.
        """
        return cls(
            num_slots=kv.num_slots,
            num_groups=kv.num_groups,
            layers_per_group=kv.layers_per_group,
            row_elements=kv.row_elements,
            dtype=kv.dtype,
            block_size=block_size,
        )

    @property
    def num_blocks(self) -> int:
        """Whole blocks, the null block included; slots behind the last one are never used."""
        return self.num_slots // self.block_size

    @property
    def rows_per_slot(self) -> int:
        """Pool rows of one token in one group."""
        return 2 * self.layers_per_group

    @property
    def row_bytes(self) -> int:
        """Bytes of one pool row; a multiple of 64."""
        return self.row_elements * np.dtype(self.dtype).itemsize

    @property
    def group_token_bytes(self) -> int:
        """Bytes of one token's KV in one group; contiguous."""
        return self.rows_per_slot * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all groups."""
        return self.num_groups * self.group_token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's KV in all groups."""
        return self.block_size * self.token_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of one pool input, exactly as compiled."""
        return self.num_slots * self.group_token_bytes

    @property
    def pool_bytes(self) -> int:
        """What the one allocation is asked for (the driver adds its own 32-byte tail)."""
        return self.group_offset(self.num_groups - 1) + self.group_bytes

    def group_offset(self, group: int) -> int:
        """Start of a group within the allocation [bytes]."""
        return group * sub_range_stride(self.group_bytes)

    def run_offset(self, group: int, first_slot: int, num_tokens: int) -> int:
        """Start of a run of slots within the allocation [bytes], to write it or to copy it.

        Raises:
            InternalError: the run is empty, leaves the blocks, or touches the null block.
        """
        last_slot = self.num_blocks * self.block_size
        if num_tokens < 1 or first_slot < self.block_size or first_slot + num_tokens > last_slot:
            raise InternalError(
                f"slots {first_slot}..{first_slot + num_tokens - 1} are not for tokens:"
                f" {self.block_size}..{last_slot - 1} are"
            )
        return self.group_offset(group) + first_slot * self.group_token_bytes
