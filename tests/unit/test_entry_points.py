"""Whatever a tenant's cache is asked through, another's entries are not there.

[19, 20] of facts/peers.md (d): peers lost the salt on one of their paths. Tenants have caches of
their own, so that there is no path on which it could be lost; here every one is walked.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime_cache.engine.commands import (
    Command,
    FinishRequest,
    ReportExplained,
    ReportPinned,
    ReportRefused,
    ReportReleased,
    ReportUnpinned,
)
from runtime_cache.ids import PrefixId, TenantName
from tests.support.engine_rig import EngineRig, limits

A, B = TenantName("a"), TenantName("b")
PROMPT = list(range(20, 30))


@pytest.fixture
def rig() -> EngineRig:
    """What there is to find: a prompt and its answer, registered and pinned, all of tenant `a`."""
    rig = EngineRig(num_blocks=49, tenants=(A, B), config=limits(max_running=1))
    rig.register("p", PROMPT, tenant=A)
    rig.run()
    rig.arrive([*PROMPT, 1], max_tokens=6, tenant=A)
    rig.run()
    return rig


def a_digest(rig: EngineRig) -> str:
    """Of a prefix of `a` that is not registered."""
    (keep,) = rig.caches[A].keeps
    return next(n.digest.hex() for n in rig.caches[A].index if n.digest.hex() != keep.digest)


def test_a_request(rig: EngineRig) -> None:
    """Not even its reason is another than in an empty cache."""
    cached, reports = [], []
    for tenant in (B, A):
        before = rig.pool.num_rows_written
        request_id = rig.arrive([*PROMPT, 1, 60, 61], max_tokens=1, tenant=tenant)
        rig.run()
        usage = rig.finished(request_id).usage
        assert usage.cache is not None
        assert rig.pool.num_rows_written - before == 13 - usage.cached_tokens
        cached.append(usage.cached_tokens)
        reports.append((usage.cache.reason, usage.cache.diverged_at, usage.cache.nearest_tokens))
    assert cached == [0, 11]
    assert reports == [("cold", None, None), ("diverged", 11, 16)]


def test_the_order_of_the_queue(rig: EngineRig) -> None:
    """Nobody waits longer or shorter for what another has cached."""
    rig.arrive([50, 51, 52], max_tokens=3, tenant=B)
    first = rig.arrive([60, 61, 62], max_tokens=1, tenant=B)
    second = rig.arrive([*PROMPT, 1, 3], max_tokens=1, tenant=B)
    rig.run()
    assert list(rig.finals)[-2:] == [first, second]


def test_a_registration(rig: EngineRig) -> None:
    """The same tokens under the same name: computed again, and kept for each."""
    before = rig.pool.num_rows_written
    request_id = rig.register("p", PROMPT, tenant=B)
    rig.run()
    final = rig.finals[request_id]
    assert isinstance(final, FinishRequest)
    assert (final.usage.cached_tokens, rig.pool.num_rows_written - before) == (0, 10)
    assert rig.release_prefix("p", tenant=B) == ReportReleased(PrefixId("p"), is_known=True)
    assert len(rig.caches[A].keeps) == 1


def test_a_release(rig: EngineRig) -> None:
    assert rig.release_prefix("p", tenant=B) == ReportReleased(PrefixId("p"), is_known=False)
    assert rig.release_prefix("p", tenant=A) == ReportReleased(PrefixId("p"), is_known=True)


def test_an_explanation(rig: EngineRig) -> None:
    found = [rig.explain([*PROMPT, 1, 60, 61], tenant=tenant) for tenant in (B, A)]
    assert all(isinstance(answer, ReportExplained) for answer in found)
    reports = [answer.report for answer in found if isinstance(answer, ReportExplained)]
    assert [(report.cached_tokens, report.reason) for report in reports] == [
        (0, "cold"),
        (11, "diverged"),
    ]


def test_a_pin_and_its_end(rig: EngineRig) -> None:
    digest = a_digest(rig)
    asked: list[tuple[Callable[..., Command], type]] = [
        (rig.pin, ReportPinned),
        (rig.unpin, ReportUnpinned),
    ]
    for ask, kind in asked:
        refused = ask(digest, tenant=B)
        assert isinstance(refused, ReportRefused)
        assert refused.code == "unknown_entry"
        assert isinstance(ask(digest, tenant=A), kind)


def test_an_eviction(rig: EngineRig) -> None:
    digest = a_digest(rig)
    before = rig.gauges()
    refused = rig.evict(tenant=B, digest=digest)
    assert isinstance(refused, ReportRefused)
    assert refused.code == "unknown_entry"
    rig.evict(tenant=B)
    rig.evict(tenant=B, idle_s=0)
    rig.evict(1000, tenant=B)
    assert rig.gauges() == before


def test_an_eviction_under_pressure(rig: EngineRig) -> None:
    """Three times what `b` has, and all that `a` has stays."""
    left = len(rig.caches[A].index)
    for number in range(24):
        rig.arrive([100 + number, *range(11)], max_tokens=1, tenant=B)
        rig.run()
    assert rig.caches[B].counters.evicted_blocks == 2 * 24
    assert rig.caches[A].counters.evicted_blocks == 0
    assert len(rig.caches[A].index) == left
