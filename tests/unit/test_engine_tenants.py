"""Tenants: own caches, own queues, own limits; one device, one running set."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import Evicted
from runtime_cache.engine.commands import ReportEvicted, ReportPinned, ReportRefused
from runtime_cache.engine.events import (
    EvictAsked,
    PinAsked,
    Question,
    RequestArrived,
    ShowAsked,
    UnpinAsked,
    VerifyAsked,
)
from runtime_cache.engine.request import NewRequest, SamplingParams
from runtime_cache.engine.snapshot import TenantSnapshot, sums
from runtime_cache.engine.state import EngineState
from runtime_cache.errors import InternalError
from runtime_cache.ids import PrefixId, RequestId, TenantName
from tests.support.caching import BLOCK_SIZE, ROOT
from tests.support.engine_rig import EngineRig, expected_answer, limits, small_gears

A, B = TenantName("a"), TenantName("b")


def two(num_blocks: int = 12, **options: object) -> EngineRig:
    """Tenants `a` and `b`, with so many blocks each."""
    return EngineRig(num_blocks=1 + 2 * num_blocks, tenants=(A, B), **options)  # type: ignore[arg-type]


def test_nothing_of_one_tenant_is_reused_for_another() -> None:
    rig = two()
    ids = [rig.arrive(range(9), max_tokens=2, tenant=tenant) for tenant in (A, B, A)]
    rig.run()
    assert [rig.finished(i).usage.cached_tokens for i in ids] == [0, 0, 8]
    assert rig.token_ids[ids[0]] == rig.token_ids[ids[1]] == expected_answer(range(9), 2)


def test_requests_of_tenants_share_a_step() -> None:
    rig = two()
    for tenant in (A, B):
        rig.arrive([1, 2, 3], max_tokens=4, tenant=tenant)
    for _ in range(3):
        rig.step_done()
    assert rig.rows() == [(1, 4, 1), (2, 3, 1)]


def test_a_short_tenant_preempts_its_own() -> None:
    """Also if another tenant's request is the youngest of all."""
    rig = two(3)
    first = rig.arrive([10, 11, 12], max_tokens=6, tenant=A)
    second = rig.arrive([20, 21, 22], max_tokens=6, tenant=A)
    for _ in range(3):
        rig.step_done()
    other = rig.arrive([30, 31, 32], max_tokens=9, tenant=B)
    rig.step_done()
    assert [int(s.request.request_id) for s in rig.state._scheduler.running] == [1, other]
    assert [int(s.request.request_id) for s in rig.state._scheduler.waiting] == [second]
    rig.run()
    assert rig.state.snapshot().engine.preemptions == 1
    assert rig.finished(other).usage.prefilled_tokens == 3
    for request_id, start, num_tokens in ((first, 10, 6), (second, 20, 6), (other, 30, 9)):
        prompt = [start, start + 1, start + 2]
        assert rig.token_ids[request_id] == expected_answer(prompt, num_tokens)


def test_one_tenants_full_cache_does_not_hold_up_another() -> None:
    rig = two(4)
    rig.arrive(range(12), max_tokens=4, tenant=A)
    held_up = rig.arrive(range(20, 32), max_tokens=1, tenant=A)
    other = rig.arrive(range(40, 44), max_tokens=1, tenant=B)
    for _ in range(3):
        rig.step_done()
    assert rig.rows() == [(other, 0, 4)]
    rig.run()
    assert list(rig.finals) == [other, 1, held_up]


def test_a_request_is_stuck_if_it_is_alone_in_its_cache() -> None:
    rig = two(6)
    rig.register("p", range(12), tenant=A)
    rig.run()
    other = rig.arrive(range(40, 50), max_tokens=9, tenant=B)
    stuck = rig.arrive(range(20, 36), max_tokens=1, tenant=A)
    rig.run()
    assert list(rig.finals)[-2:] == [stuck, other]
    assert rig.failed(stuck).message == (
        "4 blocks are needed, but registrations, pins and leases hold 3 of 6"
    )


def test_an_operator_hears_who_has_what_he_seeks() -> None:
    """Of the tenant that was named there is none."""
    rig = two()
    rig.register("p-1", range(8), tenant=B)
    rig.run()
    digest = max(rig.caches[B].index, key=lambda node: node.num_tokens).digest.hex()
    assert isinstance(rig.pin(digest, tenant=B), ReportPinned)
    hint = "; tenant `b` has one: --tenant b"
    asked: list[Question] = [
        ShowAsked(0.0, digest[:8], tenant=A),
        ShowAsked(0.0, prefix_id=PrefixId("p-"), tenant=A),
        PinAsked(digest, 0.0, tenant=A),
        UnpinAsked(digest[:8], 0.0, tenant=A),
        EvictAsked(0.0, A, digest=digest),
        VerifyAsked(1, 0.0, tenant=A, digest=digest),
    ]
    for question in asked:
        (report,) = rig.state.handle(question)
        assert isinstance(report, ReportRefused)
        assert report.code in ("unknown_entry", "unknown_prefix")
        assert report.message.endswith(hint)
    for question in (PinAsked("0" * 8, 0.0, tenant=A), EvictAsked(0.0, digest="0" * 8)):
        (report,) = rig.state.handle(question)
        assert isinstance(report, ReportRefused)
        assert "tenant" not in report.message


def test_queues_are_bounded_one_by_one() -> None:
    rig = two(config=limits(max_waiting=2, max_running=1))
    for tenant in (A, A, A, A, B, B, B):
        rig.arrive([1, 2], max_tokens=1, tenant=tenant)
    assert [int(i) for i in rig.finals] == [4, 7]
    assert rig.failed(4).message == rig.failed(7).message == "2 requests are waiting"


def test_prompts_are_limited_by_their_tenants_share() -> None:
    caches = {
        tenant: CacheManager(blocks=blocks, block_size=BLOCK_SIZE, root=ROOT)
        for tenant, blocks in ((A, range(1, 4)), (B, range(4, 24)))
    }
    state = EngineState(caches, small_gears(), limits())
    assert [state.max_sequence_tokens_of(tenant) for tenant in (A, B)] == [13, 32]
    assert state.max_sequence_tokens == 32
    assert state.tenants == (A, B)


def test_a_request_of_no_tenant_is_our_bug() -> None:
    rig = two()
    tokens = np.arange(4, dtype=np.int32)
    request = NewRequest(RequestId(9), tokens, SamplingParams(), tenant=TenantName("c"))
    with pytest.raises(InternalError, match="request 9 is of no tenant: 'c'"):
        rig.state.handle(RequestArrived(request, rig.now_s))


def test_registrations_and_questions_are_a_tenants_own() -> None:
    rig = two()
    for tenant in (A, B):
        rig.register("p", range(9), tenant=tenant)
        rig.run()
    (keep,) = rig.caches[A].keeps
    assert isinstance(rig.pin(keep.digest, tenant=A), ReportPinned)
    refused = rig.pin(keep.digest, tenant=B)
    assert isinstance(refused, ReportRefused)
    assert refused.code == "unknown_entry"
    rig.release_prefix("p", tenant=B)
    assert [cache.num_live for cache in rig.caches.values()] == [3, 0]
    assert rig.evict(tenant=A) == ReportEvicted(Evicted(0, 0, 3))
    assert rig.evict(tenant=B) == ReportEvicted(Evicted(3, 0, 0))


def test_operators_may_evict_from_all_tenants_together() -> None:
    rig = two()
    for tenant in (A, B):
        rig.arrive(range(9), max_tokens=1, tenant=tenant)
        rig.run()
    (node,) = (n for n in rig.caches[B].index if n.num_tokens == 9)
    assert rig.evict(digest=node.digest.hex()) == ReportEvicted(Evicted(3, 0, 0))
    assert rig.evict(4) == ReportEvicted(Evicted(3, 0, 0))
    for tenant in (A, B):
        rig.arrive(range(9), max_tokens=1, tenant=tenant)
        rig.run()
    assert rig.evict(4) == ReportEvicted(Evicted(4, 0, 0))
    assert rig.evict(idle_s=0.0) == ReportEvicted(Evicted(2, 0, 0))


def test_what_was_used_least_recently_goes_first_whosever_it_is() -> None:
    rig = two()
    for now_s, tenant, first in ((1.0, A, 0), (2.0, B, 0), (3.0, A, 20), (4.0, B, 20)):
        rig.now_s = now_s
        rig.arrive(range(first, first + 9), max_tokens=1, tenant=tenant)
        rig.run()

    def left() -> list[int]:
        return [cache.num_evictable for cache in rig.caches.values()]

    assert left() == [6, 6]
    for number, expected in ((2, [4, 6]), (3, [3, 4]), (3, [1, 3]), (9, [0, 0])):
        rig.evict(number)
        assert left() == expected


@pytest.mark.parametrize("digest", ["", "ff" * 32])
def test_a_digest_of_several_tenants_or_none_is_refused(digest: str) -> None:
    rig = two()
    for tenant in (A, B):
        rig.arrive([1, 2], max_tokens=1, tenant=tenant)
        rig.run()
    refused = rig.evict(digest=digest)
    assert isinstance(refused, ReportRefused)
    assert refused.code == ("unknown_entry" if digest else "invalid_request")


def test_a_question_about_no_tenant_is_refused() -> None:
    rig = two()
    for answer in (
        rig.evict(tenant="c"),
        rig.pin("00", tenant="c"),
        rig.unpin("00", tenant="c"),
        rig.explain([1], tenant="c"),
        rig.release_prefix("p", tenant="c"),
    ):
        assert answer == ReportRefused("invalid_request", "there is no tenant `c`", False)


def test_a_snapshot_is_the_sum_of_its_tenants() -> None:
    rig = two(config=limits(max_running=2))
    for tenant in (A, B, B, A, A):
        rig.arrive(range(9), max_tokens=2, tenant=tenant)
        rig.step_done()
    snapshot = rig.state.snapshot()
    a, b = snapshot.tenants[A], snapshot.tenants[B]
    assert (a.num_waiting + a.num_running, b.num_waiting + b.num_running) == (2, 2)
    assert (a.num_usable_blocks, b.num_usable_blocks, snapshot.num_usable_blocks) == (12, 12, 24)
    for part in (a, b, snapshot):
        blocks = part.num_live_blocks + part.num_evictable_blocks + part.num_free_blocks
        assert blocks == part.num_usable_blocks
    totals = {name: getattr(snapshot, name) for name in sums([a, b], TenantSnapshot)}
    assert totals == sums([a, b], TenantSnapshot)
    assert snapshot.cache.queried_tokens == a.cache.queried_tokens + b.cache.queried_tokens > 0
    assert snapshot.requests_by_reason == a.requests_by_reason + b.requests_by_reason
