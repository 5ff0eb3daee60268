"""Verifying through the engine: which blocks are to be read, and what requests do meanwhile."""

from __future__ import annotations

import random

import pytest

from runtime_cache.cache.verification import Reading, Verdict
from runtime_cache.engine.commands import ReportJudged, ReportRefused, ReportToRead
from runtime_cache.engine.events import BlockRead, VerifyAsked
from runtime_cache.ids import BlockId, TenantName
from tests.support.engine_rig import EngineRig, expected_answer

NINE = list(range(9))


def to_read(
    rig: EngineRig,
    *,
    max_blocks: int = 100,
    first_block: int = 0,
    tenant: str | None = None,
    digest: str | None = None,
) -> tuple[list[int], int | None]:
    """The blocks that are to be read, and where to go on."""
    name = None if tenant is None else TenantName(tenant)
    rig.handle(VerifyAsked(max_blocks, rig.now_s, first_block, name, digest))
    report = rig.commands[0]
    assert isinstance(report, ReportToRead)
    return [int(node.block) for node in report.nodes], report.next_block


def read(rig: EngineRig, block: int, checksum: bytes) -> Verdict:
    """A block has been read."""
    node = next(n for c in rig.caches.values() if (n := c.index.node_of(BlockId(block))))
    rig.handle(BlockRead(Reading(node, node.num_rows, rig.now_s, checksum, True), rig.now_s))
    report = rig.commands[0]
    assert isinstance(report, ReportJudged)
    return report.verdict


def damage(rig: EngineRig, block: int) -> Verdict:
    """A block is read twice, and has changed meanwhile."""
    read(rig, block, b"right")
    return read(rig, block, b"wrong")


@pytest.mark.parametrize(
    ("max_blocks", "found"),
    [(1, ([1], 2)), (2, ([1, 2], 12)), (3, ([1, 2, 12], 13)), (4, ([1, 2, 12, 13], None))],
)
def test_the_blocks_of_all_tenants_in_the_order_of_their_numbers(
    max_blocks: int, found: tuple[list[int], int | None]
) -> None:
    rig = EngineRig(tenants=["", "a"])  # blocks 1 to 11 and 12 to 22
    for tenant in ("a", ""):
        rig.arrive(range(8), max_tokens=1, tenant=tenant)
        rig.run()
    assert to_read(rig, max_blocks=max_blocks) == found
    assert to_read(rig, max_blocks=max_blocks, first_block=13) == ([13], None)
    assert to_read(rig, tenant="") == ([1, 2], None)
    assert to_read(rig, tenant="a", max_blocks=1) == ([12], 13)


def test_a_digest_is_looked_for_in_every_tenants_cache() -> None:
    rig = EngineRig(tenants=["", "a"])
    rig.arrive(NINE, max_tokens=1, tenant="a")
    rig.run()
    digest = next(iter(rig.caches[TenantName("a")].index)).digest.hex()
    assert to_read(rig, digest=digest) == ([12], None)
    assert to_read(rig, digest=digest[:8], tenant="a") == ([12], None)
    for question in (
        VerifyAsked(1, rig.now_s, tenant=TenantName(""), digest=digest),
        VerifyAsked(1, rig.now_s, digest="0" * 64),
    ):
        rig.handle(question)
        refused = rig.commands[0]
        assert isinstance(refused, ReportRefused)
        assert refused.code == "unknown_entry"


def test_there_is_no_such_tenant() -> None:
    rig = EngineRig()
    rig.handle(VerifyAsked(1, rig.now_s, tenant=TenantName("b")))
    assert isinstance(rig.commands[0], ReportRefused)


def test_a_damaged_block_while_its_request_is_in_a_step() -> None:
    rig = EngineRig()
    first = rig.arrive(NINE, max_tokens=6)
    rig.step_done()  # the first eight tokens
    rig.step_done()
    assert to_read(rig) == ([1, 2, 3], None)
    assert damage(rig, 2) == Verdict("changed", num_dropped=2, num_in_use=2)
    second = rig.arrive(NINE, max_tokens=6)
    rig.run()
    for request_id in (first, second):
        assert rig.token_ids[request_id] == expected_answer(NINE, 6)
    assert rig.finished(second).usage.cached_tokens == 4
    assert rig.state.snapshot().cache.damaged_blocks == 2


def test_an_answered_request_whose_step_is_still_in_flight() -> None:
    rig = EngineRig()
    request_id = rig.arrive(NINE, max_tokens=8)
    rig.step_done()
    rig.step_done()
    rig.cancel(request_id)
    assert rig.batch is not None
    assert damage(rig, 1).num_in_use == 3
    rig.run()
    assert to_read(rig) == ([], None)
    assert rig.gauges() == (0, 0, 23)


def test_a_preempted_request_finds_what_is_right_and_leaves_it_again() -> None:
    rig = EngineRig(num_blocks=8)
    first = rig.arrive(range(8), max_tokens=12)
    rig.step_done()
    second = rig.arrive(range(100, 108), max_tokens=12)
    while not rig.state.snapshot().engine.preemptions:
        rig.step_done()
    for block in to_read(rig)[0]:
        if rig.cache.index.node_of(BlockId(block)) is not None:
            damage(rig, block)
    assert to_read(rig) == ([], None)
    rig.run()
    assert rig.token_ids[first] == expected_answer(range(8), 12)
    assert rig.token_ids[second] == expected_answer(range(100, 108), 12)
    assert to_read(rig)[0] != []  # what was computed after the preemption


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_with_random_damage(seed: int) -> None:
    """The rig checks every invariant after every event, and every row that is read."""
    draw = random.Random(seed)
    rig = EngineRig(num_blocks=20, tenants=["", "a"])
    prompts = [[draw.randrange(2) for _ in range(draw.randrange(1, 14))] for _ in range(6)]
    for number in range(120):
        match draw.randrange(8):
            case 0 | 1:
                rig.arrive(
                    draw.choice(prompts), draw.randrange(1, 6), tenant=draw.choice(["", "a"])
                )
            case 2:
                rig.register(f"p{draw.randrange(2)}", draw.choice(prompts)[:8])
            case 3:
                blocks, _ = to_read(rig)
                if blocks:
                    damage(rig, draw.choice(blocks))
            case 4 if rig.batch is not None and number % 3 == 0:
                rig.step_failed()
            case _ if rig.batch is not None:
                rig.step_done()
    rig.run()
    assert rig.state.snapshot().cache.damaged_blocks > 0
    for cache in rig.caches.values():
        for keep in list(cache.keeps):
            assert cache.unregister(keep.name)  # type: ignore[arg-type]
    assert rig.gauges()[0] == 0
