"""Sessions, credit and good-byes as the service handles them; the engine is a fake."""

from __future__ import annotations

import asyncio

import pytest

from ipc.messages import (
    AnyReply,
    Chat,
    ChatMessage,
    CloseSession,
    Credit,
    Done,
    Error,
    Generate,
    MessageId,
    Opened,
    OpenSession,
    Ping,
    Register,
    SessionClosed,
    Tokens,
)
from runtime_cache.service import Defaults
from tests.support.desk import ALICE, BOB, TEAM_ALICE, Desk

ID = MessageId("1")
OTHER = MessageId("2")
INCARNATION = "9f2c4b1e7a5d3806"


def ends(replies: list[AnyReply]) -> list[tuple[MessageId | None, str]]:
    """Id and finish reason, or code, of each last reply."""
    return [
        (reply.id, reply.finish_reason if isinstance(reply, Done) else reply.code)
        for reply in replies
        if isinstance(reply, Done | Error)
    ]


# --- credit -------------------------------------------------------------------------------------


def test_credit_lets_a_stream_go_on_and_is_not_answered() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="a", credit=1))
    for number in range(3):
        desk.engine.emit("x", number)
    first = Tokens(ID, index=0, text="x", token_ids=(0,))
    assert desk.take() == [first]
    held = Tokens(ID, index=1, text="xx", token_ids=(1, 2))
    assert desk.say(Credit(OTHER, target=ID, credit=1)) == [held]
    desk.engine.emit("y", 3)
    desk.engine.finish("length", "z")
    (_, done) = desk.take()[-2:]
    assert isinstance(done, Done)
    assert (done.index, done.text, done.token_ids) == (3, "yz", (3,))


def test_credit_for_nothing_is_ignored() -> None:
    desk = Desk()
    assert desk.say(Credit(OTHER, target=ID, credit=1)) == []
    desk.say(Generate(ID, prompt="a"))
    assert desk.say(Credit(OTHER, target=ID, credit=1)) == []
    assert desk.say(Credit(OTHER, target=ID, credit=1), BOB) == []
    desk.engine.emit("x", 7)
    assert desk.take()[-1] == Tokens(ID, index=0, text="x", token_ids=(7,))


@pytest.mark.parametrize("num_tokens", [4, 5])
def test_more_than_may_be_held_ends_the_answer(num_tokens: int) -> None:
    desk = Desk(defaults=Defaults(max_unsent_tokens=4))
    desk.say(Generate(ID, prompt="a", credit=1))
    desk.engine.emit("x", 7)
    desk.take()
    for number in range(num_tokens):
        desk.engine.emit("y", number)
    if num_tokens == 4:
        assert desk.take() == []
        assert desk.service.num_unfinished == 1
        return
    (done,) = desk.take()
    assert isinstance(done, Done)
    assert (done.index, done.text, done.token_ids) == (1, "yyyyy", (0, 1, 2, 3, 4))
    assert done.finish_reason == "slow_reader"
    assert desk.engine.cancels == [(1, "slow_reader")]


def test_what_is_not_streamed_may_be_as_long_as_it_likes() -> None:
    desk = Desk(defaults=Defaults(max_unsent_tokens=1))
    messages = (ChatMessage("user", "x"),)
    desk.say(Chat(ID, messages=messages, stream=False, credit=1), BOB)
    for number in range(9):
        desk.engine.emit("y", number)
    assert desk.engine.cancels == []


# --- sessions -----------------------------------------------------------------------------------


def test_a_req_client_is_told_to_use_another_socket() -> None:
    desk = Desk()
    (error,) = desk.say(OpenSession(ID, lease_ms=1000), BOB)
    assert isinstance(error, Error)
    assert (error.code, error.retryable) == ("invalid_request", False)
    assert "DEALER" in error.message


async def test_a_lease_that_runs_out_ends_what_is_unfinished() -> None:
    desk = Desk()
    opened = Opened(ID, lease_ms=1000, incarnation=INCARNATION)
    assert desk.say(OpenSession(ID, lease_ms=1000)) == [opened]
    desk.say(Generate(ID, prompt="a"))
    desk.say(Register(OTHER, text="a"))
    desk.say(Generate(ID, prompt="b"), BOB)
    desk.take()
    desk.now_s += 1.0
    replies = await asyncio.wait_for(desk.until_sent(), 10)
    assert ends(replies) == [(ID, "lease_expired"), (OTHER, "cancelled")]
    assert desk.engine.cancels == [(1, "lease_expired"), (2, "lease_expired")]
    assert (desk.service.num_unfinished, desk.service.num_sessions) == (1, 0)
    await desk.service.close()


async def test_who_is_heard_of_keeps_the_lease() -> None:
    desk = Desk()
    for client in (ALICE, TEAM_ALICE):
        desk.say(OpenSession(ID, lease_ms=1000), client)
        desk.say(Generate(OTHER, prompt="a"), client)
    desk.now_s += 0.999
    desk.say(Ping(ID))
    desk.take()
    desk.now_s += 0.001
    await asyncio.wait_for(desk.until_sent(), 10)
    assert desk.engine.cancels == [(2, "lease_expired")]
    assert (desk.service.num_unfinished, desk.service.num_sessions) == (1, 1)
    await desk.service.close()


@pytest.mark.parametrize("has_session", [True, False])
async def test_good_bye_cancels_what_is_unfinished(has_session: bool) -> None:
    desk = Desk()
    if has_session:
        desk.say(OpenSession(ID, lease_ms=1000))
    desk.say(Generate(ID, prompt="a"))
    desk.say(Generate(OTHER, prompt="a"))
    desk.say(Generate(ID, prompt="b"), BOB)
    desk.take()
    *finals, closed = desk.say(CloseSession(MessageId("3")))
    assert ends(finals) == [(ID, "cancelled"), (OTHER, "cancelled")]
    assert closed == SessionClosed(MessageId("3"), num_cancelled=2)
    assert desk.say(CloseSession(ID)) == [SessionClosed(ID, num_cancelled=0)]
    assert (desk.service.num_unfinished, desk.service.num_sessions) == (1, 0)
    await desk.service.close()


async def test_a_session_of_a_client_that_has_gone_is_over() -> None:
    desk = Desk()
    desk.say(OpenSession(ID, lease_ms=1000))
    desk.service.on_client_gone(ALICE)
    assert desk.service.num_sessions == 0
    await desk.service.close()
