"""The KV pool: one allocation of device memory, made before READY and kept to the end."""

from __future__ import annotations

from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.teardown import Teardown


class KvPool:
    """Device memory of all KV groups. Block 0 is zero and stays so; the rest is uninitialised.

    Attributes:
        layout: where each token lies.
    """

    def __init__(self, device: AclDevice, layout: KvLayout) -> None:
        """Allocates the pool and zeroes the null block.

        Raises:
            OutOfDeviceMemory: the device has no room for the pool; nothing was allocated.
            AclError: the driver refused; nothing is left.
        """
        self.layout = layout
        #: What `run_ptr` looks at for every row of a step; of the layout each is a multiplication.
        self._token_bytes = layout.group_token_bytes
        self._first_slot = layout.block_size
        self._end_slot = layout.num_blocks * layout.block_size
        self._teardown = Teardown()
        self._base = device.malloc(layout.pool_bytes)
        self._teardown.push(lambda: device.free(self._base))
        self._group_ptrs = [
            self._base + layout.group_offset(group) for group in range(layout.num_groups)
        ]
        with self._teardown.undo_on_error():
            null_bytes = layout.block_size * layout.group_token_bytes
            for group in range(layout.num_groups):
                device.fill_zero(self.group_ptr(group), null_bytes)

    def group_ptr(self, group: int) -> int:
        """Device address of a group: what its pool input is bound to."""
        return self._group_ptrs[group]

    def run_ptr(self, group: int, first_slot: int, num_tokens: int) -> int:
        """Device address of a run of slots, to write it or to copy it.

        Raises:
            InternalError: the run leaves the blocks or touches the null block.
        """
        if not self._first_slot <= first_slot <= first_slot + num_tokens - 1 < self._end_slot:
            self.layout.run_offset(group, first_slot, num_tokens)  # which says what is wrong
        return self._group_ptrs[group] + first_slot * self._token_bytes

    def close(self) -> None:
        """Frees the pool; no run may be in flight. Idempotent.

        Raises:
            AclError: the driver refused.
        """
        self._teardown.close()
