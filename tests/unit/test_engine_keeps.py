"""What is kept: registrations, pins and leases; and the operator's other questions.

Blocks hold four tokens. A pool of 24 blocks has 23 for use, of which 11 may be kept.
"""

from __future__ import annotations

import numpy as np
import pytest

from runtime_cache.cache.policy import CachePolicy
from runtime_cache.cache.results import CacheReport, Evicted
from runtime_cache.engine.commands import (
    FailRequest,
    ReportEvicted,
    ReportExplained,
    ReportPinned,
    ReportRefused,
    ReportReleased,
    ReportUnpinned,
)
from runtime_cache.engine.events import RequestArrived
from runtime_cache.engine.request import NewRequest, SamplingParams
from runtime_cache.ids import PrefixId, RequestId
from tests.support.caching import digests_of
from tests.support.engine_rig import EngineRig, expected_answer

NINE = list(range(9))


def rig_with(prompt: list[int]) -> EngineRig:
    """An idle rig that has `prompt` in its cache."""
    rig = EngineRig()
    rig.arrive(prompt, max_tokens=1)
    rig.run()
    return rig


def kept(rig: EngineRig) -> list[tuple[str, int, int]]:
    """Kind, tokens and blocks of everything kept."""
    return [(keep.kind, keep.num_tokens, len(keep.blocks)) for keep in rig.cache.keeps]


# -- registrations ------------------------------------------------------------------------------


def test_a_prefix_is_computed_once_and_held_to_its_last_token() -> None:
    rig = EngineRig()
    request_id = rig.register("p", range(10))
    assert rig.rows() == [(1, 0, 8)]
    rig.step_done()
    assert rig.rows() == [(1, 8, 2)]
    rig.step_done()
    final = rig.finished(request_id)
    assert (final.reason, final.prefix_id, final.num_kept_blocks) == ("registered", "p", 3)
    assert (final.usage.prompt_tokens, final.usage.prefilled_tokens) == (10, 10)
    assert (rig.gauges(), kept(rig)) == ((3, 0, 20), [("registration", 10, 3)])
    assert rig.evict() == ReportEvicted(Evicted(0, 0, 3))
    second = rig.arrive([*range(10), 50], max_tokens=1)
    assert rig.rows() == [(second, 10, 1)]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_a_prefix_that_is_cached_needs_no_step(num_tokens: int) -> None:
    rig = rig_with(NINE)
    num_steps = len(rig.batches)
    rig.register("p", NINE[:num_tokens])
    final = rig.finished(2)
    assert (final.reason, final.usage.cached_tokens) == ("registered", num_tokens)
    assert final.usage.cache == CacheReport(num_tokens, "hit")
    assert len(rig.batches) == num_steps
    num_blocks = -(-num_tokens // 4)
    assert rig.gauges() == (num_blocks, 3 - num_blocks, 20)
    rig.evict()
    again = rig.arrive(NINE, max_tokens=1)
    rig.run()
    # What shares the kept block is kept with it: the block is not cut.
    assert rig.finished(again).usage.cached_tokens == min(4 * num_blocks, 8)


def test_a_prefix_shorter_than_a_block_is_kept() -> None:
    rig = EngineRig()
    rig.register("p", range(3))
    rig.run()
    assert (rig.gauges(), kept(rig)) == ((1, 0, 22), [("registration", 3, 1)])
    second = rig.arrive([0, 1, 2, 9, 9, 9], max_tokens=1)
    assert rig.rows() == [(second, 3, 3)]
    assert [copy.num_tokens for copy in rig.batches[-1].rows[0].copies] == [3]


def test_a_registration_again_under_another_name_costs_no_block() -> None:
    rig = EngineRig()
    for name in ("p", "q"):
        rig.register(name, range(10))
        rig.run()
    assert rig.pool.num_rows_written == 10
    assert rig.gauges() == (3, 0, 20)
    rig.release_prefix("p")
    assert rig.gauges() == (3, 0, 20)
    rig.release_prefix("q")
    assert rig.gauges() == (0, 3, 20)


def test_a_released_prefix_becomes_evictable() -> None:
    rig = EngineRig()
    rig.register("p", range(8))
    rig.run()
    assert rig.release_prefix("p") == ReportReleased(PrefixId("p"), is_known=True)
    assert rig.gauges() == (0, 2, 21)
    assert rig.release_prefix("p") == ReportReleased(PrefixId("p"), is_known=False)
    assert rig.evict(1) == ReportEvicted(Evicted(1, 0, 0))


def test_a_cancelled_registration_holds_nothing() -> None:
    rig = EngineRig()
    rig.register("p", range(8))
    rig.cancel(1)
    final = rig.finished(1)
    assert (final.reason, final.prefix_id) == ("cancelled", None)
    rig.step_done()
    assert (rig.gauges(), kept(rig)) == ((0, 2, 21), [])


@pytest.mark.parametrize(("num_tokens", "fits"), [(7, True), (8, True), (9, False)])
def test_a_prefix_may_fill_what_may_be_kept(num_tokens: int, fits: bool) -> None:
    rig = EngineRig(policy=CachePolicy(max_kept_blocks=2))
    rig.register("p", range(num_tokens))
    rig.run()
    if fits:
        assert rig.finished(1).reason == "registered"
    else:
        assert rig.failed(1).code == "too_long"
        assert rig.failed(1).message == (
            "the prefix takes 3 blocks; all that is kept together may take 2"
        )


def test_a_prefix_beyond_what_is_left_fails_and_can_be_tried_again() -> None:
    rig = EngineRig(policy=CachePolicy(max_kept_blocks=3))
    rig.register("p", range(8))
    rig.register("q", range(20, 28))
    rig.run()
    failure = rig.failed(2)
    assert (failure.code, failure.retryable) == ("capacity", True)
    assert failure.message == (
        "registrations, pins and leases: 1, blocks they hold: 2; "
        "neither number may exceed 3: give some up"
    )
    rig.release_prefix("p")
    rig.register("q", range(20, 28))
    assert rig.finished(3).reason == "registered"


def test_a_prefix_is_computed_as_far_as_it_may_be_kept() -> None:
    rig = EngineRig(policy=CachePolicy(max_prefix_tokens=6))
    rig.register("p", range(20))
    rig.run()
    assert rig.pool.num_rows_written == 6
    assert kept(rig) == [("registration", 6, 2)]


def test_only_registrations_are_kept_where_requests_leave_nothing() -> None:
    rig = EngineRig(policy=CachePolicy(is_auto=False))
    rig.arrive(range(20, 30), max_tokens=2)
    rig.run()
    assert rig.gauges() == (0, 0, 23)
    rig.register("p", range(10))
    rig.run()
    second = rig.arrive([*range(10), 50], max_tokens=2)
    rig.run()
    assert rig.finished(second).usage.cached_tokens == 10
    assert rig.gauges() == (3, 0, 20)


def test_a_registration_needs_a_name() -> None:
    rig = EngineRig()
    tokens = np.arange(8, dtype=np.int32)
    request = NewRequest(RequestId(9), tokens, SamplingParams(), kind="register")
    commands = rig.state.handle(RequestArrived(request, rig.now_s))
    assert commands == [
        FailRequest(RequestId(9), "invalid_request", "a registration needs a `prefix_id`", False)
    ]


def test_a_request_for_which_kept_prefixes_leave_no_room_fails() -> None:
    rig = EngineRig(num_blocks=7)  # six usable, three for prefixes
    rig.register("p", range(12))
    rig.run()
    stuck = rig.arrive(range(20, 36), max_tokens=1)
    failure = rig.failed(stuck)
    assert (failure.code, failure.retryable) == ("capacity", True)
    assert failure.message == (
        "4 blocks are needed, but registrations, pins and leases hold 3 of 6"
    )
    growing = rig.arrive(range(20, 30), max_tokens=9)
    rig.run()
    assert rig.failed(growing).code == "capacity"
    assert rig.token_ids[growing] == expected_answer(range(20, 30), 3)
    shared = rig.arrive([*range(12), 50], max_tokens=9)
    rig.run()
    assert rig.finished(shared).usage.completion_tokens == 9


# -- pins and leases ----------------------------------------------------------------------------


def test_a_pin_stays_until_it_is_unpinned() -> None:
    rig = rig_with(NINE)
    digest = digests_of(NINE)[1]
    answer = rig.pin(digest[:9])
    assert isinstance(answer, ReportPinned)
    assert (answer.keep.kind, answer.keep.digest, answer.keep.num_tokens) == ("pin", digest, 8)
    rig.tick(1e6)
    assert rig.evict() == ReportEvicted(Evicted(1, 0, 2))
    assert rig.unpin(digest[:9]) == ReportUnpinned(answer.keep)
    assert rig.gauges() == (0, 2, 21)


@pytest.mark.parametrize(("seconds", "is_kept"), [(4.0, True), (5.0, False), (6.0, False)])
def test_a_lease_ends_by_itself(seconds: float, is_kept: bool) -> None:
    rig = rig_with(NINE)
    answer = rig.pin(digests_of(NINE)[1], ttl_s=5.0)
    assert isinstance(answer, ReportPinned)
    assert (answer.keep.kind, answer.keep.expires_s) == ("lease", rig.now_s + 5.0)
    assert rig.state.next_deadline_s == rig.now_s + 5.0
    rig.tick(seconds)
    assert rig.gauges() == ((2, 1, 20) if is_kept else (0, 3, 20))
    assert (rig.state.next_deadline_s is None) == (not is_kept)


def test_a_lease_is_over_before_the_event_that_brings_its_end() -> None:
    rig = rig_with(NINE)
    digest = digests_of(NINE)[1]
    rig.pin(digest, ttl_s=5.0)
    rig.now_s += 5.0
    refused = rig.unpin(digest)
    assert isinstance(refused, ReportRefused)
    assert (refused.code, refused.retryable) == ("unknown_entry", False)


def test_the_next_of_deadlines_and_leases_is_waited_for() -> None:
    rig = rig_with(NINE)
    one, two = digests_of(NINE)
    rig.pin(one, ttl_s=9.0)
    rig.pin(two, ttl_s=7.0)
    rig.arrive(range(20, 30), max_tokens=20, deadline_s=rig.now_s + 8.0)
    assert rig.state.next_deadline_s == rig.now_s + 7.0
    rig.tick(7.0)
    assert rig.state.next_deadline_s == rig.now_s + 1.0
    rig.tick(1.0)
    assert rig.state.next_deadline_s == rig.now_s + 1.0
    rig.tick(1.0)
    assert rig.state.next_deadline_s is None


@pytest.mark.parametrize(
    ("digest", "code"), [("ff" * 32, "unknown_entry"), ("0123", "unknown_entry"), ("", "invalid")]
)
def test_a_digest_that_names_nothing_or_several_is_refused(digest: str, code: str) -> None:
    rig = rig_with(NINE)
    for answer in (rig.pin(digest), rig.evict(digest=digest)):
        assert isinstance(answer, ReportRefused)
        assert answer.code.startswith(code)
    assert rig.gauges() == (0, 3, 20)


def test_a_pin_beyond_what_may_be_kept_is_refused() -> None:
    rig = EngineRig(policy=CachePolicy(max_kept_blocks=1))
    rig.arrive(NINE, max_tokens=1)
    rig.run()
    one, two = digests_of(NINE)
    assert rig.pin(two) == ReportRefused(
        "capacity",
        "registrations, pins and leases: 0, blocks they hold: 0; "
        "neither number may exceed 1: give some up",
        retryable=True,
        retry_after_ms=10,
    )
    assert isinstance(rig.pin(one), ReportPinned)


def test_a_pin_of_a_running_request_outlives_it() -> None:
    rig = EngineRig()
    rig.arrive(NINE, max_tokens=5)
    rig.step_done()
    rig.step_done()
    assert isinstance(rig.pin(digests_of(NINE)[1]), ReportPinned)
    rig.run()
    assert rig.evict() == ReportEvicted(Evicted(2, 0, 2))


# -- other questions ----------------------------------------------------------------------------


def test_evictions_by_number_digest_and_age() -> None:
    rig = EngineRig()
    for start in (0, 20, 40):
        rig.arrive(range(start, start + 9), max_tokens=1)
        rig.run()  # two steps, so two seconds
    assert rig.evict(2) == ReportEvicted(Evicted(2, 0, 0))
    assert rig.evict(digest=digests_of(range(20, 29))[1]) == ReportEvicted(Evicted(3, 0, 0))
    assert rig.evict(idle_s=7.0) == ReportEvicted(Evicted(0, 0, 0))
    rig.tick(1.0)
    assert rig.evict(idle_s=5.0) == ReportEvicted(Evicted(1, 0, 0))
    assert rig.evict() == ReportEvicted(Evicted(3, 0, 0))


def test_explain_says_what_a_request_then_reports() -> None:
    rig = rig_with(NINE)
    prompt = [*NINE[:6], 50, 51]
    answer = rig.explain(prompt)
    assert answer == ReportExplained(CacheReport(6, "diverged", 6, 9), prompt_tokens=8)
    before = rig.state.snapshot()
    request_id = rig.arrive(prompt, max_tokens=1)
    rig.run()
    assert rig.finished(request_id).usage.cache == answer.report
    assert before.requests_by_reason == {"cold": 1}
    assert rig.state.snapshot().requests_by_reason == {"cold": 1, "diverged": 1}


def test_an_empty_prompt_is_not_explained() -> None:
    assert EngineRig().explain([]) == ReportRefused("invalid_request", "the prompt is empty", False)
