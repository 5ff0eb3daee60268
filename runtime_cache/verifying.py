"""Reads cached KV from the device once more, and has the engine judge it: the question `verify`.

In service KV never leaves device memory. This is an operator's explicit act: it copies KV to the
host, to take checksums of it, and keeps nothing else.

Nothing holds the blocks meanwhile, so nothing can be left held, and no request is short of room for
it. A read is on its way to the device when it has been asked for, before any step that is decided
later. So a block that is cached at that moment is read before anything else can be written there;
one that has left the cache before its last rows are asked for is not judged.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from ipc import messages as wire
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.verification import Reading, Verdict
from runtime_cache.engine.commands import ReportToRead
from runtime_cache.errors import DeviceLost
from runtime_cache.ids import TenantName

log = structlog.get_logger(__name__)

#: What one message reads: so many blocks, or as many as this time allows, and one at least. So an
#: operator soon hears something, however long the steps take that a read waits for.
_PART_BLOCKS = 256
_PART_S = 1.0
_CHECKSUM_BYTES = 16


class VerifyEngine(Protocol):
    """What verifying needs of `engine.loop.EngineLoop`."""

    def blocks_to_read(
        self, tenant: TenantName | None, digest: str | None, *, first_block: int, max_blocks: int
    ) -> ReportToRead: ...
    def judge(self, reading: Reading) -> Verdict: ...
    def lose_device(self, error: DeviceLost) -> None: ...


class KvSource(Protocol):
    """Where the KV is.

    Attributes:
        kv_dtype: `float16` or `float32`.
        max_read_tokens: how many tokens `read_kv` takes at once.
    """

    @property
    def block_size(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def max_read_tokens(self) -> int: ...
    def read_kv(self, first_slot: int, num_tokens: int) -> Awaitable[bytes]:
        """The KV of a run of slots; the read is on its way when this returns.

        Raises:
            DeviceError: it failed, or an earlier step still runs. Nothing has changed.
        """
        ...


class Verifier:
    """Carries out `verify`, one at a time."""

    def __init__(self, engine: VerifyEngine, kv: KvSource, clock: Callable[[], float]) -> None:
        """Args:
        clock: the engine's clock.
        """
        self._engine = engine
        self._kv = kv
        self._clock = clock
        self._turn = asyncio.Lock()

    async def verify(self, message: wire.Verify, tenant: TenantName | None) -> wire.Verified:
        """Read and judge a part of the blocks that are meant; may be cancelled at any time.

        Args:
            tenant: whose; None for every tenant's.

        Raises:
            UnknownEntry, InvalidRequest: what is meant is not clear.
            DeviceError: a block cannot be read. What was read before is judged.
        """
        async with self._turn:
            part = self._engine.blocks_to_read(
                tenant,
                message.digest,
                first_block=message.first_block,
                max_blocks=_PART_BLOCKS,
            )
            try:
                return await self._verify_part(message.id, part)
            except DeviceLost as error:
                self._engine.lose_device(error)
                raise

    async def _verify_part(self, message_id: wire.MessageId, part: ReportToRead) -> wire.Verified:
        tally, next_block = _Tally(), part.next_block
        end_s = self._clock() + _PART_S
        for number, node in enumerate(part.nodes):
            if number and self._clock() >= end_s:
                next_block = node.block
                break
            reading = await self._read(node)
            if reading is not None:
                self._judge(reading, tally)
        token_bytes = self._kv.bytes_per_block // self._kv.block_size
        return tally.reply(message_id, token_bytes, next_block)

    async def _read(self, node: PrefixNode) -> Reading | None:
        """Read a block, each piece between two steps; None if it leaves the cache meanwhile."""
        begun_s, num_tokens = self._clock(), node.num_rows
        checksum, is_finite = hashlib.blake2b(digest_size=_CHECKSUM_BYTES), True
        size = self._kv.max_read_tokens
        for start in range(0, num_tokens, size):
            if not node.is_indexed:
                return None
            first_slot = node.block * self._kv.block_size + start
            rows = await self._kv.read_kv(first_slot, min(size, num_tokens - start))
            # Beside the loop and the device: it takes longer than the copy.
            is_finite &= await asyncio.to_thread(_look, rows, checksum, self._kv.kv_dtype)
        return Reading(node, num_tokens, begun_s, checksum.digest(), is_finite)

    def _judge(self, reading: Reading, tally: _Tally) -> None:
        verdict = self._engine.judge(reading)
        tally.add(reading, verdict)
        if verdict.num_dropped:
            log.error(
                "kv_damaged",
                finding=verdict.finding,
                digest=reading.node.digest.hex(),
                block=reading.node.block,
                dropped_blocks=verdict.num_dropped,
                in_use_blocks=verdict.num_in_use,
            )


@dataclass(slots=True)
class _Tally:
    """What was found so far."""

    findings: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    dropped_blocks: int = 0
    in_use_blocks: int = 0

    def add(self, reading: Reading, verdict: Verdict) -> None:
        if verdict.finding == "gone":
            return
        self.findings[verdict.finding] += 1
        self.num_tokens += reading.num_tokens
        self.dropped_blocks += verdict.num_dropped
        self.in_use_blocks += verdict.num_in_use

    def reply(
        self, message_id: wire.MessageId, token_bytes: int, next_block: int | None
    ) -> wire.Verified:
        return wire.Verified(
            id=message_id,
            num_blocks=self.findings.total(),
            num_bytes=self.num_tokens * token_bytes,
            num_new=self.findings["new"],
            num_changed=self.findings["changed"],
            num_not_finite=self.findings["not_finite"],
            dropped_blocks=self.dropped_blocks,
            in_use_blocks=self.in_use_blocks,
            next_block=next_block,
        )


def _look(rows: bytes, checksum: hashlib.blake2b, dtype: str) -> bool:
    """Add to the checksum; whether every value is a finite number."""
    checksum.update(rows)
    return bool(np.isfinite(np.frombuffer(rows, dtype)).all())
