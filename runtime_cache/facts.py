"""What the daemon tells of itself: `info`, `ping`, `list`, `stats`.

Reads gauges and counters where they are kept; changes nothing.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Awaitable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from ipc import messages as wire
from ipc.server import Server
from runtime_cache import __version__
from runtime_cache.cache.listing import EntryQuery, page
from runtime_cache.cache.results import BlockFacts, CacheEntry, KeepKind, ShownEntry
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.reload import Settings
from runtime_cache.runtime import Runtime
from runtime_cache.stats import DaemonStats

_LIBRARIES = ("numpy", "pyzmq", "tokenizers", "uvloop", "onnxruntime")


class DaemonFacts:
    """Facts of one running daemon.

    Attributes:
        digest: of the bundle.
        block_size: tokens per block.
        bytes_per_block: device memory of one block.
        kv_dtype: `float16` or `float32`.
        is_caching: whether prefixes are kept at all.
        incarnation: another one every time the daemon starts.
        figures: what `stats` says.
    """

    def __init__(
        self, runtime: Runtime, servers: Iterable[Server], settings: Settings | None = None
    ) -> None:
        """Args:
        servers: looked at whenever stats are asked for.
        settings: keys and what they used; None: there are none.
        """
        self._runtime = runtime
        self.figures = DaemonStats(runtime, servers, settings)
        self._versions = _versions()
        self.digest = runtime.manifest.digest
        self.block_size = runtime.layout.block_size
        self.bytes_per_block = runtime.layout.block_bytes
        self.kv_dtype = runtime.layout.dtype
        self.is_caching = runtime.config.cache.enable
        self.incarnation = secrets.token_hex(8)

    def pong(self, message_id: wire.MessageId) -> wire.Pong:
        """Answer to `ping`."""
        state = self._runtime.engine.condition
        return wire.Pong(
            id=message_id,
            version=__version__,
            uptime_s=self.figures.uptime_s,
            state=state,
            incarnation=self.incarnation,
        )

    def info(self, message_id: wire.MessageId, tenant: TenantName = DEFAULT_TENANT) -> wire.Info:
        """Answer to `info`: what a client of this tenant may know."""
        runtime, config = self._runtime, self._runtime.config
        return wire.Info(
            id=message_id,
            model=runtime.manifest.name,
            digest=self.digest,
            device=config.device.device,
            vocab_size=runtime.manifest.model.vocab_size,
            max_model_len=runtime.engine.state.max_sequence_tokens_of(tenant),
            block_size=self.block_size,
            chat=runtime.chat_template is not None,
            limits={
                "max_message_bytes": config.ipc.max_message_bytes,
                "max_unsent_tokens": config.ipc.max_unsent_tokens,
                "max_queued_replies": config.ipc.max_queued_replies,
                "max_waiting": config.engine.max_waiting,
                "max_batch": runtime.gears.max_batch,
                "cache_tokens": runtime.caches[tenant].num_usable * self.block_size,
            },
            versions=self._versions,
            incarnation=self.incarnation,
        )

    def entries(
        self, query: EntryQuery, tenant: TenantName | None = None
    ) -> tuple[tuple[wire.Entry, ...], int]:
        """The cached prefixes that are asked for, and how many there are in all.

        Args:
            tenant: whose, one of those configured; None for everybody's.
        """
        caches = self._runtime.caches
        asked = caches if tenant is None else {tenant: caches[tenant]}
        now_s = time.monotonic()
        entries, total = page(asked, query)
        return tuple(self._entry(name, entry, now_s) for name, entry in entries), total

    def shown(
        self, message_id: wire.MessageId, tenant: TenantName, shown: ShownEntry, *, with_text: bool
    ) -> wire.Shown:
        """Answer to `show`.

        Args:
            with_text: decode the tokens as well.
        """
        now_s, text = time.monotonic(), None
        if with_text:
            tokens = np.frombuffer(shown.tokens, dtype="<i4")[: shown.entry.num_tokens]
            text = self._runtime.tokenizer.decode(tokens)
        return wire.Shown(
            id=message_id,
            entry=self._entry(tenant, shown.entry, now_s),
            blocks=tuple(_block(block, now_s) for block in shown.blocks),
            num_requests=shown.entry.num_requests,
            num_continued_by=shown.num_continued_by,
            text=text,
        )

    def num_evictable(self, tenant: TenantName | None) -> int:
        """How many blocks nobody holds: of a tenant, one of those configured, or of all (None)."""
        caches = self._runtime.caches
        return sum(caches[name].num_evictable for name in (caches if tenant is None else (tenant,)))

    @property
    def max_read_tokens(self) -> int:
        """How many tokens `read_kv` takes at once."""
        return self._runtime.executor.max_read_tokens

    def read_kv(self, first_slot: int, num_tokens: int) -> Awaitable[bytes]:
        """What the pool holds: `Runtime.read_kv`."""
        return self._runtime.read_kv(first_slot, num_tokens)

    def stats(self) -> dict[str, Any]:
        """Section → name → value, and `warnings`: `DaemonStats.report`."""
        return self.figures.report()

    def _entry(self, tenant: TenantName, entry: CacheEntry, now_s: float) -> wire.Entry:
        keep = entry.keep
        expires_s = None if keep is None else keep.expires_s
        name = keep.name if keep is not None and keep.kind == "registration" else None
        return wire.Entry(
            digest=entry.digest,
            num_tokens=entry.num_tokens,
            num_blocks=entry.num_blocks,
            num_bytes=entry.num_blocks * self.bytes_per_block,
            hits=entry.num_hits,
            age_s=round(now_s - entry.created_s, 3),
            idle_s=round(now_s - entry.last_used_s, 3),
            in_use=entry.num_requests > 0,
            prefix_id=None if name is None else wire.PrefixName(name),
            tenant=tenant,
            kept="" if keep is None else _KEPT[keep.kind],
            expires_in_s=None if expires_s is None else round(max(0.0, expires_s - now_s), 3),
            priority=entry.priority,
        )


def _block(block: BlockFacts, now_s: float) -> wire.BlockEntry:
    return wire.BlockEntry(
        digest=block.digest,
        num_tokens=block.num_tokens,
        hits=block.num_hits,
        idle_s=round(now_s - block.last_used_s, 3),
        num_requests=block.num_requests,
        is_kept=block.is_kept,
    )


#: The words of the wire for why an entry stays.
_KEPT: dict[KeepKind, str] = {"registration": "registered", "pin": "pinned", "lease": "leased"}


def _versions() -> dict[str, str]:
    versions = {
        "protocol": str(wire.PROTOCOL_VERSION),
        "runtime-cache": __version__,
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
