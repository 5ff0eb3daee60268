"""What strangers can make happen is told so often and no more, and counted."""

from __future__ import annotations

from runtime_cache.throttle import Throttle


def test_the_rest_of_a_period_is_counted() -> None:
    throttle = Throttle(max_told=2, period_s=10.0)
    assert [throttle.take("a", 100.0 + n) for n in range(5)] == [0, 0, None, None, None]
    assert throttle.take("a", 109.9) is None
    assert throttle.take("a", 110.0) == 4
    assert [throttle.take("a", 110.0) for _ in range(2)] == [0, None]


def test_kinds_do_not_share() -> None:
    throttle = Throttle(max_told=1, period_s=10.0)
    assert [throttle.take(kind, 0.0) for kind in "abab"] == [0, 0, None, None]


def test_a_quiet_period_has_left_out_nothing() -> None:
    throttle = Throttle(max_told=1, period_s=10.0)
    assert [throttle.take("a", at_s) for at_s in (0.0, 20.0, 40.0)] == [0, 0, 0]
