"""Data buffers and datasets: the pointers one execution reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class DataBuffer:
    """A pointer and a size in bytes. Owns nothing."""

    address: int
    size_bytes: int


@dataclass(slots=True, eq=False)
class Dataset:
    """Buffers in the order of a model's inputs or outputs.

    Attributes:
        buffers: the live objects, which may be pointed elsewhere between runs.
        handles: their handles, in the same order.
        num_queued: executions queued with it that have not run.
    """

    buffers: list[DataBuffer] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    num_queued: int = 0
