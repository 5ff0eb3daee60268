"""The tokenizer of a bundle, and how one is read from a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from om_models.hf_tokenizer import tokenizer_from_hf
from om_models.tokenizer import BYTE_OF_LETTER, Tokenizer, TokenizerError

BOS, EOS, TOOL = 256, 257, 258


def byte_library() -> tokenizers.Tokenizer:
    """Ids 0..255 are the letters of the byte-level alphabet in their order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    return library


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    byte_library().save(str(path))
    return path


@pytest.fixture
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path, BOS, [EOS])


def ids_of(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    return tokenizer.encode(text, add_bos=add_bos).tolist()


def test_ids_are_int32(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", add_bos=False)
    assert (ids.dtype, ids.shape) == (np.int32, (2,))


def test_empty_text(tokenizer: Tokenizer) -> None:
    assert ids_of(tokenizer, "") == []
    assert ids_of(tokenizer, "", add_bos=True) == [BOS]
    assert tokenizer.decode([]) == ""


def test_bos_comes_once(tokenizer: Tokenizer) -> None:
    plain = ids_of(tokenizer, "a")
    assert ids_of(tokenizer, "a", add_bos=True) == [BOS, *plain]
    assert ids_of(tokenizer, "<s>a", add_bos=True) == [BOS, *plain]
    assert ids_of(tokenizer, "<s>a") == [BOS, *plain]
    assert ids_of(tokenizer, "a<s>", add_bos=True) == [BOS, *plain, BOS]


def test_no_bos_where_the_model_has_none(path: Path) -> None:
    assert ids_of(Tokenizer.load(path), "a", add_bos=True) == ids_of(Tokenizer.load(path), "a")


def test_special_tokens_in_a_text_are_recognised_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a</s>b<tool é>")
    assert ids == [*ids_of(tokenizer, "a"), EOS, *ids_of(tokenizer, "b"), TOOL]
    assert tokenizer.decode(ids) == "ab<tool é>"


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    [letter] = ids_of(tokenizer, "a")
    first_of_two = ids_of(tokenizer, "é")[0]
    assert tokenizer.token_text(letter) == "a"
    assert tokenizer.token_text(EOS) == "</s>"
    assert tokenizer.token_text(TOOL) == "<tool é>"
    assert tokenizer.token_text(first_of_two) == "\ufffd"
    assert (tokenizer.token_text(259), tokenizer.token_text(-1)) == ("", "")


def test_vocabulary_size_and_ids_beyond_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([*ids_of(tokenizer, "a"), 259, 10**6, -1]) == "a"


def test_decode_takes_arrays(tokenizer: Tokenizer) -> None:
    text = "naïve 👩‍👧 \x00\n"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=True)) == text


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        tokenizer.encode("a\ud800", add_bos=False)


def test_ends_of_a_prompts_tokens(tokenizer: Tokenizer) -> None:
    for text, expected in (
        ("aé", [0, 1, 2, 3]),  # a BOS that was added takes no room
        ("<s>a", [3, 4]),
        ("", [0]),
    ):
        ends = tokenizer.ends(tokenizer.encode(text, add_bos=True), text.encode())
        assert ends is not None
        assert (ends.tolist(), ends.dtype) == (expected, np.int32)
    assert tokenizer.ends(tokenizer.encode("ab", add_bos=True), b"ac") is None


def test_ends_without_a_bos(path: Path) -> None:
    plain = Tokenizer.load(path)
    ends = plain.ends(plain.encode("<s>a", add_bos=True), b"<s>a")
    assert ends is not None
    assert ends.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("pieces", "text", "ends"),
    [
        (["a", "é", "b"], "aéb", [1, 1, 3, 4]),  # the first half of `é` ends where `a` does
        (["a", EOS, "b"], "a", [1]),
        ([EOS], "", []),
        ([10**6, "a"], "", []),
        ([], "", []),
        (["a", TOOL], "a<tool é>", [1, 10]),
        ([0xE4], "\ufffd", [3]),
        # Two beginnings of a character: no token ends between what they show.
        ([0xE4, 0xE4, "a"], "\ufffd\ufffda", [0, 0, 7]),
        (["a", 0xE4], "a\ufffd", [1, 4]),
    ],
)
def test_spelling_of_an_answer(
    tokenizer: Tokenizer, pieces: list[str | int], text: str, ends: list[int]
) -> None:
    """Bytes below 256 are the tokens that stand for them."""
    ids = list[int]()
    for piece in pieces:
        if isinstance(piece, str):
            ids += ids_of(tokenizer, piece)
        else:
            ids.append(token_of_byte(piece) if piece < BOS else piece)
    assert tokenizer.spell(ids, is_continuation=False) == (text.encode(), ends)


def token_of_byte(byte: int) -> int:
    letters = {value: letter for letter, value in BYTE_OF_LETTER.items()}
    return sorted(letters.values()).index(letters[byte])


def test_the_space_before_an_answer_is_spelled_if_it_goes_on() -> None:
    library = tokenizers.Tokenizer(models.BPE({"▁a": 0, "▁": 1}, []))
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library, None, ())
    assert tokenizer.spell([0, 0], is_continuation=True) == (b" a a", [2, 4])
    assert tokenizer.spell([0, 0], is_continuation=False) == (b"a a", [1, 3])
    assert tokenizer.spell([1, 0], is_continuation=False) == (b" a", [0, 2])


def test_truncation_and_padding_of_the_file_are_not_followed(tmp_path: Path) -> None:
    library = byte_library()
    library.enable_truncation(2)
    library.enable_padding(length=8, pad_id=0, pad_token="x")
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    assert len(ids_of(Tokenizer.load(path), "abc")) == 3


@pytest.mark.parametrize(("bos", "eos"), [(259, []), (None, [1, 259]), (-1, [])])
def test_ids_outside_the_vocabulary_stop_the_load(
    path: Path, bos: int | None, eos: list[int]
) -> None:
    with pytest.raises(TokenizerError, match="outside the vocabulary of 259"):
        Tokenizer.load(path, bos, eos)


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}'])
def test_a_damaged_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path / "none.json")


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    library = byte_library()
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match='"type": "WordPiece"'):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_metaspace_decoder_drops_the_first_space() -> None:
    library = tokenizers.Tokenizer(models.BPE({"▁a": 0, "▁": 1}, []))
    library.decoder = decoders.Metaspace()
    assert Tokenizer(library, None, ()).decode([0, 1, 0]) == "a  a"
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    assert Tokenizer(library, None, ()).decode([0, 1, 0]) == " a  a"


def write_hf(directory: Path, library: tokenizers.Tokenizer, **files: Any) -> Path:
    library.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return directory


def test_hf_directory(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": "{{ messages }}",
    }
    write_hf(
        tmp_path,
        byte_library(),
        tokenizer_config=config,
        config={"eos_token_id": 12},
        generation_config={"eos_token_id": [7, 12]},
    )
    source = tokenizer_from_hf(tmp_path)
    assert source.bos_token_id == BOS
    assert source.eos_token_ids == (EOS, 7, 12)
    assert source.chat_template == "{{ messages }}"
    source.save(tmp_path / "saved.json")
    saved = Tokenizer.load(tmp_path / "saved.json", source.bos_token_id, source.eos_token_ids)
    assert ids_of(saved, "ab", add_bos=True) == ids_of(source.tokenizer(), "ab", add_bos=True)


def library_that_adds(*tokens: str) -> tokenizers.Tokenizer:
    library = byte_library()
    ids = [(token, library.token_to_id(token)) for token in tokens if token != "$A"]
    library.post_processor = processors.TemplateProcessing(
        single=" ".join(tokens), special_tokens=ids
    )
    return library


@pytest.mark.parametrize(
    ("added", "config", "expected"),
    [
        (("<s>", "$A"), {"bos_token": "<s>"}, BOS),
        (("<s>", "$A"), {"bos_token": "<s>", "add_bos_token": False}, None),
        (("<s>", "$A"), {}, BOS),
        (("$A",), {"bos_token": "<s>"}, None),
        (("$A",), {"bos_token": "<s>", "add_bos_token": True}, BOS),
        (("$A",), {"bos_token": None, "add_bos_token": True}, None),
        (("$A", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, None),
        (("$A", "</s>"), {"eos_token": "</s>"}, None),
    ],
)
def test_hf_bos(
    tmp_path: Path, added: tuple[str, ...], config: dict[str, Any], expected: int | None
) -> None:
    write_hf(tmp_path, library_that_adds(*added), tokenizer_config=config)
    assert tokenizer_from_hf(tmp_path).bos_token_id == expected


def test_hf_without_tokenizer_json_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; make one.*save_pretrained"):
        tokenizer_from_hf(tmp_path)


def test_hf_with_nothing_else(tmp_path: Path) -> None:
    source = tokenizer_from_hf(write_hf(tmp_path, byte_library()))
    assert (source.bos_token_id, source.eos_token_ids, source.chat_template) == (None, (), None)


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_hf_with_a_damaged_config(tmp_path: Path, content: str) -> None:
    write_hf(tmp_path, byte_library())
    (tmp_path / "tokenizer_config.json").write_text(content, "latin-1")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        tokenizer_from_hf(tmp_path)


@pytest.mark.parametrize("value", ["</s>", [1, "x"], [None], 1.5])
def test_hf_with_end_tokens_that_are_no_ids(tmp_path: Path, value: Any) -> None:
    write_hf(tmp_path, byte_library(), generation_config={"eos_token_id": value})
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id is"):
        tokenizer_from_hf(tmp_path)


def test_hf_chat_template_file_goes_first(tmp_path: Path) -> None:
    write_hf(tmp_path, byte_library(), tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert tokenizer_from_hf(tmp_path).chat_template == "new"


def test_hf_chat_template_brings_its_tokens(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>"}, "chat_template": "a{{ eos_token }}"}
    write_hf(tmp_path, byte_library(), tokenizer_config=config)
    template = tokenizer_from_hf(tmp_path).chat_template
    assert template == '{% set eos_token = "</s>" +%}a{{ eos_token }}'


def test_hf_named_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write_hf(tmp_path, byte_library(), tokenizer_config={"chat_template": named})
    assert tokenizer_from_hf(tmp_path).chat_template == "d"
