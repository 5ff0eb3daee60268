"""Copies of rows (`memcpy2d`): a block into one of another pitch, host to device or back.

As in `copies`, data from pageable host memory are taken at the call, and data for it have arrived
when the call returns. Boards have no such copies (page aclpythondevg_01_0123).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from runtime_cache.aclsim import codes, copies
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.memory import DeviceMemory, is_device_address
from runtime_cache.aclsim.process import Context, this_process
from runtime_cache.aclsim.streams import Stream

#: Most rows of an asynchronous copy (aclrtMemcpy2dAsync page of CANN 9.0).
MAX_ASYNC_ROWS = 5_242_880


@dataclass(frozen=True, slots=True)
class Rows:
    """Two blocks of memory, and what of them is copied.

    Attributes:
        dst, src: address of the first row.
        dpitch, spitch: bytes from one row to the next.
        width: bytes of a row that are copied.
        height: number of rows.
        kind: ACL_MEMCPY_*, 1 or 2.
    """

    dst: int
    dpitch: int
    src: int
    spitch: int
    width: int
    height: int
    kind: int

    def check(self) -> str:
        """Checks the arguments and returns the direction, `H2D` or `D2H`.

        Raises:
            AclFailure: 100000 for a 0 size, a width above a pitch or another kind; else as
                `copies.direction`.
        """
        if min(self.width, self.height) == 0 or self.width > min(self.dpitch, self.spitch):
            raise AclFailure(codes.INVALID_PARAM, "a size is 0 or the width exceeds a pitch")
        if self.kind not in (codes.HOST_TO_DEVICE, codes.DEVICE_TO_HOST):
            raise AclFailure(codes.INVALID_PARAM, f"memcpy2d knows kinds 1 and 2, not {self.kind}")
        return copies.direction(self.dst, self.width, self.src, self.width, self.kind)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(dst, src) address of each row."""
        for row in range(self.height):
            yield self.dst + row * self.dpitch, self.src + row * self.spitch

    @property
    def read(self) -> tuple[int, int]:
        """(address, bytes) of all that the rows span at the source."""
        return self.src, (self.height - 1) * self.spitch + self.width

    @property
    def written(self) -> tuple[int, int]:
        """(address, bytes) of all that the rows span at the destination."""
        return self.dst, (self.height - 1) * self.dpitch + self.width


def copy_rows(context: Context, rows: Rows) -> None:
    """`acl.rt.memcpy2d`: has happened on return, whatever the streams are doing.

    Raises:
        AclFailure: as `Rows.check` and `copies.copy_now`, 207000 on a board; nothing is copied.
    """
    _check_form(context.device.memory)
    rows.check()
    _check_spans(context.device.memory, rows, codes.RT_PARAM_INVALID)
    for dst, src in rows.pairs():
        copies.copy_now(context, dst, rows.width, src, rows.width, rows.kind)


def copy_rows_later(context: Context, stream: Stream, rows: Rows) -> None:
    """`acl.rt.memcpy2d_async`: queued; bad ranges surface when the stream is synchronised.

    Raises:
        AclFailure: as `Rows.check`; 107000 for more than 5 242 880 rows, 207000 on a board.
    """
    memory = context.device.memory
    _check_form(memory)
    way = rows.check()
    if rows.height > MAX_ASYNC_ROWS:
        raise AclFailure(codes.RT_PARAM_INVALID, f"{rows.height} rows, at most {MAX_ASYNC_ROWS}")
    is_pageable = this_process().host_memory.is_pageable
    if is_pageable(rows.src):
        _submit_kept(memory, stream, rows, way)
        return
    work = partial(_copy, memory, rows, way)
    stream.submit("acl.rt.memcpy2d_async", work, reads=(rows.read,), writes=(rows.written,))
    if is_pageable(rows.dst):
        stream.wait()


def _check_form(memory: DeviceMemory) -> None:
    """Raises 207000 on a board. The page names no code: this one is inferred."""
    if memory.has_one_memory:
        raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, "boards have no copies of rows")


def _check_spans(memory: DeviceMemory, rows: Rows, code: int) -> None:
    """Raises `code` if a block leaves its allocation: a row behind it may lie anywhere."""
    for address, count_bytes in (rows.read, rows.written):
        if is_device_address(address):
            memory.check(address, count_bytes, code)
        else:
            this_process().host_memory.check(address, count_bytes, code)


def _submit_kept(memory: DeviceMemory, stream: Stream, rows: Rows, way: str) -> None:
    """Takes what the source holds now, with its pitch, and queues the rows of that."""
    kept = copies.take_now(*rows.read)

    def work() -> None:
        _copy(memory, replace(rows, src=ctypes.addressof(kept)), way)

    stream.submit("acl.rt.memcpy2d_async", work, writes=(rows.written,))


def _copy(memory: DeviceMemory, rows: Rows, way: str) -> None:
    """The turn of queued rows."""
    _check_spans(memory, rows, codes.RT_DMA)
    for dst, src in rows.pairs():
        memory.copy(dst, src, rows.width, codes.RT_DMA)
        ledger.count_copy(way, rows.width)
