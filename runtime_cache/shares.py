"""How the KV pool is shared out between tenants, and what the options mean for each part. Pure.

Shares are static: every tenant has a range of blocks of its own, and so an index, counters and
evictions of its own. `docs/cache.md` has the rules in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime_cache.cache.policy import CachePolicy
from runtime_cache.config import CacheConfig, TenantConfig
from runtime_cache.errors import ConfigError
from runtime_cache.ids import DEFAULT_TENANT, TenantName

#: A tenant with less could never copy the beginning of one block into another.
MIN_BLOCKS = 2
#: The watermarks never take more than these parts of the pool.
_MAX_LOW_PART = 8
_MAX_HIGH_PART = 4
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Share:
    """One tenant's part of the pool.

    Attributes:
        blocks: its blocks; block 0, the null block, is nobody's.
        salt: enters the root of its digests [bytes]; empty for the default tenant.
    """

    tenant: TenantName
    blocks: range
    salt: bytes


def share_out(
    tenants: Sequence[TenantConfig], num_blocks: int, salts: Mapping[TenantName, bytes]
) -> list[Share]:
    """Cut the pool; the default tenant, who comes first, has what the others leave.

    Args:
        salts: of each of the tenants.
        num_blocks: blocks in use, the null block included.

    Raises:
        ConfigError: a part is too small; the message says of all of them how much they need.
    """
    num_usable = num_blocks - 1
    sizes = [int(num_usable * tenant.share_percent / 100) for tenant in tenants]
    rest = num_usable - sum(sizes)
    faults = [
        f"  - tenant {tenant.name!r} gets {size} with {tenant.share_percent:g} percent"
        for tenant, size in zip(tenants, sizes, strict=True)
        if size < MIN_BLOCKS
    ]
    if tenants and rest < MIN_BLOCKS:
        faults.append(f"  - the default tenant gets {rest}")
    if faults:
        raise ConfigError(
            f"of {num_usable} blocks every tenant needs at least {MIN_BLOCKS}, which is "
            f"{100 * MIN_BLOCKS / num_usable:.2f} percent:\n" + "\n".join(faults)
        )
    shares = [Share(DEFAULT_TENANT, range(1, 1 + rest), b"")]
    for tenant, size in zip(tenants, sizes, strict=True):
        start = shares[-1].blocks.stop
        name = TenantName(tenant.name)
        salt = tenant_salt(name, salts[name])
        shares.append(Share(name, range(start, start + size), salt))
    return shares


def tenant_salt(name: str, secret: bytes) -> bytes:
    """Keeps a tenant's digests apart from all others'.

    Both fields are written as their length in bytes (little-endian uint32) and then themselves, so
    that no two pairs give the same bytes.
    """
    fields = (name.encode("utf-8"), secret)
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def policy_for(
    config: CacheConfig, *, num_blocks: int, num_pool_blocks: int, block_bytes: int, chunk: int
) -> CachePolicy:
    """What the options mean for one tenant.

    Args:
        num_blocks: the tenant's.
        num_pool_blocks: of all tenants, without the null block.
        block_bytes: device memory of a block.
        chunk: tokens of the grid of deterministic mode.
    """
    low, high = _watermarks(config, num_pool_blocks, block_bytes)
    return CachePolicy(
        is_enabled=config.enable,
        is_auto=config.auto_detect,
        eviction=config.eviction_policy,
        low_watermark_blocks=low * num_blocks // num_pool_blocks,
        high_watermark_blocks=high * num_blocks // num_pool_blocks,
        max_prefix_tokens=config.max_prefix_length,
        max_leaves=config.max_cached_prefixes,
        max_kept_blocks=num_blocks * config.max_kept_percent // 100,
        grid_tokens=chunk if config.deterministic else 1,
    )


def _watermarks(config: CacheConfig, num_blocks: int, block_bytes: int) -> tuple[int, int]:
    """Low and high watermark of the whole pool [blocks]; high is never below low."""
    low = min(_blocks_of(config.low_watermark_mb, block_bytes), num_blocks // _MAX_LOW_PART)
    if config.high_watermark_mb is None:
        return low, low
    asked = _blocks_of(config.high_watermark_mb, block_bytes)
    return low, max(low, min(asked, num_blocks // _MAX_HIGH_PART))


def _blocks_of(mib: float, block_bytes: int) -> int:
    return int(mib * _MIB) // block_bytes
