"""The client's session: ids, routing, stale and unattributable replies, answers put together."""

from __future__ import annotations

from typing import Any

import pytest

from ipc.answers import Answer, Piece, Result
from ipc.arguments import (
    Conversation,
    content_fields,
    conversation,
    explain_fields,
    prompt_fields,
    sampling_fields,
)
from ipc.codec import Encoding, Limits, decode_request, encode, sniff
from ipc.errors import Closed, MessageTooLarge, ProtocolError, ServerError
from ipc.messages import (
    AnyReply,
    CacheReport,
    Cancel,
    Chat,
    ChatMessage,
    Done,
    Error,
    Generate,
    Logprobs,
    MessageId,
    Ok,
    Ping,
    Pong,
    Timing,
    Tokens,
    TopToken,
    Usage,
)
from ipc.session import Call, Session

USAGE = Usage(550, 500, 50, 3)
TIMING = Timing(0.5, 25.0, 75.0, 20.0)
REPORT = CacheReport("hit")


def tokens(call: Call, index: int, text: str, *token_ids: int) -> Tokens:
    return Tokens(call.id, index=index, text=text, token_ids=token_ids)


def done(call: Call, index: int, text: str = "", *token_ids: int) -> Done:
    return Done(
        call.id,
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason="stop",
        usage=USAGE,
        timing=TIMING,
        cache=REPORT,
    )


def pong(call: Call) -> Pong:
    return Pong(call.id, version="1", uptime_s=2.0)


class Wire:
    """A session and the daemon's side of it, without a socket."""

    def __init__(self, encoding: Encoding = Encoding.MSGPACK) -> None:
        self.session = Session(encoding)
        self.encoding = encoding

    def start(self, kind: Any = Generate, **fields: Any) -> Call:
        fields = fields or ({"prompt": "p"} if kind is Generate else {})
        return self.session.start(kind, fields)

    def reply(self, reply: AnyReply) -> tuple[Call, ...]:
        return tuple(self.session.receive(encode(reply, self.encoding)))


@pytest.mark.parametrize("encoding", list(Encoding))
def test_requests_are_numbered_and_encoded(encoding: Encoding) -> None:
    session = Session(encoding)
    first = session.start(Ping, {})
    payload = first.payload
    assert first.id == "1"
    assert sniff(payload) is encoding
    assert decode_request(payload, Limits()) == Ping(MessageId("1"))
    second = session.start(Generate, {"prompt": "p", "top_k": 3})
    payload = second.payload
    assert second.id == "2"
    assert decode_request(payload, Limits()) == Generate(MessageId("2"), prompt="p", top_k=3)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"promt": "p"}, TypeError),
        ({}, ValueError),
        ({"prompt": "p", "prompt_ids": (1,)}, ValueError),
        ({"prompt": object()}, TypeError),
        ({"prompt": "p" * 100}, MessageTooLarge),
        ({"prompt": "p", "seed": 2**64}, ValueError),
    ],
)
def test_a_request_that_is_wrong_in_itself_starts_no_call(
    fields: dict[str, Any], error: type[Exception]
) -> None:
    session = Session(limits=Limits(max_wire_bytes=100))
    with pytest.raises(error):
        session.start(Generate, fields)
    assert session.fail_all(Closed("x")) == ()


def test_the_largest_request() -> None:
    num_bytes = len(Session().start(Generate, {"prompt": "p"}).payload)
    assert Session(limits=Limits(max_wire_bytes=num_bytes)).start(Generate, {"prompt": "p"})
    with pytest.raises(MessageTooLarge):
        Session(limits=Limits(max_wire_bytes=num_bytes - 1)).start(Generate, {"prompt": "p"})


def test_replies_go_to_their_calls() -> None:
    wire = Wire()
    first, second = wire.start(), wire.start()
    assert wire.reply(tokens(second, 0, "b", 7)) == (second,)
    assert wire.reply(tokens(first, 0, "a", 5)) == (first,)
    assert first.take() == tokens(first, 0, "a", 5)
    assert first.take() is None
    assert wire.reply(done(first, 1)) == (first,)
    assert first.is_finished
    assert first.take() == done(first, 1)
    assert second.take() == tokens(second, 0, "b", 7)
    assert not second.is_finished


def test_after_its_last_reply_a_call_takes_nothing_more() -> None:
    wire = Wire()
    call = wire.start(Ping)
    wire.reply(pong(call))
    assert call.take() == pong(call)
    with pytest.raises(Closed, match="the call `ping` is over"):
        call.take()
    assert wire.reply(pong(call)) == ()
    assert wire.session.num_stale == 1


def test_an_error_reply_is_raised_with_all_it_says() -> None:
    wire = Wire()
    call = wire.start()
    wire.reply(tokens(call, 0, "a", 5))
    wire.reply(Error(id=call.id, code="queue_full", message="m", retryable=True, retry_after_ms=5))
    assert call.take() == tokens(call, 0, "a", 5)
    with pytest.raises(ServerError, match=r"^m \(queue_full\)$") as caught:
        call.take()
    error = caught.value
    assert (error.code, error.retryable, error.retry_after_ms) == ("queue_full", True, 5)


def test_an_error_without_id_belongs_to_the_only_open_call() -> None:
    wire = Wire()
    call = wire.start()
    nameless = Error(id=None, code="too_large", message="m", retryable=False)
    assert wire.reply(nameless) == (call,)
    with pytest.raises(ServerError, match="too_large"):
        call.take()


def test_an_error_without_id_is_stale_when_it_could_belong_to_several() -> None:
    wire = Wire()
    calls = wire.start(), wire.start()
    nameless = Error(id=None, code="too_large", message="m", retryable=False)
    assert wire.reply(nameless) == ()
    assert wire.session.num_stale == 1
    assert [call.take() for call in calls] == [None, None]


@pytest.mark.parametrize("index", [0, 2])
def test_a_lost_or_repeated_message_ends_the_answer(index: int) -> None:
    wire = Wire()
    call = wire.start()
    wire.reply(tokens(call, 0, "a", 5))
    assert wire.reply(tokens(call, index, "b", 6)) == (call,)
    assert call.take() == tokens(call, 0, "a", 5)
    with pytest.raises(ProtocolError, match=f"expected token 1 next, got {index}"):
        call.take()
    assert wire.reply(done(call, 1)) == ()


def test_an_unreadable_reply_ends_every_call() -> None:
    wire = Wire()
    calls = wire.start(), wire.start(Ping)
    assert tuple(wire.session.receive(b"\xc1")) == calls
    for call in calls:
        with pytest.raises(ProtocolError, match="not readable"):
            call.take()


def test_giving_up_sends_one_cancel_and_makes_late_replies_stale() -> None:
    wire = Wire()
    call = wire.start()
    payload = wire.session.give_up(call)
    assert payload is not None
    assert decode_request(payload, Limits()) == Cancel(MessageId("2"), target=MessageId("1"))
    assert wire.session.give_up(call) is None
    assert wire.reply(tokens(call, 0, "a", 5)) == ()
    assert wire.reply(Ok(MessageId("2"))) == ()
    assert wire.session.num_stale == 2
    with pytest.raises(Closed):
        call.take()


def test_a_finished_call_needs_no_cancel() -> None:
    wire = Wire()
    call = wire.start()
    wire.reply(done(call, 0))
    assert wire.session.give_up(call) is None


def test_closing_ends_every_call_after_what_has_come() -> None:
    wire = Wire()
    call = wire.start()
    wire.reply(tokens(call, 0, "a", 5))
    assert wire.session.fail_all(Closed("bye")) == (call,)
    assert wire.session.open_calls == ()
    assert call.take() == tokens(call, 0, "a", 5)
    with pytest.raises(Closed, match="bye"):
        call.take()


def test_an_answer_is_the_concatenation_of_its_messages() -> None:
    call = Call(MessageId("1"), "generate")
    entry = Logprobs(5, -0.5, (TopToken(5, -0.5),))
    answer = Answer()
    first = Tokens(call.id, index=0, text="ab", token_ids=(5,), logprobs=(entry,))
    assert answer.add(first) == Piece("ab", (5,), (entry,))
    assert answer.add(tokens(call, 1, "", 6)) == Piece("", (6,))
    assert not answer.is_done
    assert answer.add(done(call, 2, "c", 7)) == Piece("c", (7,))
    assert answer.is_done
    expected = Result("abc", (5, 6, 7), "stop", None, USAGE, TIMING, (entry,), REPORT)
    assert answer.result() == expected


def test_an_answer_without_its_end_has_no_result() -> None:
    with pytest.raises(Closed, match="given up before its end"):
        Answer().result()


def test_an_answer_is_made_of_nothing_else() -> None:
    with pytest.raises(ProtocolError, match="expected `tokens` or `done`, got `ok`"):
        Answer().add(Ok(MessageId("1")))


def test_arguments_take_the_form_of_the_messages() -> None:
    assert sampling_fields({"stop": "x", "logit_bias": {3: 1.0}, "stop_token_ids": [1]}) == {
        "stop": ("x",),
        "logit_bias": {"3": 1.0},
        "stop_token_ids": (1,),
    }
    assert sampling_fields({"stop": ["a", "b"], "top_k": 1}) == {"stop": ("a", "b"), "top_k": 1}
    assert prompt_fields(None, iter([1, 2]), "p") == {
        "prompt": None,
        "prompt_ids": (1, 2),
        "prefix_id": "p",
    }
    assert content_fields() == {}
    assert content_fields(text="t", prompt_ids=[1], messages=[]) == {
        "text": "t",
        "prompt_ids": (1,),
        "messages": (),
    }


def test_what_is_to_be_explained_takes_the_form_of_the_message() -> None:
    assert explain_fields(None, range(2), None, "p", "a") == {
        "prompt": None,
        "prompt_ids": (0, 1),
        "messages": None,
        "prefix_id": "p",
        "tenant": "a",
    }
    turns = explain_fields(None, None, [{"role": "user", "content": "u"}], None, "")["messages"]
    assert turns == (ChatMessage("user", "u"),)


def test_conversations_may_be_dicts_or_messages() -> None:
    turns: Conversation = [{"role": "system", "content": "s"}, ChatMessage("user", "u")]
    assert conversation(turns) == (ChatMessage("system", "s"), ChatMessage("user", "u"))
    assert Session().start(Chat, {"messages": conversation(turns)}).kind == "chat"


@pytest.mark.parametrize("turn", [{"role": "robot", "content": "x"}, {"role": "user"}, {}])
def test_a_conversation_that_is_none_is_refused(turn: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="messages: "):
        conversation([turn])
