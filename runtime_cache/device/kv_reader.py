"""Brings KV from the pool to the host, a few tokens at a time.

No step does this: in service KV never leaves device memory. It is there for an operator who wants
the cached KV checked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_pool import KvPool
from runtime_cache.device.teardown import Teardown
from runtime_cache.errors import InternalError

#: Read at once, so that a step that comes meanwhile waits for no more [bytes].
_PIECE_BYTES = 4 * 1024**2


class KvReader:
    """One pinned buffer, made before READY.

    Attributes:
        max_tokens: how many tokens fit; at least one.
    """

    def __init__(self, device: AclDevice, pool: KvPool) -> None:
        """Allocates the buffer.

        Raises:
            AclError: no room, or the driver refused; nothing is left.
        """
        layout = pool.layout
        self.max_tokens = max(1, min(layout.block_size, _PIECE_BYTES // layout.token_bytes))
        self._device = device
        self._pool = pool
        self._teardown = Teardown()
        self._host = device.malloc_host(self.max_tokens * layout.token_bytes)
        self._teardown.push(lambda: device.free_host(self._host))

    def queue(self, first_slot: int, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Queues the copies of a run of slots, one per group.

        Returns:
            [groups, num_tokens, bytes of a token in a group] uint8, a view of the buffer: filled
            once the device has synchronised, valid until the next call.

        Raises:
            InternalError: the run leaves the blocks, or does not fit the buffer.
            AclError: the driver refused.
        """
        layout = self._pool.layout
        if num_tokens > self.max_tokens:
            raise InternalError(f"{num_tokens} tokens are read at once, {self.max_tokens} fit")
        num_bytes = num_tokens * layout.group_token_bytes
        for group in range(layout.num_groups):
            source = self._pool.run_ptr(group, first_slot, num_tokens)
            self._device.copy_to_host(self._host.ptr + group * num_bytes, source, num_bytes)
        return self._host.array(
            0, (layout.num_groups, num_tokens, layout.group_token_bytes), np.uint8
        )

    def queue_null(self) -> npt.NDArray[np.uint8]:
        """Queues the copy of one token of the null block's first group.

        Returns:
            [bytes of a token in a group] uint8, as `queue`: zeros, if all is well.

        Raises:
            AclError: the driver refused.
        """
        num_bytes = self._pool.layout.group_token_bytes
        self._device.copy_to_host(self._host.ptr, self._pool.group_ptr(0), num_bytes)
        return self._host.array(0, (num_bytes,), np.uint8)

    def close(self) -> None:
        """Frees the buffer; no copy may be in flight. Idempotent.

        Raises:
            AclError: the driver refused.
        """
        self._teardown.close()
