"""Data buffers and datasets: the pointers one execution reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_cache.aclsim.handles import HandleTable
from runtime_cache.aclsim.tensor_descs import TensorDesc


@dataclass(slots=True, eq=False)
class DataBuffer:
    """A pointer and a size in bytes. Owns nothing."""

    address: int
    size_bytes: int


@dataclass(slots=True, eq=False)
class Dataset:
    """Buffers in the order of a model's inputs or outputs.

    Attributes:
        desc_table: where tensor descriptions live, those that programs made included.
        buffers: the live objects, which may be pointed elsewhere between runs.
        handles: their handles, in the same order.
        desc_handles: by index, the tensor descriptions that the dataset owns.
        num_queued: executions queued with it that have not run.
    """

    desc_table: HandleTable[TensorDesc]
    buffers: list[DataBuffer] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    desc_handles: dict[int, int] = field(default_factory=dict)
    num_queued: int = 0

    def desc(self, index: int) -> TensorDesc | None:
        """The tensor description of a buffer, or None.

        Raises:
            AclFailure: 100000 if the program destroyed it: it is the dataset's.
        """
        handle = self.desc_handles.get(index)
        return None if handle is None else self.desc_table.get(handle)

    def set_desc(self, index: int, desc: TensorDesc | None) -> None:
        """Takes over a description, or none; the one before is destroyed."""
        old = self.desc_handles.pop(index, None)
        if old is not None:
            self.desc_table.discard(old)
        if desc is not None:
            self.desc_handles[index] = self.desc_table.add(desc)

    def drop_descs(self) -> None:
        """Destroys the descriptions it owns."""
        for index in list(self.desc_handles):
            self.set_desc(index, None)
