"""Streamed text equals the decoding of the whole, whatever the ids are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from om_models.gguf_tokenizer import tokenizer_from_gguf
from om_models.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
BYTE_LEVEL = tokenizer_from_gguf(DATA / "smollm2_1k.gguf").tokenizer()
SENTENCEPIECE = tokenizer_from_gguf(DATA / "sentencepiece.gguf").tokenizer()
NO_PREFIX = tokenizer_from_gguf(DATA / "sentencepiece_no_prefix.gguf").tokenizer()
ALL = [BYTE_LEVEL, SENTENCEPIECE, NO_PREFIX]
BYTE_0 = 3  # `<0x00>` of the SentencePiece vocabularies


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*[detokenizer.step(i) for i in ids], detokenizer.flush()]


def byte_tokens(data: bytes) -> list[int]:
    return [BYTE_0 + byte for byte in data]


@pytest.mark.parametrize("tokenizer", ALL)
@settings(deadline=None)
@given(data=st.data())
def test_pieces_together_are_the_library_s_decoding(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(st.text())
    ids = tokenizer.encode(text, add_bos=False).tolist()
    together = "".join(stream(tokenizer, ids))
    assert together == tokenizer._library.decode(ids)
    assert together == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", ALL)
@settings(deadline=None)
@given(data=st.data())
def test_any_ids_at_all(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size)))
    expected = b"".join(tokenizer._shown[i] for i in ids if 0 <= i < tokenizer.vocab_size)
    if tokenizer is SENTENCEPIECE:
        expected = expected.removeprefix(b" ")
    assert "".join(stream(tokenizer, ids)) == expected.decode("utf-8", "replace")


@settings(deadline=None)
@given(data=st.binary(max_size=12))
def test_any_bytes_at_all(data: bytes) -> None:
    pieces = stream(NO_PREFIX, byte_tokens(data))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_a_character_comes_when_it_is_whole() -> None:
    assert stream(NO_PREFIX, byte_tokens("é👍".encode())) == ["", "é", "", "", "", "👍", ""]


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    assert stream(NO_PREFIX, byte_tokens("👍".encode()[:3])) == ["", "", "", "\ufffd"]


def test_an_invalid_byte_does_not_hold_up_what_follows() -> None:
    assert stream(NO_PREFIX, byte_tokens(b"a\xe4b")) == ["a", "", "\ufffdb", ""]


def test_the_first_space_only() -> None:
    ids = SENTENCEPIECE.encode("  a b", add_bos=True).tolist()
    assert "".join(stream(SENTENCEPIECE, ids)) == "  a b"
    one_space = byte_tokens(b" a a")
    assert stream(SENTENCEPIECE, one_space) == ["", "a", " ", "a", ""]


def test_special_tokens_before_the_first_space_change_nothing() -> None:
    ids = [1, 2, *SENTENCEPIECE.encode("you", add_bos=False).tolist(), 2]
    assert "".join(stream(SENTENCEPIECE, ids)) == "you"


def test_a_continuation_keeps_its_first_space() -> None:
    detokenizer = SENTENCEPIECE.detokenizer(is_continuation=True)
    ids = SENTENCEPIECE.encode("you", add_bos=False).tolist()
    assert "".join(detokenizer.step(i) for i in ids) + detokenizer.flush() == " you"


def test_streams_do_not_share_state() -> None:
    first, second = NO_PREFIX.detokenizer(), NO_PREFIX.detokenizer()
    assert first.step(BYTE_0 + 0xC3) == ""
    assert second.step(BYTE_0 + 0x41) == "A"
    assert first.step(BYTE_0 + 0xA9) == "é"


def test_names_do_not_change_the_stream() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.token_text(2) == "<|im_end|>"
    assert detokenizer.step(2) == ""
    assert detokenizer.flush() == ""
