"""The buffers one model's steps pass through: made at load, shared by its gears.

One run is in flight at a time, so all gears use the same memory. A gear's inputs are packed side by
side in their own sizes, so that one copy brings them all to the device; the space behind each is
still as large as the model's largest gear needs, which is the size the driver is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime_cache.device.acl_device import AclDevice, HostBuffer
from runtime_cache.device.kv_layout import sub_range_stride
from runtime_cache.device.teardown import Teardown


@dataclass(frozen=True, slots=True)
class Packing:
    """Sub-ranges side by side in one buffer.

    Attributes:
        offsets: start of each [bytes]; multiples of 64.
        num_bytes: from the first start to the last end.
    """

    offsets: tuple[int, ...]
    num_bytes: int


def pack(sizes: Sequence[int]) -> Packing:
    """Places sub-ranges of `sizes` bytes (at least one), as `sub_range_stride` demands.

    Offsets grow with the sizes: if no size is larger than in another packing, no offset is.
    """
    offsets, start = [], 0
    for size in sizes:
        offsets.append(start)
        start += sub_range_stride(size)
    return Packing(tuple(offsets), offsets[-1] + sizes[-1])


class InputStaging:
    """Where a step's inputs are written, and where the device reads them.

    Attributes:
        host: pinned; the executor writes here.
        device_ptr: the same layout in device memory.
    """

    def __init__(self, device: AclDevice, largest_sizes: Sequence[int]) -> None:
        """Allocates for inputs of at most `largest_sizes` bytes.

        Raises:
            AclError: no room, or the driver refused; nothing is left.
        """
        self._device = device
        self._teardown = Teardown()
        num_bytes = pack(largest_sizes).num_bytes
        self.device_ptr = device.malloc(num_bytes)
        self._teardown.push(lambda: device.free(self.device_ptr))
        with self._teardown.undo_on_error():
            self.host: HostBuffer = device.malloc_host(num_bytes)
            self._teardown.push(lambda: device.free_host(self.host))
        # Alignment gaps are copied too; they hold nothing, but the same nothing every time.
        self.host.view[:] = 0

    def upload(self, num_bytes: int) -> None:
        """Queues the one copy of a step's inputs; `host` stays untouched until synchronised.

        Raises:
            AclError: the driver refused.
        """
        self._device.copy_to_device(self.device_ptr, self.host.ptr, num_bytes)

    def close(self) -> None:
        """Frees both buffers; no run may be in flight. Idempotent.

        Raises:
            AclError: the driver refused.
        """
        self._teardown.close()


class OutputStaging:
    """Where the device writes a step's outputs, and where its logits arrive.

    Attributes:
        ptrs: device address of each output by name; the same in every gear.
        logits: pinned host array [max_batch, vocab], fp32.
    """

    def __init__(
        self, device: AclDevice, largest_sizes: Mapping[str, int], logits_shape: tuple[int, int]
    ) -> None:
        """Allocates for outputs of at most `largest_sizes` bytes, by name.

        Raises:
            AclError: no room, or the driver refused; nothing is left.
        """
        self._device = device
        self._teardown = Teardown()
        packing = pack(list(largest_sizes.values()))
        base = device.malloc(packing.num_bytes)
        self._teardown.push(lambda: device.free(base))
        self.ptrs = {
            name: base + offset for name, offset in zip(largest_sizes, packing.offsets, strict=True)
        }
        with self._teardown.undo_on_error():
            self._host = device.malloc_host(logits_shape[0] * logits_shape[1] * 4)
            self._teardown.push(lambda: device.free_host(self._host))
        self.logits: npt.NDArray[np.float32] = self._host.array(0, logits_shape, np.float32)
        self._row_bytes = logits_shape[1] * 4

    def download_logits(self, num_rows: int) -> None:
        """Queues the copy of the first `num_rows` rows to `logits`.

        Raises:
            AclError: the driver refused.
        """
        self._device.copy_to_host(self._host.ptr, self.ptrs["logits"], num_rows * self._row_bytes)

    def close(self) -> None:
        """Frees both buffers; no run may be in flight. Idempotent.

        Raises:
            AclError: the driver refused.
        """
        self._teardown.close()
