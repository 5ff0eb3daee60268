"""A cache whose invariants are checked when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime_cache.cache import invariants
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import CachePolicy
from tests.support.caching import MakeCache, make_manager


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    """Makes caches of so many blocks, block 0 included, with these settings."""
    made: list[CacheManager] = []

    def make(num_blocks: int, **settings: Any) -> CacheManager:
        made.append(make_manager(num_blocks, policy=CachePolicy(**settings)))
        return made[-1]

    yield make
    for cache in made:
        invariants.check(cache)
