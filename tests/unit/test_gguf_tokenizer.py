"""Tokenizers from GGUF: equal ids to transformers and sentencepiece, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from om_models.chat import ChatTemplate
from om_models.gguf_tokenizer import tokenizer_from_gguf
from om_models.pretokenizers import PRE_TOKENIZERS
from om_models.tokenizer import BYTE_OF_LETTER, Tokenizer, TokenizerError, TokenizerSource
from tests.support.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    write_gguf_tokenizer,
)

DATA = Path(__file__).parents[1] / "data" / "tokenizers"


def cases(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((DATA / name).read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def smollm2() -> TokenizerSource:
    return tokenizer_from_gguf(DATA / "smollm2_1k.gguf")


@pytest.mark.parametrize("case", cases("smollm2_1k.json"), ids=lambda case: repr(case["text"]))
def test_byte_level_equals_transformers(smollm2: TokenizerSource, case: dict[str, Any]) -> None:
    tokenizer = smollm2.tokenizer()
    ids = tokenizer.encode(case["text"], add_bos=True).tolist()
    assert ids == case["ids"]
    assert tokenizer.decode(ids) == case["decoded"]


def test_smollm2_metadata(smollm2: TokenizerSource) -> None:
    assert smollm2.bos_token_id is None
    assert smollm2.eos_token_ids == (2, 0)
    assert smollm2.chat_template is not None
    assert smollm2.chat_template.startswith("{% for message in messages %}")


def test_saved_files_are_equal_and_load(smollm2: TokenizerSource, tmp_path: Path) -> None:
    smollm2.save(tmp_path / "a.json")
    tokenizer_from_gguf(DATA / "smollm2_1k.gguf").save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    loaded = Tokenizer.load(tmp_path / "a.json", smollm2.bos_token_id, smollm2.eos_token_ids)
    case = cases("smollm2_1k.json")[5]
    assert loaded.encode(case["text"], add_bos=False).tolist() == case["ids"]


@pytest.mark.parametrize(
    ("file", "key"),
    [("sentencepiece.gguf", "ids"), ("sentencepiece_no_prefix.gguf", "ids_no_prefix")],
)
def test_sentencepiece_equals_its_library(file: str, key: str) -> None:
    source = tokenizer_from_gguf(DATA / file)
    tokenizer = source.tokenizer()
    assert (source.bos_token_id, source.eos_token_ids) == (1, (2,))
    for case in cases("sentencepiece.json"):
        text, ids = case["text"], case[key]
        assert tokenizer.encode(text, add_bos=False).tolist() == ids, text
        assert tokenizer.encode(text, add_bos=True).tolist() == [1, *ids], text
        if "<s>" not in text and "▁" not in text:
            assert tokenizer.decode(ids) == text


def byte_level_values(**changes: Any) -> dict[str, Any]:
    letters = sorted(BYTE_OF_LETTER)
    tokens = [*letters, "he", "hel", "<e>", "<|im_end|>", "<u>", "lo"]
    types = [*[NORMAL] * 258, CONTROL, CONTROL, USER_DEFINED, NORMAL]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["h e", "he l", "l o"],
        "bos_token_id": 258,
        "eos_token_id": 258,
        "add_bos_token": True,
    }
    values.update(changes)
    return {name: value for name, value in values.items() if value is not None}


def load(tmp_path: Path, **changes: Any) -> TokenizerSource:
    path = write_gguf_tokenizer(tmp_path / "t.gguf", **byte_level_values(**changes))
    return tokenizer_from_gguf(path)


def test_merges_and_token_types(tmp_path: Path) -> None:
    tokenizer = load(tmp_path).tokenizer()
    assert tokenizer.encode("hello<u><e>", add_bos=True).tolist() == [258, 257, 261, 260, 258]
    assert tokenizer.decode([258, 257, 261, 260, 258]) == "hello<u>"


def test_end_tokens_by_key_and_by_text(tmp_path: Path) -> None:
    assert load(tmp_path).eos_token_ids == (258, 259)
    assert load(tmp_path, eot_token_id=3, eom_token_id=4).eos_token_ids == (258, 3, 4, 259)
    assert load(tmp_path, eos_token_id=10**6).eos_token_ids == (259,)


def test_a_template_brings_its_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}\n{{ messages[0].content }}"
    source = load(tmp_path, chat_template=template, add_bos_token=False)
    assert source.bos_token_id is None
    assert source.chat_template is not None
    message = {"role": "user", "content": "x"}
    assert ChatTemplate(source.chat_template).render([message]) == "<e>\nx"


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("gpt-2", None, None),
        ("gpt-2", True, 258),
        ("llama-bpe", None, 258),
        ("llama-bpe", False, None),
        ("tekken", None, 258),
    ],
)
def test_bos_by_flag_or_by_kind(
    tmp_path: Path, pre: str, flag: bool | None, expected: int | None
) -> None:
    assert load(tmp_path, pre=pre, add_bos_token=flag).bos_token_id == expected


def test_whole_words_that_skip_merges(tmp_path: Path) -> None:
    values = byte_level_values(merges=["h e", "l o"])
    path = write_gguf_tokenizer(tmp_path / "a.gguf", **{**values, "pre": "llama-bpe"})
    assert tokenizer_from_gguf(path).tokenizer().encode("hel", add_bos=False).tolist() == [257]
    path = write_gguf_tokenizer(tmp_path / "b.gguf", **values)
    assert tokenizer_from_gguf(path).tokenizer().encode("hel", add_bos=False).tolist()[0] == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "unknown kind 'bert'; known are 'gpt2' and 'llama'"),
        ({"model": None}, "unknown kind None"),
        ({"pre": "klingon"}, "'klingon'.*known are .*llama-bpe.*qwen2.*tekken"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"merges": ["h q!"]}, "the merges are damaged"),
        ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"token_type": [1, 1]}, "token_type has 2 values for 262 tokens"),
        ({"tokens": ["a"] * 262}, "the same token twice"),
        ({"model": "llama"}, r"has no tokenizer\.ggml\.scores"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load(tmp_path, **changes)


@pytest.mark.parametrize("num_bytes", [0, 3, 30, 300, 3000])
def test_a_truncated_file(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes((DATA / "smollm2_1k.gguf").read_bytes()[:num_bytes])
    with pytest.raises(TokenizerError, match="cannot be read as GGUF"):
        tokenizer_from_gguf(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read as GGUF"):
        tokenizer_from_gguf(tmp_path / "none.gguf")


def test_empty_padding_tokens_get_names(tmp_path: Path) -> None:
    values = byte_level_values()
    values["tokens"] = [*values["tokens"], "", ""]
    values["token_type"] = [*values["token_type"], 5, 5]
    path = write_gguf_tokenizer(tmp_path / "t.gguf", **values)
    assert tokenizer_from_gguf(path).tokenizer().vocab_size == 264


def test_best_score_is_merged_first(tmp_path: Path) -> None:
    path = write_gguf_tokenizer(
        tmp_path / "t.gguf",
        model="llama",
        tokens=["<unk>", "<0x21>", "▁", "a", "b", "ab", "▁a", "bb"],
        token_type=[UNKNOWN, BYTE, *[NORMAL] * 6],
        scores=[0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0],
    )
    tokenizer = tokenizer_from_gguf(path).tokenizer()
    assert tokenizer.encode("abb", add_bos=False).tolist() == [6, 7]
    assert tokenizer.encode("ab!", add_bos=False).tolist() == [2, 5, 1]
    assert tokenizer.encode("a?", add_bos=False).tolist() == [6, 0]


def cut(name: str, text: str) -> list[str]:
    """The words of a text, written as text again."""
    words = [word for word, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]
    return [bytes(BYTE_OF_LETTER[letter] for letter in word).decode() for word in words]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("default", "a+=1234 b.", ["a", "+=", "123", "4", " b", "."]),
        ("falcon", "`a` 1234", ["`", "a", "`", " 1234"[:1], "123", "4"]),
        ("gpt-2", "It's 1234  x\n\n y", ["It", "'s", " 1234", " ", " x", "\n\n", " y"]),
        ("smollm", "a 12  3", ["a", " ", "1", "2", "  ", "3"]),
        ("llama-bpe", "I'LL 1234\n\n x", ["I", "'LL", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "I'LL 12!\n", ["I", "'LL", " ", "1", "2", "!\n"]),
        ("tekken", "HTMLPage 12 a//b", ["HTMLPage", " ", "1", "2", " a", "//", "b"]),
        ("tekken", "fooBar", ["foo", "Bar"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("deepseek-llm", "Ab. 你a\n12", ["Ab", ".", " ", "你", "a", "\n", "12"]),
        ("deepseek-coder", "Ab. 12", ["Ab", ".", " ", "1", "2"]),
        ("deepseek-v3", "x.abc 1234你", ["x", ".abc", " ", "123", "4", "你"]),
    ],
)
def test_cuts(name: str, text: str, words: list[str]) -> None:
    assert cut(name, text) == words


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "smollm"])
def test_cuts_equal_those_of_transformers(name: str) -> None:
    """Stored: tests/data/tokenizers/make_cuts.py."""
    stored = json.loads((DATA / "cuts.json").read_text("utf-8"))[name]
    texts = json.loads((DATA / "texts.json").read_text("utf-8"))
    assert [cut(name, text) for text in texts] == stored


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_cut_loses_text(name: str) -> None:
    text = "It's 12345  HELLOWorld\n\n x漢字。ok ½ 👩‍👧\x00\t\u00a0\u2126\u1fd3!"
    assert "".join(cut(name, text)) == text
