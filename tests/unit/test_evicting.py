"""Evicting in parts: the sums are those of one go, others get their turn, and it ends."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from ipc.messages import AnyReply, Cancel, Error, Evict, Evicted, MessageId, Ok, Ping, Pong
from runtime_cache import evicting
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import Evicted as EvictedBlocks
from runtime_cache.engine import questions
from runtime_cache.engine.commands import ReportEvicted
from runtime_cache.engine.events import EvictAsked
from runtime_cache.evicting import Eviction
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from tests.support.caching import MakeCache, computed, gauges, parked_blocks, register, serve
from tests.support.desk import ADMIN, TEAM, Desk

ID, OTHER = MessageId("1"), MessageId("2")


class Caches:
    """The caches of two tenants, as engine and as facts."""

    bytes_per_block = 100

    def __init__(self, make_cache: MakeCache) -> None:
        self.of = {DEFAULT_TENANT: make_cache(20), TEAM: make_cache(20)}
        self.parts: list[int] = []
        for number, cache in enumerate(self.of.values()):
            serve(cache, range(12))
            serve(cache, [*range(4), *range(50, 55)])
            register(cache, "p", range(30, 38))
            computed(cache, range(40, 44))
            cache.now_s = 5.0
            serve(cache, range(70, 74 + number))
            cache.now_s = 8.0

    def evict(
        self,
        tenant: TenantName | None,
        *,
        max_blocks: int | None = None,
        digest: str | None = None,
        used_until_s: float | None = None,
        created_until_s: float | None = None,
        is_dry_run: bool = False,
    ) -> EvictedBlocks:
        question = EvictAsked(
            8.0, tenant, max_blocks, digest, used_until_s, created_until_s, is_dry_run
        )
        report = questions.answer(self.of, question, tables=(), retry_after_ms=1)
        assert isinstance(report, ReportEvicted)
        self.parts.append(report.evicted.num_evicted)
        return report.evicted

    def num_evictable(self, tenant: TenantName | None) -> int:
        return sum(cache.num_evictable for name, cache in self.of.items() if tenant in (None, name))

    def state(self) -> list[tuple[list[int], tuple[int, int, int]]]:
        return [(parked_blocks(cache), gauges(cache)) for cache in self.of.values()]


def run(caches: Caches, message: Evict) -> Evicted:
    tenant = None if message.tenant is None else TenantName(message.tenant)
    eviction = Eviction(caches, caches, message, tenant, 8.0)
    while (reply := eviction.next_part()) is None:
        pass
    return reply


def evicted(num_blocks: int, num_in_use: int, num_kept: int) -> Evicted:
    return Evicted(
        ID,
        num_blocks=num_blocks,
        num_bytes=100 * num_blocks,
        in_use_blocks=num_in_use,
        kept_blocks=num_kept,
    )


@pytest.mark.parametrize(
    ("message", "num_evicted", "num_in_use", "num_kept"),
    [
        (Evict(ID, all=True), 13, 2, 4),
        (Evict(ID, all=True, tenant=TEAM), 7, 1, 2),
        (Evict(ID, max_blocks=0), 0, 2, 4),
        (Evict(ID, max_blocks=3), 3, 2, 4),
        (Evict(ID, max_blocks=7), 7, 2, 4),
        (Evict(ID, max_blocks=12), 12, 2, 4),
        (Evict(ID, max_blocks=13), 13, 2, 4),
        (Evict(ID, max_blocks=99, tenant=""), 6, 1, 2),
        (Evict(ID, idle_s=4.0), 10, 2, 4),
        (Evict(ID, idle_s=3.0, tenant=TEAM), 7, 1, 2),
        (Evict(ID, idle_s=9.0), 0, 0, 0),
        (Evict(ID, age_s=4.0), 10, 2, 4),
        (Evict(ID, max_bytes=799), 7, 2, 4),
        (Evict(ID, max_bytes=99), 0, 2, 4),
        (Evict(ID, min_bytes=1), 1, 2, 4),
        (Evict(ID, min_bytes=700), 7, 2, 4),
        (Evict(ID, min_bytes=701), 8, 2, 4),
        (Evict(ID, min_bytes=1301), 13, 2, 4),
    ],
)
def test_in_parts_it_is_the_same_as_at_once(
    make_cache: MakeCache,
    monkeypatch: pytest.MonkeyPatch,
    message: Evict,
    num_evicted: int,
    num_in_use: int,
    num_kept: int,
) -> None:
    whole, parted = Caches(make_cache), Caches(make_cache)
    expected = evicted(num_evicted, num_in_use, num_kept)
    assert run(whole, message) == expected
    assert whole.parts == [num_evicted]
    monkeypatch.setattr(evicting, "_PART_BLOCKS", 2)
    assert run(parted, message) == expected
    assert max(parted.parts) <= 2
    assert sum(parted.parts) == num_evicted
    assert parted.state() == whole.state()


def test_a_dry_run_looks_at_everything_at_once(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evicting, "_PART_BLOCKS", 2)
    caches = Caches(make_cache)
    before = caches.state()
    with capture_logs() as lines:
        reply = run(caches, Evict(ID, all=True, dry_run=True))
    assert lines == []
    assert (reply.num_blocks, reply.dry_run, caches.parts) == (13, True, [13])
    assert caches.state() == before


def test_a_prefix_that_is_named_goes_at_once(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evicting, "_PART_BLOCKS", 2)
    caches = Caches(make_cache)
    first = next(node for node in caches.of[TEAM].index if node.num_children == 2)
    with capture_logs() as lines:
        reply = run(caches, Evict(ID, digest=first.digest.hex(), tenant=TEAM))
    assert reply.num_blocks > 2
    assert [(line["event"], line["blocks"]) for line in lines] == [("evicted", reply.num_blocks)]
    assert caches.parts == [reply.num_blocks]


def test_all_is_what_could_go_at_the_start(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = Caches(make_cache)
    cache: CacheManager = caches.of[DEFAULT_TENANT]
    monkeypatch.setattr(evicting, "_PART_BLOCKS", 2)
    eviction = Eviction(caches, caches, Evict(ID, all=True, tenant=""), DEFAULT_TENANT, 8.0)
    number = 100
    while (reply := eviction.next_part()) is None:
        number += 10
        serve(cache, range(number, number + 8))  # as much as goes comes again
    assert (reply.num_blocks, cache.num_evictable) == (6, 4)


async def test_others_get_their_turn_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicting, "_PART_BLOCKS", 2)
    desk = Desk()
    assert desk.say(Evict(ID, max_blocks=3), ADMIN) == []  # two of them
    assert desk.service.num_unfinished == 1
    assert isinstance(desk.say(Ping(OTHER), ADMIN)[0], Pong)
    desk.take()
    assert await desk.until_sent() == [evicted(3, 2, 1)]
    parts = [("evict", None, number, None, None, None, False) for number in (2, 1)]
    assert (desk.engine.asked, desk.service.num_unfinished) == (parts, 0)
    await desk.service.close()


@pytest.mark.parametrize("end", ["cancel", "client_gone"])
async def test_it_ends_with_a_cancel_and_with_its_client(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(evicting, "_PART_BLOCKS", 2)
    desk = Desk()
    assert desk.say(Evict(ID, all=True), ADMIN) == []
    expected: list[AnyReply] = []
    if end == "cancel":
        message = "the request was cancelled"
        expected = [Error(id=ID, code="cancelled", message=message, retryable=True), Ok(OTHER)]
        desk.say(Cancel(OTHER, target=ID), ADMIN)
    else:
        desk.service.on_client_gone(ADMIN)
    for _ in range(3):
        await asyncio.sleep(0)
    assert desk.take() == expected
    assert (len(desk.engine.asked), desk.service.num_unfinished) == (1, 0)
    await desk.service.close()
