"""What stats warn of, one step to either side of each threshold."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_cache.advice import CacheFigures, cache_warnings, memory_warning
from runtime_cache.cache.results import CacheCounters

#: A cache of 100 blocks that was turned over once, mostly by what nobody asked for again.
UNSUITED = {
    "evicted_blocks": 100,
    "evicted_unused_blocks": 51,
    "queried_tokens": 1000,
    "hit_tokens": 99,
}


def warnings(
    tenant: str = "",
    *,
    num_kept_blocks: int = 0,
    num_keeps: int = 0,
    max_kept_blocks: int = 50,
    **counters: int,
) -> list[str]:
    figures = CacheFigures(
        tenant=tenant,
        counters=CacheCounters(**counters),  # type: ignore[arg-type]
        num_blocks=100,
        num_kept_blocks=num_kept_blocks,
        num_keeps=num_keeps,
        max_kept_blocks=max_kept_blocks,
    )
    return list(cache_warnings(figures))


def test_nothing_is_said_of_a_new_cache() -> None:
    assert warnings() == []


def test_a_workload_that_caching_does_not_suit() -> None:
    assert warnings(**UNSUITED) == [
        "caching does not suit this workload: 51 of 100 evicted blocks were never reused, 99 of "
        "1000 prompt tokens were cached; `rtcache-admin explain` tells why a prompt is not, "
        "docs/cache.md what helps"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"evicted_blocks": 99, "evicted_unused_blocks": 99},  # not turned over yet
        {"evicted_unused_blocks": 50},  # half of them were reused
        {"hit_tokens": 100},  # a tenth of the tokens were hits
    ],
)
def test_short_of_any_threshold_it_may_suit(change: dict[str, int]) -> None:
    assert warnings(**(UNSUITED | change)) == []


@pytest.mark.parametrize(
    ("blocks", "keeps", "most", "is_said"),
    [
        (9, 1, 10, False),
        (10, 1, 10, True),
        (45, 1, 50, False),
        (46, 1, 50, True),
        (0, 46, 50, True),
        (0, 0, 0, False),
    ],
)
def test_keeps_near_their_limit(blocks: int, keeps: int, most: int, is_said: bool) -> None:
    found = warnings(num_kept_blocks=blocks, num_keeps=keeps, max_kept_blocks=most)
    assert bool(found) == is_said


@pytest.mark.parametrize(("num_blocks", "is_said"), [(0, False), (1, True)])
def test_damaged_blocks(num_blocks: int, is_said: bool) -> None:
    found = warnings("alice", damaged_blocks=num_blocks)
    assert bool(found) == is_said
    assert all(text.startswith("tenant 'alice': 1 cached blocks were dropped") for text in found)


def test_a_tenant_is_named() -> None:
    both: dict[str, Any] = UNSUITED | {"num_kept_blocks": 50, "num_keeps": 3}
    found = warnings("alice", **both)
    assert [text.partition(": ")[0] for text in found] == ["tenant 'alice'"] * 2
    assert found[1] == (
        "tenant 'alice': registrations, pins and leases: 3, blocks they hold: 50; neither number "
        "may exceed 50: release some, or raise cache.max_kept_percent"
    )


def test_low_memory_in_words() -> None:
    assert memory_warning(99 * 1024**2 + 5, 256 * 1024**2) == (
        "only 99 MiB of device memory are free, less than device.low_memory_mb = 256: the KV pool "
        "is not what grows, another process may be"
    )
