"""The sentence about the cache, for every reason there is."""

from __future__ import annotations

from typing import get_args

import pytest

from ipc.messages import CacheReport
from ipc.reasons import sentence
from runtime_cache.cache.results import CacheReason


@pytest.mark.parametrize(
    ("report", "cached", "why"),
    [
        (CacheReport("hit"), 5119, "that is all that can be reused"),
        (CacheReport("cold"), 0, "nothing cached begins like it"),
        (CacheReport("evicted", 64, 64), 64, "what comes next was cached and has been evicted"),
        (
            CacheReport("diverged", 37, 812),
            37,
            "diverged at token 37; the nearest cached prefix has 812 tokens",
        ),
        (CacheReport("diverged"), 37, "the nearest cached prefix goes on differently"),
        (
            CacheReport("extended", 500, 500),
            500,
            "the nearest cached prefix ends after 500 tokens, the prompt goes on",
        ),
        (CacheReport("extended"), 500, "the nearest cached prefix ends, the prompt goes on"),
        (CacheReport("too_short"), 0, "nothing of so short a prompt can be reused"),
        (CacheReport("limit"), 9, "longer prefixes are not kept (cache.max_prefix_length)"),
        (
            CacheReport("disabled", detail="the request says so (use_cache)"),
            0,
            "caching was disabled because the request says so (use_cache)",
        ),
        (CacheReport("disabled"), 0, "caching was disabled"),
        (CacheReport("moon"), 0, "moon"),
        (CacheReport("moon", detail="it is full"), 0, "moon because it is full"),
    ],
)
def test_every_reason_in_words(report: CacheReport, cached: int, why: str) -> None:
    said = sentence(report, cached_tokens=cached, prompt_tokens=5120)
    assert said == f"cached {cached} of 5120 tokens: {why}"


@pytest.mark.parametrize("reason", get_args(CacheReason))
def test_every_reason_of_the_cache_has_words(reason: str) -> None:
    said = sentence(CacheReport(reason), cached_tokens=0, prompt_tokens=9)
    assert said != f"cached 0 of 9 tokens: {reason}"
