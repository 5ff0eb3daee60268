"""Deadlines at their limit, and the heap that forgets the ended."""

from __future__ import annotations

import pytest

from runtime_cache.engine.deadlines import Deadlines
from runtime_cache.ids import RequestId

ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)


def three_deadlines() -> Deadlines:
    deadlines = Deadlines()
    for request_id, deadline_s in ((ONE, 30.0), (TWO, 10.0), (THREE, 20.0)):
        deadlines.add(request_id, deadline_s)
    return deadlines


@pytest.mark.parametrize(
    ("now_s", "gone"), [(9.9, []), (10.0, [TWO]), (20.0, [TWO, THREE]), (99.0, [TWO, THREE, ONE])]
)
def test_expired_up_to_and_with_now_earliest_first(now_s: float, gone: list[RequestId]) -> None:
    deadlines = three_deadlines()
    assert deadlines.expired(now_s) == gone
    assert deadlines.expired(now_s) == []
    assert len(deadlines) == 3 - len(gone)


def test_the_next_deadline_is_of_an_unfinished_request() -> None:
    deadlines = three_deadlines()
    assert deadlines.next_s == 10.0
    deadlines.discard(TWO)
    assert deadlines.next_s == 20.0
    deadlines.discard(ONE)
    deadlines.discard(THREE)
    assert deadlines.next_s is None


def test_a_request_without_deadline_can_be_discarded() -> None:
    deadlines = three_deadlines()
    deadlines.discard(RequestId(9))
    assert len(deadlines) == 3


def test_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    deadlines.add(RequestId(0), 0.5)
    for number in range(1, 1000):
        deadlines.add(RequestId(number), 1000.0 + number)
        deadlines.discard(RequestId(number))
    assert len(deadlines._heap) <= 19
    assert deadlines.expired(0.5) == [RequestId(0)]
    assert deadlines.next_s is None
