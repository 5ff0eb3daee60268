"""What of an answer is sent, and what is held back until there is credit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages import Logprobs, MessageId, Tokens
from runtime_cache.outflow import Outflow

ID = MessageId("g")


def piece(index: int, text: str, *token_ids: int) -> Tokens:
    return Tokens(ID, index=index, text=text, token_ids=token_ids)


def rest(outflow: Outflow) -> tuple[int, str, tuple[int, ...]]:
    """What an answer's last message would carry."""
    return outflow.num_sent, outflow.held_text, outflow.held_ids


def test_without_credit_in_the_request_everything_is_sent_at_once() -> None:
    outflow = Outflow(ID, is_streamed=True)
    assert outflow.take("a", (1,)) == piece(0, "a", 1)
    assert outflow.take("", (2, 3)) == piece(1, "", 2, 3)
    assert outflow.grant(5) is None
    assert rest(outflow) == (3, "", ())
    assert outflow.token_ids == [1, 2, 3]


def test_credit_is_spent_by_message_and_what_is_held_goes_together() -> None:
    outflow = Outflow(ID, is_streamed=True, credit=1)
    assert outflow.take("a", (1, 2)) == piece(0, "a", 1, 2)
    assert outflow.take("b", (3,)) is None
    assert outflow.take("c", (4, 5)) is None
    assert outflow.num_held == 3
    assert outflow.grant(1) == piece(2, "bc", 3, 4, 5)
    assert outflow.num_held == 0
    assert outflow.take("d", (6,)) is None
    assert rest(outflow) == (5, "d", (6,))


def test_credit_adds_up() -> None:
    outflow = Outflow(ID, is_streamed=True, credit=1)
    assert outflow.grant(1) is None
    assert outflow.take("a", (1,)) == piece(0, "a", 1)
    assert outflow.take("b", (2,)) == piece(1, "b", 2)
    assert outflow.take("c", (3,)) is None


@pytest.mark.parametrize("credit", [None, 1])
def test_what_is_not_streamed_is_held_to_the_end(credit: int | None) -> None:
    outflow = Outflow(ID, is_streamed=False, credit=credit)
    assert outflow.take("a", (1,)) is None
    assert outflow.grant(9) is None
    assert outflow.take("b", (2,)) is None
    assert rest(outflow) == (0, "ab", (1, 2))


def test_log_probabilities_stay_with_their_tokens() -> None:
    outflow = Outflow(ID, is_streamed=True, credit=1)
    one, two, three = (Logprobs(token, -0.5, ()) for token in (1, 2, 3))
    sent = outflow.take("a", (1,), (one,))
    assert sent is not None
    assert sent.logprobs == (one,)
    outflow.take("b", (2,), (two,))
    outflow.take("c", (3,), (three,))
    assert outflow.held_logprobs == (two, three)


@given(
    credit=st.none() | st.integers(1, 4),
    is_streamed=st.booleans(),
    moves=st.lists(st.integers(1, 3) | st.lists(st.integers(0, 9), max_size=3), max_size=30),
)
def test_the_parts_make_up_the_whole_whatever_happens(
    credit: int | None, is_streamed: bool, moves: list[int | list[int]]
) -> None:
    outflow = Outflow(ID, is_streamed=is_streamed, credit=credit)
    sent: list[Tokens] = []
    computed: list[int] = []
    granted = credit or 0
    for move in moves:
        if isinstance(move, int):
            granted += move
            new = outflow.grant(move)
        else:
            computed += move
            new = outflow.take("".join(map(str, move)), move)
        sent += [new] if new is not None else []
    ids = [token for message in sent for token in message.token_ids]
    assert ids + list(outflow.held_ids) == computed == outflow.token_ids
    text = "".join(message.text for message in sent) + outflow.held_text
    assert text == "".join(map(str, computed))
    counts = [len(message.token_ids) for message in sent]
    assert [message.index for message in sent] == [sum(counts[:i]) for i in range(len(counts))]
    if not is_streamed:
        assert sent == []
    elif credit is not None:
        assert len(sent) <= granted
