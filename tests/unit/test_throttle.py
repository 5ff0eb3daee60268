"""What strangers can make happen is told so often and no more, and counted."""

from __future__ import annotations

from runtime_cache.throttle import Throttle


def test_the_rest_of_a_period_is_counted() -> None:
    throttle = Throttle(max_told=2, period_s=10.0)
    assert [throttle.take("a", 100.0 + n) for n in range(5)] == [True, True, False, False, False]
    assert (throttle.take("a", 109.9), throttle.left_out(109.9)) == (False, {})
    assert throttle.left_out(110.0) == {"a": 4}
    assert throttle.left_out(110.0) == {}
    assert [throttle.take("a", 110.0) for _ in range(3)] == [True, True, False]


def test_what_was_left_out_is_not_forgotten_with_the_next_period() -> None:
    throttle = Throttle(max_told=1, period_s=10.0)
    assert [throttle.take("a", at_s) for at_s in (0.0, 0.0, 10.0, 10.0)] == [True, False] * 2
    assert throttle.left_out(20.0) == {"a": 2}


def test_kinds_do_not_share() -> None:
    throttle = Throttle(max_told=1, period_s=10.0)
    assert [throttle.take(kind, 0.0) for kind in "abab"] == [True, True, False, False]
    assert throttle.take("c", 5.0)
    assert not throttle.take("c", 5.0)
    assert throttle.left_out(10.0) == {"a": 1, "b": 1}
    assert throttle.left_out(15.0) == {"c": 1}


def test_a_quiet_period_has_left_out_nothing() -> None:
    throttle = Throttle(max_told=1, period_s=10.0)
    assert all(throttle.take("a", at_s) for at_s in (0.0, 20.0, 40.0))
    assert throttle.left_out(60.0) == {}


def test_at_the_end_every_period_is_over() -> None:
    throttle = Throttle(max_told=1, period_s=10.0)
    assert [throttle.take("a", 0.0) for _ in range(3)] == [True, False, False]
    assert (throttle.left_out(), throttle.left_out()) == ({"a": 2}, {})
