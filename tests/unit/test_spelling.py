"""Which bytes of a text its tokens stand for, and the tokens that divide it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from om_models.null_model import byte_level_library
from om_models.tokenizer import Tokenizer
from tests.support.vocabularies import VOCABULARIES, hard_texts, vocabulary

#: The vocabulary that can write every text (the cut one of SmolLM2 lacks some bytes).
EXACT = ("bytes",)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_bos=False).tolist()
    return found


def ends(tokenizer: Tokenizer, text: str) -> list[int] | None:
    found = tokenizer.ends(tokenizer.encode(text, add_bos=True), text.encode())
    return None if found is None else found.tolist()


def divider_names(tokenizer: Tokenizer) -> list[str]:
    every_id = np.arange(tokenizer.vocab_size, dtype=np.int32)
    found = np.flatnonzero(tokenizer.spelling.is_divider(every_id)).tolist()
    return [tokenizer.token_text(token) for token in found]


def with_added(*tokens: AddedToken) -> Tokenizer:
    library = byte_level_library([])
    library.add_tokens(list(tokens))
    return Tokenizer(library, None, ())


def special(name: str, **options: bool) -> AddedToken:
    return AddedToken(name, special=True, normalized=False, **options)


# --- ends ----------------------------------------------------------------------------------------


def test_each_token_ends_where_its_bytes_do() -> None:
    assert ends(vocabulary("bytes"), "aé</s>b") == [0, 1, 2, 3, 7, 8]
    assert ends(vocabulary("bytes"), "<s>a") == [3, 4]
    assert ends(vocabulary("smollm2"), "Hello the<|im_end|>\n")[-3:] == [9, 19, 20]  # type: ignore[index]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_an_empty_text(name: str) -> None:
    tokenizer = vocabulary(name)
    assert ends(tokenizer, "") == [0] * (tokenizer.bos_token_id is not None)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # `▁` before each part takes no room, and is not taken for a space of the text.
        ("sentencepiece", "H", [0, 0, 1]),
        ("sentencepiece", " H", [0, 1, 2]),
        ("sentencepiece", "H</s>H", [0, 0, 1, 5, 5, 6]),
        ("sentencepiece", "H</s> H", [0, 0, 1, 5, 6, 7]),
        ("sentencepiece", "</s></s>", [0, 4, 8]),
        ("sentencepiece without prefix", " H</s>H", [0, 1, 2, 6, 7]),
        ("metaspace always", "H</s>H", [0, 1, 5, 5, 6]),
        ("metaspace always", " H</s> H", [1, 2, 6, 7, 8]),
        ("metaspace first", "H</s>H", [0, 1, 5, 6]),
        ("metaspace first", "</s> H", [4, 5, 6]),
        ("metaspace never", "H</s>H", [1, 5, 6]),
    ],
)
def test_the_space_before_a_text(name: str, text: str, expected: list[int]) -> None:
    assert ends(vocabulary(name), text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sentencepiece", "▁a"),  # comes back as a space
        ("composing", "e\u0301"),  # comes back as one letter
        ("swallowing", "<s>  a"),  # the blanks are part of the token
    ],
)
def test_what_is_not_spelled_exactly_is_not_guessed(name: str, text: str) -> None:
    assert ends(vocabulary(name), text) is None


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=50, deadline=None)
@given(text=hard_texts())
def test_each_token_stands_for_its_own_part(name: str, text: str) -> None:
    tokenizer, raw = vocabulary(name), text.encode()
    tokens = tokenizer.encode(text, add_bos=False).tolist()
    found = ends(tokenizer, text)
    if found is None:
        assert name not in EXACT
        return
    places = found[len(found) - len(tokens) :]
    assert places[-1:] == [len(raw)][: len(tokens)]
    for token, start, end in zip(tokens, [0, *places], places, strict=False):
        own = tokenizer.token_text(token)
        assert raw[start:end].decode("utf-8", "replace") in (own, own.removeprefix(" "))


# --- dividers ------------------------------------------------------------------------------------


def test_the_dividers_of_real_vocabularies() -> None:
    assert divider_names(vocabulary("sentencepiece")) == ["<unk>", "<s>", "</s>"]
    assert len(divider_names(vocabulary("smollm2"))) == 17
    assert divider_names(Tokenizer(byte_level_library([]), None, ())) == []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([special("<a>"), special("<b>")], ["<a>", "<b>"]),
        ([AddedToken("<a>", normalized=False)], []),  # not special
        ([AddedToken("<a>", special=True, normalized=True)], []),  # found after normalising only
        ([special("<a>", lstrip=True)], []),
        ([special("<a>", rstrip=True)], []),
        ([special("<a>", single_word=True)], []),
        ([special(" <a>"), special("<b>\n")], []),  # a neighbour could take the blank
        # `<ab>` is found in `<ab><c>` and `x<ab>`, but the `<` of `x<` may be taken already.
        ([special("<ab>"), special("x<")], ["x<"]),
        ([special("<ab>"), AddedToken("x<", normalized=False)], []),
        ([special("<ab>"), AddedToken("x<", normalized=True)], ["<ab>"]),
        # The longer one is found where both could be.
        ([special("<a"), special("<ab>")], ["<ab>"]),
        ([special("ab"), special("<ab>")], ["<ab>"]),
        ([special("aba")], []),  # within `ababa` only the first is found
    ],
)
def test_what_is_a_divider(tokens: list[AddedToken], expected: list[str]) -> None:
    assert divider_names(with_added(*tokens)) == expected


def test_where_a_divider_is_written() -> None:
    spelling = vocabulary("smollm2").spelling
    text = "é<|im_end|>".encode()
    assert [place for place in range(12) if spelling.has_divider_at(text, place)] == [2]
    assert not Tokenizer(byte_level_library([]), None, ()).spelling.has_divider_at(text, 2)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=50, deadline=None)
@given(before=hard_texts(), after=hard_texts(), data=st.data())
def test_a_divider_cuts_the_text_for_good(
    name: str, before: str, after: str, data: st.DataObject
) -> None:
    tokenizer = vocabulary(name)
    divider = data.draw(st.sampled_from(divider_names(tokenizer)))
    whole = ids(tokenizer, before + divider + after)
    assert whole == ids(tokenizer, before) + ids(tokenizer, divider + after)
    assert tokenizer.token_text(ids(tokenizer, divider + after)[0]) == divider
