"""Long texts, which are tokenised on a worker thread: what may happen meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ipc.messages import (
    AnyReply,
    AnyRequest,
    Cancel,
    Chat,
    ChatMessage,
    Done,
    Error,
    Explain,
    Explained,
    Generate,
    MessageId,
    Ok,
    Ping,
    Register,
    Timing,
    Tokenize,
    Tokenized,
    Usage,
)
from om_models.chat import ChatTemplate
from runtime_cache import reading
from runtime_cache.errors import InvalidRequest, UnknownEntry
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.intake import Prompt
from runtime_cache.work import Work
from tests.support.desk import (
    ADMIN,
    ALICE,
    BOB,
    LONG,
    TEAM,
    TEAM_ALICE,
    TEMPLATE,
    VOCAB,
    Desk,
    HeldIntake,
    tokenizer,
)

THIRD = TenantName("team-b")
THIRD_ALICE = replace(ALICE, tenant=THIRD)
ID, OTHER = MessageId("1"), MessageId("2")
LONG_TURNS = (ChatMessage("user", LONG),)
CANCELLED = Error(id=ID, code="cancelled", message="the request was cancelled", retryable=True)
NEVER_STARTED = Done(
    ID,
    index=0,
    text="",
    token_ids=(),
    finish_reason="cancelled",
    usage=Usage(0, 0, 0, 0),
    timing=Timing(1500.0, None, 1500.0, None),
)
DRAINING = Error(
    id=ID,
    code="draining",
    message="the daemon is shutting down",
    retryable=True,
    retry_after_ms=5000,
)


class HeldDesk(Desk):
    """A desk whose intake reads nothing before `let_read`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.intake = HeldIntake(tokenizer(), ChatTemplate(TEMPLATE), VOCAB, error=error)
        super().__init__(intakes=dict.fromkeys((DEFAULT_TENANT, TEAM, THIRD), self.intake))

    def let_read(self) -> None:
        self.intake.may_read.set()

    async def until_reading(self, number: int) -> None:
        """Wait until the worker thread has begun with so many texts."""
        while self.intake.num_read < number:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def order(self, number: int) -> list[str]:
        """The ids of the next so many replies."""
        ids: list[str] = []
        while len(ids) < number:
            ids += [str(reply.id) for reply in await self.until_sent()]
        return ids

    async def settle(self) -> None:
        """Wait until everything that is being tokenised has been."""
        self.let_read()
        await self.service._reader.settle()


@pytest.mark.parametrize(
    "message",
    [Generate(ID, prompt=LONG), Chat(ID, messages=LONG_TURNS), Register(ID, text=LONG)],
)
async def test_a_long_text_holds_up_no_one(message: AnyRequest) -> None:
    desk = HeldDesk()
    assert desk.say(message) == []
    assert desk.engine.requests == []
    assert isinstance(desk.say(Ping(OTHER))[0].id, str)
    await desk.settle()
    assert len(desk.prompt) >= len(LONG)
    assert desk.service.num_unfinished == 1
    desk.engine.finish("registered" if isinstance(message, Register) else "length")
    assert desk.service.num_unfinished == 0
    await desk.service.close()


async def test_a_long_text_is_tokenised_as_a_short_one() -> None:
    desk = HeldDesk()
    assert desk.say(Tokenize(ID, text=LONG)) == []
    desk.let_read()
    assert await desk.until_sent() == [Tokenized(ID, token_ids=(256, *[87] * len(LONG)))]
    assert desk.service.num_unfinished == 0
    await desk.service.close()


@pytest.mark.parametrize(
    ("message", "tenant"),
    [
        (Explain(ID, prompt=LONG), DEFAULT_TENANT),
        (Explain(ID, messages=LONG_TURNS, tenant=TEAM), TEAM),
    ],
)
async def test_a_long_text_is_explained_beside_the_loop(message: Explain, tenant: str) -> None:
    desk = HeldDesk()
    assert desk.say(message, ADMIN) == []
    assert isinstance(desk.say(Ping(OTHER), ADMIN)[0].id, str)
    desk.take()
    desk.let_read()
    (reply,) = await desk.until_sent()
    assert isinstance(reply, Explained)
    ((verb, asked_tenant, tokens),) = desk.engine.asked
    assert (verb, asked_tenant) == ("explain", tenant)
    assert isinstance(tokens, list)
    assert reply.prompt_tokens == len(tokens) >= len(LONG)
    assert (desk.engine.requests, desk.service.num_unfinished) == ([], 0)
    await desk.service.close()


async def test_an_explanation_that_the_engine_refuses() -> None:
    desk = HeldDesk()
    desk.engine.error = UnknownEntry("no")
    desk.say(Explain(ID, prompt=LONG), ADMIN)
    desk.let_read()
    assert await desk.until_sent() == [
        Error(id=ID, code="unknown_entry", message="no", retryable=False)
    ]
    assert desk.service.num_unfinished == 0
    await desk.service.close()


async def test_the_deadline_counts_from_the_arrival() -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG, deadline_ms=2000))
    desk.now_s += 1.5
    await desk.settle()
    assert (desk.request.arrived_s, desk.request.deadline_s) == (100.0, 102.0)
    desk.engine.finish()
    await desk.service.close()


@pytest.mark.parametrize(
    ("message", "final"),
    [
        (Generate(ID, prompt=LONG), NEVER_STARTED),
        (Chat(ID, messages=LONG_TURNS), NEVER_STARTED),
        (Register(ID, text=LONG), CANCELLED),
        (Tokenize(ID, text=LONG), CANCELLED),
        (Explain(ID, prompt=LONG), CANCELLED),
        (Explain(ID, messages=LONG_TURNS, tenant=TEAM), CANCELLED),
    ],
)
async def test_a_cancel_while_it_is_tokenised(message: AnyRequest, final: AnyReply) -> None:
    desk = HeldDesk()
    desk.say(message)
    desk.now_s += 1.5
    assert desk.say(Cancel(OTHER, target=ID)) == [final, Ok(OTHER)]
    assert desk.service.num_unfinished == 0
    await desk.settle()
    assert (desk.engine.requests, desk.engine.asked) == ([], [])
    assert len(desk.sent) == 2
    await desk.service.close()


async def test_a_cancel_after_it_was_tokenised() -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG))
    await desk.settle()
    final, ok = desk.say(Cancel(OTHER, target=ID))
    assert isinstance(final, Done)
    assert (final.finish_reason, ok) == ("cancelled", Ok(OTHER))
    assert desk.engine.cancels == [(1, "client")]
    assert desk.service.num_unfinished == 0
    await desk.service.close()


async def test_an_id_may_be_used_again_while_its_cancelled_text_is_read() -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG))
    desk.say(Cancel(OTHER, target=ID))
    desk.take()
    assert desk.say(Tokenize(ID, text=LONG)) == []
    desk.let_read()
    (reply,) = await desk.until_sent()
    assert isinstance(reply, Tokenized)
    assert desk.engine.requests == []
    await desk.service.close()


@pytest.mark.parametrize("reason", ["client_gone", "slow_reader"])
async def test_a_client_that_is_gone_or_does_not_read_starts_nothing(reason: str) -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG))
    desk.say(Generate(ID, prompt=LONG), BOB)
    tell = {"client_gone": desk.service.on_client_gone, "slow_reader": desk.service.on_slow_reader}
    tell[reason](ALICE)
    assert desk.service.num_unfinished == 1
    await desk.settle()
    assert len(desk.engine.requests) == 1
    ends = [(client, getattr(reply, "finish_reason", "")) for client, reply in desk.sent]
    assert ends == ([(ALICE, "slow_reader")] if reason == "slow_reader" else [])
    desk.take()
    desk.engine.finish()
    assert [client for client, _ in desk.sent] == [BOB]
    await desk.service.close()


async def test_what_nobody_waits_for_is_not_tokenised() -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG))
    desk.say(Generate(OTHER, prompt=LONG))
    await desk.until_reading(1)  # the second waits behind it
    desk.service.on_client_gone(ALICE)
    await desk.settle()
    await desk.service.close()
    assert desk.intake.num_read == 1


async def test_a_deadline_ends_a_request_that_waits_to_be_tokenised() -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG, deadline_ms=2))
    (final,) = await desk.until_sent()
    assert isinstance(final, Done)
    assert final.finish_reason == "deadline"
    assert desk.service.num_unfinished == 0
    await desk.settle()
    assert desk.engine.requests == []
    await desk.service.close()


@pytest.mark.parametrize(("num_chars", "is_taken"), [(5000, True), (5001, False)])
async def test_texts_that_wait_to_be_tokenised_are_bounded(
    monkeypatch: pytest.MonkeyPatch, num_chars: int, is_taken: bool
) -> None:
    monkeypatch.setattr(reading, "_MAX_CHARS", len(LONG) + 5000)
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG))
    desk.say(Generate(ID, prompt="z" * 9999), TEAM_ALICE)  # another tenant's limit
    replies = desk.say(Generate(OTHER, prompt="y" * num_chars))
    if is_taken:
        assert replies == []
    else:
        (refusal,) = replies
        assert isinstance(refusal, Error)
        assert (refusal.code, refusal.retry_after_ms) == ("queue_full", 5000)
        assert refusal.message == "too much text of other prompts waits to be tokenised"
    desk.say(Cancel(MessageId("3"), target=ID))
    desk.say(Cancel(MessageId("4"), target=OTHER))
    await desk.settle()
    desk.take()
    assert desk.say(Generate(OTHER, prompt="y" * num_chars)) == []  # there is room again
    await desk.service.close()


async def test_prompts_that_wait_are_bounded_in_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_PROMPTS", 2)
    desk = HeldDesk()
    desk.say(Tokenize(MessageId("read"), text=LONG))
    await desk.until_reading(1)
    answers = [desk.say(Tokenize(MessageId(f"{number}"), text=LONG)) for number in range(3)]
    assert answers[:2] == [[], []]
    ((refused,),) = answers[2:]
    assert isinstance(refused, Error)
    assert refused.code == "queue_full"
    assert desk.say(Tokenize(MessageId("0"), text=LONG), TEAM_ALICE) == []
    await desk.settle()
    await desk.service.close()


class WaitingTemplate(ChatTemplate):
    """One that says of itself what a daemon's says."""

    may_wait = True


async def test_a_short_conversation_is_read_beside_the_loop_if_its_template_may_wait() -> None:
    intake = HeldIntake(tokenizer(), WaitingTemplate(TEMPLATE), VOCAB)
    desk = Desk(intakes={DEFAULT_TENANT: intake})
    assert desk.say(Chat(ID, messages=(ChatMessage("user", "Hi"),))) == []
    assert isinstance(desk.say(Ping(OTHER))[0].id, str)
    await asyncio.to_thread(intake.may_read.set)
    while not desk.engine.requests:  # noqa: ASYNC110
        await asyncio.sleep(0)
    desk.engine.finish("length")
    await desk.service.close()


async def test_one_tenants_flood_refuses_nothing_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_MAX_CHARS", 2 * len(LONG))
    desk = HeldDesk()
    for number in range(9):
        desk.say(Tokenize(MessageId(f"{number}"), text=LONG))
    assert [getattr(reply, "code", "") for reply in desk.take()] == ["queue_full"] * 7
    for number in range(2):
        assert desk.say(Tokenize(MessageId(f"{number}"), text=LONG), TEAM_ALICE) == []
    # What an operator asks about a tenant is that tenant's.
    (refused,) = desk.say(Explain(OTHER, prompt=LONG, tenant=TEAM), ADMIN)
    assert isinstance(refused, Error)
    assert refused.code == "queue_full"
    await desk.settle()
    await desk.service.close()


async def test_tenants_take_turns() -> None:
    desk = HeldDesk()
    for client, name in ((ALICE, "a"), (TEAM_ALICE, "b"), (THIRD_ALICE, "c")):
        for number in range(3):
            desk.say(Tokenize(MessageId(f"{name}{number}"), text=name * 5000), client)
    desk.say(Tokenize(MessageId("b3"), text="b" * 5000), TEAM_ALICE)
    desk.let_read()
    assert await desk.order(10) == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2", "b3"]
    await desk.service.close()


async def test_who_comes_while_another_is_read_is_next() -> None:
    desk = HeldDesk()
    for number in range(3):
        desk.say(Tokenize(MessageId(f"a{number}"), text=LONG))
    await desk.until_reading(1)
    desk.say(Tokenize(MessageId("b"), text=LONG), TEAM_ALICE)
    desk.let_read()
    assert await desk.order(4) == ["a0", "b", "a1", "a2"]
    await desk.service.close()


async def test_what_is_given_up_costs_nobody_a_turn() -> None:
    desk = HeldDesk()
    for number in range(3):
        desk.say(Tokenize(MessageId(f"a{number}"), text=LONG))
        desk.say(Tokenize(MessageId(f"b{number}"), text=LONG), TEAM_ALICE)
    await desk.until_reading(1)
    desk.service.on_client_gone(TEAM_ALICE)
    desk.say(Cancel(OTHER, target=MessageId("a1")))
    desk.take()
    desk.let_read()
    assert await desk.order(2) == ["a0", "a2"]
    assert desk.intake.num_read == 2
    await desk.service.close()


async def test_a_failure_of_one_costs_the_next_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = HeldDesk()
    reader, go_on = desk.service._reader, desk.service._reader._go_on

    def broken_once(work: Work, prompt: Prompt) -> None:
        monkeypatch.setattr(reader, "_go_on", go_on)
        raise ZeroDivisionError

    monkeypatch.setattr(reader, "_go_on", broken_once)
    for message_id in (ID, OTHER):
        desk.say(Tokenize(message_id, text=LONG))
    desk.let_read()
    assert await desk.order(2) == [ID, OTHER]
    await desk.service.close()


async def test_a_text_that_cannot_be_read() -> None:
    desk = HeldDesk(InvalidRequest("no"))
    desk.say(Generate(ID, prompt=LONG))
    desk.let_read()
    assert await desk.until_sent() == [
        Error(id=ID, code="invalid_request", message="no", retryable=False)
    ]
    assert desk.service.num_unfinished == 0
    await desk.service.close()


@pytest.mark.parametrize("text", ["short", LONG])
async def test_a_bug_on_the_way_is_answered_too(text: str) -> None:
    desk = HeldDesk(ZeroDivisionError())
    desk.let_read()
    desk.say(Generate(ID, prompt=text))
    sentence = "the daemon failed on this request; its log has the details"
    assert await desk.until_sent() == [
        Error(id=ID, code="internal", message=sentence, retryable=False)
    ]
    assert desk.service.num_unfinished == 0
    await desk.service.close()


async def test_close_answers_what_was_not_read_and_what_comes_later() -> None:
    desk = HeldDesk()
    desk.say(Generate(ID, prompt=LONG))
    desk.say(Tokenize(OTHER, text=LONG))
    closing = asyncio.ensure_future(desk.service.close())
    assert [reply.id for reply in await desk.until_sent()] == [ID, OTHER]
    assert desk.say(Generate(ID, prompt=LONG)) == [DRAINING]
    assert desk.say(Tokenize(ID, text="short")) == [DRAINING]
    desk.let_read()
    await closing
    await desk.service.close()
    assert desk.service.num_unfinished == 0
    assert desk.engine.requests == []
