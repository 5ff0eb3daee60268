"""`verify` through the service: reads in pieces, answers in parts, may end at any moment."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest

from ipc.messages import (
    AnyReply,
    Cancel,
    Error,
    MessageId,
    Ok,
    Ping,
    Pong,
    Verified,
    Verify,
)
from runtime_cache import verifying
from runtime_cache.cache.verification import Verdict
from runtime_cache.errors import (
    AclError,
    DeviceLost,
    InvalidRequest,
    RuntimeCacheError,
    UnknownEntry,
)
from tests.support.desk import ADMIN, NOW_S, TEAM, Desk, cached_node

ID, OTHER = MessageId("1"), MessageId("2")
DIGEST = "01" * 32


def verified(num_blocks: int, num_bytes: int, **more: int | None) -> Verified:
    counts = {"num_new": num_blocks, "num_changed": 0, "num_not_finite": 0}
    dropped = {"dropped_blocks": 0, "in_use_blocks": 0}
    return Verified(
        ID,
        num_blocks=num_blocks,
        num_bytes=num_bytes,
        **(counts | dropped | more),  # type: ignore[arg-type]
    )


def desk_with(*blocks: int, may_read: bool = True) -> Desk:
    """A desk of a daemon with these cached blocks."""
    desk = Desk()
    desk.engine.nodes = [cached_node(block) for block in blocks]
    desk.facts.kv = bytes(26)  # thirteen numbers of two bytes
    if may_read:
        desk.facts.may_read.set()
    return desk


async def answer(desk: Desk, message: Verify) -> AnyReply:
    assert desk.say(message, ADMIN) == []
    (reply,) = await desk.until_sent()
    assert desk.service.num_unfinished == 0
    return reply


async def until_read(desk: Desk, num_reads: int) -> None:
    """Wait until so many reads are on their way."""
    while len(desk.facts.reads) < num_reads:  # noqa: ASYNC110
        await asyncio.sleep(0)


# -- what is read -------------------------------------------------------------------------------


async def test_nothing_is_cached() -> None:
    desk = desk_with()
    assert await answer(desk, Verify(ID)) == verified(0, 0)
    await desk.service.close()


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (Verify(ID), (None, None, 0)),
        (Verify(ID, tenant=""), ("", None, 0)),
        (Verify(ID, digest=DIGEST, first_block=3, tenant=TEAM), (TEAM, DIGEST, 3)),
    ],
)
async def test_the_question_reaches_the_engine(message: Verify, asked: tuple[object, ...]) -> None:
    desk = desk_with()
    await answer(desk, message)
    assert desk.engine.asked == [("verify", *asked)]
    await desk.service.close()


async def test_only_the_rows_of_tokens_are_read() -> None:
    desk = desk_with(3, 5)
    desk.engine.nodes[1] = cached_node(5, num_tokens=1)
    assert await answer(desk, Verify(ID)) == verified(2, 4 * 25 + 25)
    assert desk.facts.reads == [(12, 4), (20, 1)]
    first, second = desk.engine.readings
    assert (first.num_tokens, second.num_tokens) == (4, 1)
    assert first.checksum == hashlib.blake2b(bytes(104), digest_size=16).digest()
    assert first.checksum != second.checksum
    assert first.begun_s == NOW_S
    await desk.service.close()


@pytest.mark.parametrize(("size", "reads"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (5, [4])])
async def test_a_block_is_read_in_pieces(size: int, reads: list[int]) -> None:
    desk = desk_with(2)
    desk.facts.max_read_tokens = size
    assert await answer(desk, Verify(ID)) == verified(1, 100)
    assert [num_tokens for _, num_tokens in desk.facts.reads] == reads
    assert [slot for slot, _ in desk.facts.reads] == [8 + sum(reads[:i]) for i in range(len(reads))]
    # However it is cut, it is the same.
    (reading,) = desk.engine.readings
    assert reading.checksum == hashlib.blake2b(bytes(104), digest_size=16).digest()
    await desk.service.close()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("value", "is_finite"),
    [(0.0, True), (65504.0, True), (np.nan, False), (np.inf, False), (-np.inf, False)],
)
async def test_what_is_no_finite_number_is_seen(dtype: str, value: float, is_finite: bool) -> None:
    desk = desk_with(2)
    desk.facts.kv_dtype = dtype
    desk.facts.kv = np.array([1, -2, value], dtype).tobytes()
    await answer(desk, Verify(ID))
    (reading,) = desk.engine.readings
    assert reading.is_finite == is_finite
    await desk.service.close()


async def test_poison_is_no_finite_number() -> None:
    desk = desk_with(2)
    desk.facts.kv = bytes.fromhex("fe7ffe7f")
    desk.facts.max_read_tokens = 1
    await answer(desk, Verify(ID))
    assert not desk.engine.readings[0].is_finite
    await desk.service.close()


# -- what is found ------------------------------------------------------------------------------


async def test_the_verdicts_are_added_up() -> None:
    desk = desk_with(1, 2, 3, 4, 5, 6)
    desk.engine.verdicts = {
        1: Verdict("same"),
        2: Verdict("changed", 3, 1),
        3: Verdict("gone"),
        4: Verdict("not_finite", 1, 0),
        5: Verdict("changed", 1, 1),
    }
    assert await answer(desk, Verify(ID)) == verified(
        5, 500, num_new=1, num_changed=2, num_not_finite=1, dropped_blocks=5, in_use_blocks=2
    )
    await desk.service.close()


async def test_a_block_that_leaves_the_cache_while_it_is_read_is_not_judged() -> None:
    desk = desk_with(1, 2, may_read=False)
    desk.facts.max_read_tokens = 3
    desk.say(Verify(ID), ADMIN)
    await until_read(desk, 1)
    desk.engine.nodes[0].is_indexed = False
    desk.facts.may_read.set()
    assert await desk.until_sent() == [verified(1, 100)]
    assert desk.facts.reads == [(4, 3), (8, 3), (11, 1)]
    assert [reading.node.block for reading in desk.engine.readings] == [2]
    await desk.service.close()


# -- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "next_block"), [(2, None), (3, None), (4, 14)])
async def test_a_message_reads_so_many_blocks(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, next_block: int | None
) -> None:
    monkeypatch.setattr(verifying, "_PART_BLOCKS", 3)
    desk = desk_with(*range(11, 11 + num_blocks))
    reply = await answer(desk, Verify(ID))
    assert reply == verified(min(num_blocks, 3), 100 * min(num_blocks, 3), next_block=next_block)
    await desk.service.close()


@pytest.mark.parametrize(("seconds", "num_read"), [(0.499, 3), (0.5, 2), (1.0, 1), (100.0, 1)])
async def test_a_message_reads_for_so_long_but_one_block_at_least(
    seconds: float, num_read: int
) -> None:
    desk = desk_with(1, 2, 3, 4)

    def judge(reading: object) -> Verdict:
        desk.now_s += seconds
        return Verdict("new")

    desk.engine.judge = judge  # type: ignore[method-assign]
    reply = await answer(desk, Verify(ID))
    assert reply == verified(num_read, 100 * num_read, next_block=num_read + 1)
    await desk.service.close()


# -- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [UnknownEntry("none"), InvalidRequest("two")],
)
async def test_what_the_engine_refuses(error: RuntimeCacheError) -> None:
    desk = desk_with(1)
    desk.engine.error = error
    assert await answer(desk, Verify(ID, digest=DIGEST)) == Error(
        id=ID, code=error.code, message=error.message, retryable=False
    )
    await desk.service.close()


async def test_a_device_that_cannot_be_read() -> None:
    desk = desk_with(1)
    desk.facts.error = AclError("acl.rt.memcpy_async", 507899, "unknown")
    reply = await answer(desk, Verify(ID))
    assert isinstance(reply, Error)
    assert (reply.code, reply.retryable) == ("acl", True)
    assert (desk.engine.readings, desk.engine.lost) == ([], None)
    desk.facts.error = None
    assert await answer(desk, Verify(ID)) == verified(1, 100)
    await desk.service.close()


async def test_a_lost_device_ends_everything() -> None:
    desk = desk_with(1)
    desk.facts.error = DeviceLost("acl.rt.memcpy_async", 507899, "unknown")
    reply = await answer(desk, Verify(ID))
    assert isinstance(reply, Error)
    assert (reply.code, reply.retryable) == ("device_lost", True)
    assert desk.engine.lost is desk.facts.error
    await desk.service.close()


async def test_a_bug_is_answered_too() -> None:
    desk = desk_with(1)
    desk.facts.error = ZeroDivisionError()
    reply = await answer(desk, Verify(ID))
    assert isinstance(reply, Error)
    assert reply.code == "internal"
    await desk.service.close()


async def test_nothing_else_waits_for_it_and_it_is_done_once_at_a_time() -> None:
    desk = desk_with(1, may_read=False)
    for message_id in (ID, OTHER):
        desk.say(Verify(message_id), ADMIN)
    await until_read(desk, 1)
    assert isinstance(desk.say(Ping(MessageId("3")), ADMIN)[0], Pong)
    await asyncio.sleep(0)
    assert len(desk.facts.reads) == 1
    desk.take()
    desk.facts.may_read.set()
    replies = []
    while len(replies) < 2:
        replies += await desk.until_sent()
    assert [reply.id for reply in replies] == [ID, OTHER]
    assert len(desk.facts.reads) == 2
    await desk.service.close()


async def test_a_cancel_ends_it_and_the_next_one_goes_on() -> None:
    desk = desk_with(1, may_read=False)
    desk.say(Verify(ID), ADMIN)
    await until_read(desk, 1)
    cancelled = Error(id=ID, code="cancelled", message="the request was cancelled", retryable=True)
    assert desk.say(Cancel(OTHER, target=ID), ADMIN) == [cancelled, Ok(OTHER)]
    assert desk.service.num_unfinished == 0
    desk.take()
    desk.facts.may_read.set()
    assert await answer(desk, Verify(ID)) == verified(1, 100)
    assert len(desk.engine.readings) == 1
    await desk.service.close()


@pytest.mark.parametrize("reason", ["client_gone", "slow_reader"])
async def test_a_client_that_is_gone_or_does_not_read_leaves_nothing(reason: str) -> None:
    desk = desk_with(1, 2, may_read=False)
    desk.say(Verify(ID), ADMIN)
    await until_read(desk, 1)
    tell = {"client_gone": desk.service.on_client_gone, "slow_reader": desk.service.on_slow_reader}
    tell[reason](ADMIN)
    assert desk.service.num_unfinished == 0
    ends = [getattr(reply, "code", "") for reply in desk.take()]
    assert ends == (["cancelled"] if reason == "slow_reader" else [])
    desk.facts.may_read.set()
    assert await answer(desk, Verify(ID)) == verified(2, 200)
    assert (len(desk.facts.reads), len(desk.engine.readings)) == (3, 2)
    await desk.service.close()


async def test_close_answers_it_and_takes_no_other() -> None:
    desk = desk_with(1, may_read=False)
    desk.say(Verify(ID), ADMIN)
    await until_read(desk, 1)
    await desk.service.close()
    (reply,) = desk.take()
    assert isinstance(reply, Error)
    assert reply.code == "draining"
    (refused,) = desk.say(Verify(OTHER), ADMIN)
    assert isinstance(refused, Error)
    assert refused.code == "draining"
    assert desk.service.num_unfinished == 0
