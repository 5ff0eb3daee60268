"""Quotas: exact at the edges, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.errors import OverQuota
from runtime_cache.quota import Quota, Quotas


def quotas(**limits: int) -> Quotas:
    return Quotas({"a": Quota(**limits)}.get)  # type: ignore[arg-type]


def refused(quotas: Quotas, now_s: float) -> int | None:
    """When to try again [milliseconds]."""
    with pytest.raises(OverQuota) as caught:
        quotas.take("a", now_s)
    assert caught.value.code == "quota"
    assert caught.value.retryable
    return caught.value.retry_after_ms


def test_without_limits_everything_is_taken() -> None:
    free = quotas()
    for _ in range(1000):
        free.take("a", 0.0)
        free.spend("a", 10**9, 0.0)
    for _ in range(1000):
        free.give_back("a")


def test_unfinished_requests_are_counted() -> None:
    two = quotas(max_requests=2)
    two.take("a", 0.0)
    two.take("a", 0.0)
    assert refused(two, 0.0) == 1000
    two.give_back("a")
    two.take("a", 0.0)
    refused(two, 9e9)
    assert two.num_refused == 2


def test_a_minutes_worth_may_be_used_at_once_and_debts_are_paid() -> None:
    sixty = quotas(tokens_per_minute=60)
    sixty.take("a", 0.0)
    sixty.spend("a", 59, 0.0)
    sixty.take("a", 0.0)  # one is left
    sixty.spend("a", 11, 0.0)  # ten more than there are
    assert refused(sixty, 0.0) == 11_000
    assert refused(sixty, 10.0) == 1000
    sixty.take("a", 10.5)


def test_no_more_than_a_minutes_worth_is_saved() -> None:
    sixty = quotas(tokens_per_minute=60)
    sixty.take("a", 0.0)
    sixty.spend("a", 60, 3600.0)
    refused(sixty, 3600.0)


def test_a_reload_changes_the_limit_and_keeps_what_was_used() -> None:
    limit = Quota(tokens_per_minute=100)
    changing = Quotas(lambda name: limit)
    changing.take("a", 0.0)
    changing.spend("a", 30, 0.0)
    limit = Quota(tokens_per_minute=10)
    changing.take("a", 0.0)
    changing.spend("a", 10, 0.0)
    with pytest.raises(OverQuota):
        changing.take("a", 0.0)
    limit = Quota()
    changing.take("a", 0.0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    sixty = quotas(tokens_per_minute=60)
    sixty.take("a", 100.0)
    sixty.spend("a", 60, 100.0)
    refused(sixty, 0.0)


@given(
    per_minute=st.integers(1, 1000),
    uses=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=40),
)
def test_over_time_no_key_gets_more_than_its_rate_and_one_request(
    per_minute: int, uses: list[tuple[float, int]]
) -> None:
    bucket = quotas(tokens_per_minute=per_minute)
    now_s, used, largest = 0.0, 0, 0
    for wait_s, num_tokens in uses:
        now_s += wait_s
        try:
            bucket.take("a", now_s)
        except OverQuota as error:
            now_s += (error.retry_after_ms or 0) / 1000
            bucket.take("a", now_s)  # the promise holds
            bucket.give_back("a")
            continue
        bucket.spend("a", num_tokens, now_s)
        bucket.give_back("a")
        used, largest = used + num_tokens, max(largest, num_tokens)
        assert used <= per_minute * (1 + now_s / 60) + largest
