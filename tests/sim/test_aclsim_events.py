"""Events: three questions of different polarity, resets, limits, the time."""

from __future__ import annotations

import threading

import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.process import this_process
from runtime_cache.aclsim.rt import events as rt_events
from runtime_cache.aclsim.rt import streams as rt_streams
from tests.support.aclsim import ok

pytestmark = pytest.mark.usefixtures("fresh_device")

SYNC, TIME_LINE = 1, 8


@pytest.fixture
def other() -> int:
    return int(ok(acl.rt.create_stream()))


def test_the_three_questions_do_not_agree_on_what_zero_means(stream: int, other: int) -> None:
    event = ok(acl.rt.create_event())
    with inspect.hold(stream):
        ok(acl.rt.record_event(event, stream))
        ok(acl.rt.stream_wait_event(other, event))
        assert acl.rt.query_event(event) == (1, 0)  # not ready
        assert acl.rt.query_event_wait_status(event) == (1, 0)  # not ready
        assert acl.rt.query_event_status(event) == (0, 0)  # not ready
    ok(acl.rt.synchronize_stream(other))
    assert acl.rt.query_event(event) == (0, 0)  # complete
    assert acl.rt.query_event_wait_status(event) == (0, 0)  # complete
    assert acl.rt.query_event_status(event) == (1, 0)  # complete


def test_the_wait_status_is_about_waits_not_about_the_recording(stream: int) -> None:
    event = ok(acl.rt.create_event())
    with inspect.hold(stream):
        ok(acl.rt.record_event(event, stream))
        assert acl.rt.query_event(event) == (1, 0)
        assert acl.rt.query_event_wait_status(event) == (0, 0)  # nothing waits


def test_a_reset_event_is_as_if_never_recorded(stream: int) -> None:
    event = ok(acl.rt.create_event_with_flag(SYNC))
    ok(acl.rt.record_event(event, stream))
    ok(acl.rt.synchronize_event(event))
    with inspect.hold(stream):
        ok(acl.rt.reset_event(event, stream))
        assert acl.rt.query_event_status(event) == (1, 0)  # the reset has not had its turn
    ok(acl.rt.synchronize_stream(stream))
    assert acl.rt.query_event_status(event) == (0, 0)
    ok(acl.rt.record_event(event, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert acl.rt.query_event_status(event) == (1, 0)


def test_a_recording_behind_a_reset_stays(stream: int) -> None:
    event = ok(acl.rt.create_event_with_flag(SYNC))
    ok(acl.rt.record_event(event, stream))
    with inspect.hold(stream):
        ok(acl.rt.reset_event(event, stream))
        ok(acl.rt.record_event(event, stream))
    ok(acl.rt.synchronize_stream(stream))
    assert acl.rt.query_event_status(event) == (1, 0)


def test_an_event_without_sync_is_not_waited_for_and_not_reset(stream: int) -> None:
    event = ok(acl.rt.create_event_with_flag(TIME_LINE))
    assert acl.rt.stream_wait_event(stream, event) == 107000
    assert acl.rt.reset_event(event, stream) == 107000
    assert acl.rt.record_event(event, stream) == 0


def test_the_newer_kind_is_recorded_again_and_not_for_the_older_calls(stream: int) -> None:
    event = ok(acl.rt.create_event_ex_with_flag(SYNC))
    assert acl.rt.query_event_status(event) == (1, 0)  # complete before the first record
    assert acl.rt.query_event(event) == (0, 107000)
    assert acl.rt.query_event_wait_status(event) == (0, 107000)
    assert acl.rt.reset_event(event, stream) == 107000
    for _ in range(2):
        with inspect.hold(stream):
            ok(acl.rt.record_event(event, stream))
            assert acl.rt.query_event_status(event) == (0, 0)
        ok(acl.rt.synchronize_event(event))
        assert acl.rt.query_event_status(event) == (1, 0)


def test_timestamps_are_microseconds_that_agree_with_the_elapsed_time(stream: int) -> None:
    start, end = ok(acl.rt.create_event()), ok(acl.rt.create_event())
    assert acl.rt.event_get_timestamp(start) == (0, 107000)
    ok(acl.rt.record_event(start, stream))
    ok(acl.rt.record_event(end, stream))
    ok(acl.rt.synchronize_stream(stream))
    difference = ok(acl.rt.event_get_timestamp(end)) - ok(acl.rt.event_get_timestamp(start))
    elapsed_us = ok(acl.rt.event_elapsed_time(start, end)) * 1000
    assert elapsed_us - 1 <= difference <= elapsed_us + 1


def test_events_have_ids_of_their_own() -> None:
    events = [ok(acl.rt.create_event()) for _ in range(3)]
    assert [ok(acl.rt.get_event_id(event)) for event in events] == [0, 1, 2]


def test_a_wait_with_a_limit_fails_at_its_turn_and_the_work_behind_it_goes_on(
    stream: int, other: int
) -> None:
    event = ok(acl.rt.create_event())
    ok(acl.rt.set_op_wait_timeout(1))
    with inspect.hold(stream):
        ok(acl.rt.record_event(event, stream))
        ok(acl.rt.stream_wait_event(other, event))
        assert acl.rt.synchronize_stream(other) == 107019
    ok(acl.rt.set_op_wait_timeout(0))


def test_waits_that_are_over_take_no_memory(stream: int, other: int) -> None:
    event = ok(acl.rt.create_event())
    for _ in range(100):
        ok(acl.rt.record_event(event, stream))
        ok(acl.rt.stream_wait_event(other, event))
        ok(acl.rt.synchronize_stream(other))
    assert len(this_process().events.get(event)._waits) == 1


def test_a_device_has_65536_events() -> None:
    limit = rt_events.MAX_EVENTS
    assert limit == 65536
    assert acl.rt.get_event_avail_num() == (limit, 0)
    events = [ok(acl.rt.create_event()) for _ in range(limit)]
    assert acl.rt.get_event_avail_num() == (0, 0)
    assert acl.rt.create_event() == (0, 207007)
    assert acl.rt.create_event_ex_with_flag(SYNC) == (0, 207007)
    ok(acl.rt.destroy_event(events[0]))
    assert acl.rt.create_event()[1] == 0


def test_a_device_has_1984_streams_default_ones_included(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rt_streams.MAX_STREAMS == 1984
    assert acl.rt.get_stream_available_num() == (1983, 0)
    monkeypatch.setattr(rt_streams, "MAX_STREAMS", 4)  # each has a thread here
    own = [ok(acl.rt.create_stream()) for _ in range(3)]
    assert acl.rt.get_stream_available_num() == (0, 0)
    assert acl.rt.create_stream() == (0, 207008)
    assert acl.rt.create_stream_with_config(0, 1) == (0, 207008)
    ok(acl.rt.destroy_stream(own[0]))
    assert acl.rt.create_stream()[1] == 0


def test_waiting_for_an_event_lets_other_threads_run(stream: int) -> None:
    event, context = ok(acl.rt.create_event()), ok(acl.rt.get_context())
    codes: list[int] = []

    def wait() -> None:
        codes.append(acl.rt.set_context(context))
        codes.append(acl.rt.synchronize_event_with_timeout(event, -1))

    with inspect.hold(stream):
        ok(acl.rt.record_event(event, stream))
        waiter = threading.Thread(target=wait)
        waiter.start()
    waiter.join()
    assert codes == [0, 0]
