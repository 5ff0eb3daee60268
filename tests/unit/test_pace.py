"""When a refused client should come back."""

from __future__ import annotations

import pytest

from runtime_cache.engine.pace import Pace


def test_nothing_known_is_a_second() -> None:
    assert Pace().retry_after_ms(5.0) == 1000


@pytest.mark.parametrize(
    ("ends_s", "now_s", "expected_ms"),
    [
        ([10.0], 10.5, 500),
        ([10.0, 11.0], 12.0, 1000),
        ([10.0, 11.0], 30.0, 10_000),  # nothing has ended for long: the pace drops
        ([10.0, 10.0], 10.0, 10),
        ([10.0], 10.010, 10),
        ([10.0], 10.011, 11),
        ([10.0], 70.0, 60_000),
        ([10.0], 71.0, 60_000),
    ],
)
def test_the_mean_time_between_ends(ends_s: list[float], now_s: float, expected_ms: int) -> None:
    pace = Pace()
    for end_s in ends_s:
        pace.note_end(end_s)
    assert pace.retry_after_ms(now_s) == expected_ms


def test_only_the_last_ends_count() -> None:
    pace = Pace()
    pace.note_end(0.0)
    for number in range(32):
        pace.note_end(1000.0 + number)
    assert pace.retry_after_ms(1032.0) == 1000
