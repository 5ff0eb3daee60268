"""Leases at their limits, looked at twice."""

from __future__ import annotations

from runtime_cache.sessions import GRACE_S, Sessions
from tests.support.desk import ALICE, BOB


def open_sessions(**leases_s: float) -> Sessions:
    sessions = Sessions()
    for name, lease_s in leases_s.items():
        sessions.open({"alice": ALICE, "bob": BOB}[name], lease_s, 100.0)
    return sessions


def test_a_lease_ends_when_it_has_run_out_at_two_looks() -> None:
    sessions = open_sessions(alice=10.0)
    assert sessions.take_expired(109.999) == []
    assert sessions.take_expired(110.0) == []
    assert len(sessions) == 1
    assert sessions.take_expired(110.25) == [ALICE]
    assert sessions.take_expired(110.5) == []
    assert len(sessions) == 0


def test_a_message_between_the_looks_renews() -> None:
    sessions = open_sessions(alice=10.0)
    assert sessions.take_expired(110.0) == []
    sessions.renew(ALICE, 110.1)
    assert sessions.take_expired(110.25) == []
    assert sessions.take_expired(120.1) == []
    assert sessions.take_expired(120.35) == [ALICE]


def test_a_look_that_comes_late_does_not_count() -> None:
    sessions = open_sessions(alice=10.0)
    assert sessions.take_expired(110.0) == []
    assert sessions.take_expired(115.0, late_s=GRACE_S + 0.001) == []
    sessions.renew(ALICE, 115.0)  # what had come meanwhile is read
    assert sessions.take_expired(115.25) == []
    assert sessions.take_expired(125.0) == []
    assert sessions.take_expired(125.25, late_s=GRACE_S) == [ALICE]


def test_each_lease_is_its_own() -> None:
    sessions = open_sessions(alice=10.0, bob=20.0)
    sessions.take_expired(110.0)
    assert sessions.take_expired(110.25) == [ALICE]
    sessions.end(BOB)
    assert len(sessions) == 0


def test_opened_again_the_new_time_counts_from_now_on() -> None:
    sessions = open_sessions(alice=10.0)
    sessions.open(ALICE, 1.0, 105.0)
    sessions.take_expired(106.0)
    assert sessions.take_expired(106.25) == [ALICE]


def test_who_has_no_session_has_none_to_renew_or_end() -> None:
    sessions = open_sessions()
    sessions.renew(ALICE, 1.0)
    sessions.end(ALICE)
    assert (len(sessions), sessions.next_look_s(1.0)) == (0, None)


def test_when_to_look_again() -> None:
    sessions = open_sessions(alice=10.0, bob=20.0)
    assert sessions.next_look_s(100.0) == 110.0
    assert sessions.next_look_s(110.0) == 110.0 + GRACE_S
