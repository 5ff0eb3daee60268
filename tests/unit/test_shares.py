"""The pool in parts, and the options as each part understands them: exact blocks at the edges."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_cache.cache.hashing import root_digest
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.config import CacheConfig, TenantConfig
from runtime_cache.errors import ConfigError
from runtime_cache.ids import TenantName
from runtime_cache.shares import policy_for, share_out, tenant_salt

MIB = 1024**2


SALTS = {TenantName(name): name.encode() * 2 for name in ("a", "b")}


def tenant(name: str, share_percent: float) -> TenantConfig:
    return TenantConfig(name, f"ipc://{name}", share_percent)


def blocks_of(tenants: list[TenantConfig], num_blocks: int) -> dict[str, tuple[int, int]]:
    return {
        s.tenant: (s.blocks.start, s.blocks.stop) for s in share_out(tenants, num_blocks, SALTS)
    }


# --- parts ----------------------------------------------------------------------------------------


def test_without_tenants_the_default_has_all_but_the_null_block() -> None:
    assert blocks_of([], 2) == {"": (1, 2)}
    assert blocks_of([], 101) == {"": (1, 101)}


def test_parts_lie_side_by_side_and_the_default_has_the_rest() -> None:
    found = blocks_of([tenant("a", 30), tenant("b", 12.5)], 101)
    assert found == {"": (1, 59), "a": (59, 89), "b": (89, 101)}


@pytest.mark.parametrize(("num_blocks", "size"), [(9, 2), (12, 2), (13, 3), (14, 3)])
def test_a_part_is_rounded_down(num_blocks: int, size: int) -> None:
    first, last = blocks_of([tenant("a", 25)], num_blocks)["a"]
    assert (last - first, last) == (size, num_blocks)


@pytest.mark.parametrize(("num_blocks", "is_enough"), [(20, False), (21, True), (22, True)])
def test_a_part_has_at_least_two_blocks(num_blocks: int, is_enough: bool) -> None:
    if is_enough:
        assert blocks_of([tenant("a", 10)], num_blocks)["a"][1] == num_blocks
        return
    with pytest.raises(ConfigError) as caught:
        share_out([tenant("a", 10), tenant("b", 9.5)], num_blocks, SALTS)
    assert str(caught.value).splitlines() == [
        "of 19 blocks every tenant needs at least 2, which is 10.53 percent:",
        "  - tenant 'a' gets 1 with 10 percent",
        "  - tenant 'b' gets 1 with 9.5 percent",
    ]


def test_the_default_tenant_has_at_least_two_blocks_too() -> None:
    assert blocks_of([tenant("a", 80)], 11) == {"": (1, 3), "a": (3, 11)}
    with pytest.raises(ConfigError, match="the default tenant gets 1"):
        share_out([tenant("a", 90)], 11, SALTS)


# --- salts ----------------------------------------------------------------------------------------


def test_the_default_tenant_has_no_salt() -> None:
    assert share_out([], 10, {})[0].salt == b""


def test_a_salt_is_name_and_secret_with_their_lengths() -> None:
    assert tenant_salt("ü", b"ab") == b"\x02\0\0\0\xc3\xbc\x02\0\0\0ab"
    (_, share) = share_out([tenant("a", 50)], 10, SALTS)
    assert share.salt == tenant_salt("a", b"aa")


def test_roots_of_tenants_never_meet() -> None:
    salts = [b""] + [tenant_salt(*fields) for fields in (("a", b""), ("b", b""), ("a", b"b"))]
    salts += [tenant_salt("ab", b""), tenant_salt("", b"ab")]
    roots = {root_digest(bundle_digest=b"x", block_size=4, tenant_salt=salt) for salt in salts}
    assert len(roots) == len(salts)


# --- options --------------------------------------------------------------------------------------


def policy(num_blocks: int = 80, num_pool_blocks: int = 80, **options: Any) -> CachePolicy:
    """Of blocks of a MiB, so that watermarks in MiB are watermarks in blocks."""
    config = CacheConfig(**options)
    return policy_for(
        config, num_blocks=num_blocks, num_pool_blocks=num_pool_blocks, block_bytes=MIB, chunk=32
    )


@pytest.mark.parametrize(
    ("asked_mb", "blocks"), [(0, 0), (0.99, 0), (1, 1), (9, 9), (10, 10), (10.5, 10), (11, 10)]
)
def test_the_low_watermark_takes_an_eighth_of_the_pool_at_the_most(
    asked_mb: float, blocks: int
) -> None:
    found = policy(low_watermark_mb=asked_mb)
    assert (found.low_watermark_blocks, found.high_watermark_blocks) == (blocks, blocks)


@pytest.mark.parametrize(
    ("low_mb", "high_mb", "low", "high"),
    [
        (5, 5, 5, 5),
        (5, 6, 5, 6),
        (5, 19, 5, 19),
        (5, 20, 5, 20),
        (5, 21, 5, 20),  # a quarter of the pool at the most
        (0, 1, 0, 1),
        (300, 300, 10, 20),  # what was asked for counts, not what is left of the low one
        (300, None, 10, 10),
    ],
)
def test_the_high_watermark(low_mb: float, high_mb: float | None, low: int, high: int) -> None:
    found = policy(low_watermark_mb=low_mb, high_watermark_mb=high_mb)
    assert (found.low_watermark_blocks, found.high_watermark_blocks) == (low, high)


def test_in_a_tiny_pool_both_watermarks_vanish() -> None:
    found = policy(3, 3, low_watermark_mb=300)
    assert (found.low_watermark_blocks, found.high_watermark_blocks) == (0, 0)
    found = policy(4, 4, low_watermark_mb=300, high_watermark_mb=300)
    assert (found.low_watermark_blocks, found.high_watermark_blocks) == (0, 1)


@pytest.mark.parametrize(("num_blocks", "low", "high"), [(80, 8, 16), (40, 4, 8), (39, 3, 7)])
def test_watermarks_are_scaled_to_the_share(num_blocks: int, low: int, high: int) -> None:
    found = policy(num_blocks, 80, low_watermark_mb=8, high_watermark_mb=16)
    assert (found.low_watermark_blocks, found.high_watermark_blocks) == (low, high)


@pytest.mark.parametrize(
    ("num_blocks", "percent", "kept"), [(80, 50, 40), (81, 50, 40), (80, 0, 0), (80, 100, 80)]
)
def test_kept_blocks_are_a_part_of_the_share(num_blocks: int, percent: int, kept: int) -> None:
    assert policy(num_blocks, max_kept_percent=percent).max_kept_blocks == kept


def test_the_other_options_are_taken_as_they_are() -> None:
    found = policy(
        enable=False,
        auto_detect=False,
        eviction_policy="slru",
        max_prefix_length=7,
        max_cached_prefixes=3,
        deterministic=True,
    )
    assert not found.is_enabled
    assert not found.is_auto
    assert (found.eviction, found.max_prefix_tokens, found.max_leaves) == ("slru", 7, 3)
    assert found.grid_tokens == 32


def test_the_defaults() -> None:
    found = policy()
    assert found.is_enabled
    assert found.is_auto
    assert (found.eviction, found.max_prefix_tokens, found.max_leaves) == ("lru", None, None)
    assert (found.grid_tokens, found.max_kept_blocks) == (1, 40)
