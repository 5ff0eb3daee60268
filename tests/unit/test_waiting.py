"""Who is admitted next: the longest cached prefix, within a bound on everybody's wait.

The engines here run one request at a time, so that the order of the answers is that of admission.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_cache.engine.limits import EngineLimits
from tests.support.engine_rig import EngineRig, limits

#: Sixteen tokens, four blocks.
LONG = list(range(16))


def one_at_a_time(*, max_overtakes: int = 32, match_window: int = 64) -> EngineLimits:
    return limits(max_running=1, max_overtakes=max_overtakes, match_window=match_window)


def busy_rig(config: EngineLimits, *, tenants: tuple[str, ...] = ("",)) -> EngineRig:
    """A rig that has `LONG` in each tenant's cache, and is at work."""
    rig = EngineRig(num_blocks=1 + 60 * len(tenants), tenants=tenants, config=config)
    for tenant in tenants:
        rig.arrive(LONG, max_tokens=1, tenant=tenant)
        rig.run()
    rig.arrive([60, 60, 60], max_tokens=1, tenant=tenants[0])
    return rig


def order(rig: EngineRig) -> list[int]:
    """The requests in the order in which they end from now on."""
    before = len(rig.finals)
    rig.run()
    return [int(request_id) for request_id in rig.finals][before:]


def with_prefix(num_tokens: int, token: int) -> list[int]:
    """A prompt with so many tokens in common with `LONG`."""
    return [*LONG[:num_tokens], 50 + token, 50, 50]


def test_the_longest_cached_prefix_goes_first_and_ties_by_arrival() -> None:
    rig = busy_rig(one_at_a_time())
    lengths = [0, 8, 4, 12, 8, 0]
    ids = [rig.arrive(with_prefix(n, i), max_tokens=1) for i, n in enumerate(lengths)]
    # The request at work ends first.
    assert order(rig) == [2, ids[3], ids[1], ids[4], ids[2], ids[0], ids[5]]


def test_whole_blocks_count() -> None:
    rig = busy_rig(one_at_a_time())
    ids = [rig.arrive(with_prefix(n, i), max_tokens=1) for i, n in enumerate([0, 3, 7, 4])]
    assert order(rig) == [2, ids[2], ids[3], ids[0], ids[1]]


def test_who_does_not_use_the_cache_is_not_preferred() -> None:
    rig = busy_rig(one_at_a_time())
    plain = rig.arrive([50], max_tokens=1)
    rig.arrive(LONG, max_tokens=1, use_cache=False)
    assert order(rig)[1] == plain


@pytest.mark.parametrize(("match_window", "is_seen"), [(2, False), (3, True), (4, True)])
def test_only_the_window_is_searched(match_window: int, is_seen: bool) -> None:
    rig = busy_rig(one_at_a_time(match_window=match_window))
    first, _, third = (rig.arrive(with_prefix(n, n), max_tokens=1) for n in (0, 0, 8))
    assert order(rig)[1] == (third if is_seen else first)


@pytest.mark.parametrize("max_overtakes", [0, 1, 2, 5])
def test_a_request_is_overtaken_so_often_and_not_once_more(max_overtakes: int) -> None:
    rig = busy_rig(one_at_a_time(max_overtakes=max_overtakes))
    slow = rig.arrive([50, 51], max_tokens=1)
    for token in range(max_overtakes + 3):
        rig.arrive(with_prefix(8, token), max_tokens=1)
    assert order(rig).index(slow) == 1 + max_overtakes


def test_a_request_that_waited_enough_still_lets_older_ones_pass() -> None:
    rig = busy_rig(one_at_a_time(max_overtakes=1))
    old = rig.arrive(with_prefix(4, 0), max_tokens=1)
    slow = rig.arrive([50, 51], max_tokens=1)
    fast = [rig.arrive(with_prefix(8, token), max_tokens=1) for token in (1, 2)]
    assert order(rig) == [2, fast[0], old, slow, fast[1]]


def test_a_preempted_request_goes_before_all_others() -> None:
    rig = EngineRig(num_blocks=6, config=limits(max_running=2))
    rig.arrive(range(8), max_tokens=9)
    preempted = rig.arrive(range(20, 28), max_tokens=9)
    while rig.state.snapshot().engine.preemptions == 0:
        rig.step_done()
    better = rig.arrive([0, 1, 2, 3, 60], max_tokens=9)
    assert order(rig) == [1, preempted, better]


def test_preempted_requests_come_back_in_the_order_of_their_admission() -> None:
    rig = EngineRig(num_blocks=6)
    for start, num_tokens in ((0, 8), (20, 2), (30, 2)):
        rig.arrive(range(start, start + num_tokens), max_tokens=9)
    while rig.state.snapshot().engine.preemptions < 2:
        rig.step_done()
    assert [int(s.request.request_id) for s in rig.state._scheduler.waiting] == [2, 3]
    assert order(rig) == [1, 2, 3]


def test_a_request_that_ends_while_waiting_leaves_the_queue() -> None:
    rig = busy_rig(one_at_a_time())
    ids = [rig.arrive(with_prefix(n, n), max_tokens=1) for n in (0, 4, 8)]
    rig.cancel(ids[1])
    assert order(rig) == [2, ids[2], ids[0]]


def test_tenants_are_served_in_the_order_of_their_oldest_request() -> None:
    rig = busy_rig(one_at_a_time(), tenants=("a", "b"))
    first = rig.arrive([50, 51], max_tokens=1, tenant="b")
    second = rig.arrive(with_prefix(8, 0), max_tokens=1, tenant="a")
    third = rig.arrive(with_prefix(8, 0), max_tokens=1, tenant="b")
    assert order(rig) == [3, third, first, second]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(("a", "b")), st.sampled_from((0, 4, 8, 12)), st.integers(0, 2)),
        min_size=1,
        max_size=40,
    ),
    max_overtakes=st.integers(0, 4),
    match_window=st.integers(1, 6),
)
def test_every_wait_is_bounded(
    arrivals: list[tuple[str, int, int]], max_overtakes: int, match_window: int
) -> None:
    """Who finds `n` waiting is admitted after at most `n` + tenants · `max_overtakes` others."""
    config = one_at_a_time(max_overtakes=max_overtakes, match_window=match_window)
    rig = busy_rig(config, tenants=("a", "b"))
    found: dict[int, set[int]] = {}
    for tenant, num_tokens, num_steps in arrivals:
        waiting = {int(s.request.request_id) for s in rig.state._scheduler.waiting}
        prompt = with_prefix(num_tokens, len(found) % 10)
        found[rig.arrive(prompt, max_tokens=1, tenant=tenant)] = waiting
        for _ in range(num_steps):
            if rig.batch is not None:
                rig.step_done()
    rig.run()
    ended = [int(request_id) for request_id in rig.finals]
    for request_id, waiting in found.items():
        before = ended[: ended.index(request_id)]
        younger = [other for other in before if other > request_id]
        own = [o for o in younger if rig.requests[o].tenant == rig.requests[request_id].tenant]
        assert len(own) <= max_overtakes
        assert len(younger) <= 2 * max_overtakes
        assert len(waiting & set(before)) + len(younger) <= len(waiting) + 2 * max_overtakes
