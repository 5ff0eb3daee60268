"""One request's answer: tokens in, text out, nothing lost at the end."""

import numpy as np
import pytest

from runtime_cache.engine.answer import Answer
from runtime_cache.engine.request import NewRequest, Sampled, SamplingParams
from runtime_cache.engine.stopping import StopResult
from runtime_cache.ids import RequestId

EOS = 2


class Halves:
    """Token 1 begins a character, token 3 ends it, others are letters."""

    def __init__(self) -> None:
        self._is_open = False

    def step(self, token_id: int) -> str:
        if token_id == 1:
            self._is_open = True
            return ""
        self._is_open = False
        return "é" if token_id == 3 else chr(token_id)

    def flush(self) -> str:
        return "\ufffd" if self._is_open else ""

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"


def answer(*stops: str) -> Answer:
    return Answer(
        NewRequest(
            RequestId(1),
            np.ones(1, np.int32),
            SamplingParams(stop=stops),
            eos_token_ids=frozenset({EOS}),
            detokenizer=Halves(),
        )
    )


def feed(one: Answer, *token_ids: int) -> list[tuple[str, StopResult]]:
    taken = [one.take(Sampled(token_id)) for token_id in token_ids]
    return [(emitted.text, result) for emitted, result in taken]


@pytest.mark.parametrize(
    ("token_ids", "text"), [((97, 1, 3, EOS), "aé"), ((97, 1, EOS), "a\ufffd"), ((EOS,), "")]
)
def test_an_end_token_shows_what_was_incomplete(token_ids: tuple[int, ...], text: str) -> None:
    pieces = feed(answer(), *token_ids)
    assert "".join(piece for piece, _ in pieces) == text
    assert [result.stop for _, result in pieces] == [None] * (len(pieces) - 1) + ["<2>"]


def test_held_text_stands_before_the_incomplete_character() -> None:
    pieces = feed(answer("ab"), 97, 1, EOS)
    assert [piece for piece, _ in pieces] == ["", "", "a\ufffd"]


def test_the_rest_of_a_cut_answer() -> None:
    one = answer("ab")
    feed(one, 97, 1)
    assert one.rest() == StopResult("a\ufffd")
