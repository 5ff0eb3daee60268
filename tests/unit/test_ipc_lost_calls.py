"""What a session makes of lost connections, other daemons, credit and leases."""

from __future__ import annotations

from typing import Any

import pytest

from ipc.codec import Encoding, Limits, decode_request, encode
from ipc.errors import ConnectionLost, ServerError
from ipc.messages import (
    AnyReply,
    AnyRequest,
    Credit,
    Done,
    Error,
    Evict,
    Explain,
    Generate,
    GetInfo,
    ListEntries,
    MessageId,
    Opened,
    OpenSession,
    Ping,
    Pong,
    Register,
    Timing,
    Tokenize,
    Tokenized,
    Tokens,
    Usage,
)
from ipc.session import Call, Session

ONE, OTHER = "1" * 16, "2" * 16


@pytest.fixture
def session() -> Session:
    return Session(Encoding.JSON, endpoint="ipc://x")


def read(payload: bytes | None) -> AnyRequest:
    assert payload is not None
    return decode_request(payload, Limits())


def tell(session: Session, reply: AnyReply) -> list[Call]:
    return list(session.receive(encode(reply, Encoding.JSON)))


def pong(session: Session, incarnation: str) -> list[Call]:
    """The answer to the session's own question."""
    asked = read(session.probe())
    return tell(session, Pong(asked.id, version="1", uptime_s=1, incarnation=incarnation))


def tokens(call: Call, index: int) -> Tokens:
    return Tokens(call.id, index=index, text="x", token_ids=(1,))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Ping, {}),
        (GetInfo, {}),
        (Tokenize, {"text": "x"}),
        (ListEntries, {}),
        (Explain, {"prompt": "x"}),
    ],
)
def test_what_is_harmless_is_asked_once_more(
    session: Session, kind: type[AnyRequest], fields: dict[str, Any]
) -> None:
    call = session.start(kind, fields)
    first = session.lost()
    assert (first.repeated, first.failed) == ([call.payload], [])
    second = session.lost()
    assert (second.repeated, second.failed) == ([], [call])
    with pytest.raises(ConnectionLost, match=rf"ipc://x .* `{call.kind}` .*; ask again"):
        call.take()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(Generate, {"prompt": "x"}), (Register, {"text": "x"}), (Evict, {"all": True})],
)
def test_what_may_not_be_is_for_the_caller_to_say(
    session: Session, kind: type[AnyRequest], fields: dict[str, Any]
) -> None:
    call = session.start(kind, fields)
    assert session.lost().failed == [call]
    with pytest.raises(ConnectionLost) as caught:
        call.take()
    assert caught.value.retryable
    assert session.open_calls == ()
    assert session.give_up(call) is None


def test_what_came_before_the_loss_can_still_be_taken(session: Session) -> None:
    call = session.start(Generate, {"prompt": "x"})
    tell(session, tokens(call, 0))
    session.lost()
    assert call.take() == tokens(call, 0)
    with pytest.raises(ConnectionLost):
        call.take()


def test_another_daemon_behind_the_same_connection_ends_what_the_first_was_asked(
    session: Session,
) -> None:
    early = session.start(Generate, {"prompt": "asked before anything was known"})
    assert pong(session, ONE) == []
    call = session.start(Generate, {"prompt": "x"})
    assert pong(session, ONE) == []
    assert pong(session, OTHER) == [early, call]
    for lost in (early, call):
        with pytest.raises(ConnectionLost):
            lost.take()
    later = session.start(Generate, {"prompt": "x"})
    assert pong(session, OTHER) == []
    assert session.open_calls == (later,)
    assert session.num_stale == 0


def test_the_first_that_is_heard_of_is_the_one_that_was_asked(session: Session) -> None:
    early = session.start(Generate, {"prompt": "x"})
    assert pong(session, ONE) == []
    assert pong(session, OTHER) == [early]


def test_a_daemon_that_does_not_say_which_it_is_fails_nothing(session: Session) -> None:
    call = session.start(Generate, {"prompt": "x"})
    assert pong(session, "") == []
    assert pong(session, "") == []
    assert session.open_calls == (call,)


def test_after_a_loss_the_next_daemon_is_a_new_one(session: Session) -> None:
    pong(session, ONE)
    call = session.start(Ping, {})
    session.lost()
    assert pong(session, OTHER) == []
    assert session.open_calls == (call,)


def test_one_question_of_its_own_at_a_time(session: Session) -> None:
    assert session.probe() is not None
    assert session.probe() is None
    session.lost()
    assert session.probe() is not None


@pytest.mark.parametrize(("window", "grants"), [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 1]), (4, [2, 2])])
def test_credit_is_granted_as_messages_are_taken(
    session: Session, window: int, grants: list[int]
) -> None:
    call = session.start(Generate, {"prompt": "x"}, window)
    request = read(call.payload)
    assert isinstance(request, Generate)
    assert request.credit == window
    granted = []
    for index in range(4):
        tell(session, tokens(call, index))
        assert session.grant(call) is None or window == 1
        call.take()
        if (payload := session.grant(call)) is not None:
            granted.append(read(payload))
    assert [grant.credit for grant in granted if isinstance(grant, Credit)] == grants
    assert {grant.target for grant in granted if isinstance(grant, Credit)} == {call.id}


def test_an_answer_that_has_ended_gets_no_credit(session: Session) -> None:
    call = session.start(Generate, {"prompt": "x"}, 1)
    tell(session, tokens(call, 0))
    usage, timing = Usage(1, 0, 1, 1), Timing(0, 0, 0, None)
    end = Done(
        call.id,
        index=1,
        text="",
        token_ids=(),
        finish_reason="length",
        usage=usage,
        timing=timing,
    )
    tell(session, end)
    call.take()
    assert session.grant(call) is None


def test_a_lease_that_is_refused_ends_in_an_error_at_the_next_call(session: Session) -> None:
    opening = read(session.lease(5000))
    assert isinstance(opening, OpenSession)
    assert opening.lease_ms == 5000
    tell(session, Opened(opening.id, lease_ms=5000, incarnation=ONE))
    assert session.incarnation == ONE
    session.start(Ping, {})
    opening = read(session.lease(5000))
    tell(session, Error(id=opening.id, code="unknown_type", message="no", retryable=False))
    with pytest.raises(ServerError, match="unknown_type"):
        session.start(Ping, {})


def test_answers_to_calls_with_ids_are_told_from_its_own(session: Session) -> None:
    call = session.start(Tokenize, {"text": "x"})
    pong(session, ONE)
    assert tell(session, Tokenized(call.id, token_ids=(1,))) == [call]
    tell(session, Tokenized(MessageId("77"), token_ids=(1,)))
    assert session.num_stale == 1
