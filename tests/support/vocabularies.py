"""The tokenizers of `tests/data`, their kin of other kinds, and texts that are hard for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from om_models.gguf_tokenizer import tokenizer_from_gguf
from om_models.null_model import byte_level_library
from om_models.pretokenizers import PRE_TOKENIZERS
from om_models.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
#: What tokenizers treat in ways of their own: blanks, digits, letters of several bytes, the marks
#: of vocabularies, special tokens and what looks like them.
HARD_PARTS = (
    *" \n\t▁'.,0179aéλ你👍\ufffd\u0301",
    *("  ", "   ", "\n\n", "\r\n", "'s", "'ll", " the", "ing", "Hello", " wor", "don't", "123"),
    *("<|im_start|>", "<|im_end|>", "<|im_", "|>", "<s>", "</s>", "<0x41>", "\r", "ﬁ", "½"),
)


def hard_texts(max_size: int = 12) -> st.SearchStrategy[str]:
    """Texts of hard parts and of any characters."""
    part = st.sampled_from(HARD_PARTS) | st.text(
        st.characters(exclude_categories=["Cs"]), max_size=3
    )
    return st.lists(part, max_size=max_size).map("".join)


@cache
def gguf_library(name: str) -> tokenizers.Tokenizer:
    """The library's object of a file in `tests/data`; a copy may be changed, this may not."""
    return tokenizer_from_gguf(DATA / f"{name}.gguf").library


def _from_gguf(name: str) -> Tokenizer:
    return tokenizer_from_gguf(DATA / f"{name}.gguf").tokenizer()


def _changed(name: str, change: Callable[[tokenizers.Tokenizer], None]) -> Tokenizer:
    library = tokenizers.Tokenizer.from_str(gguf_library(name).to_str())
    change(library)
    return Tokenizer(library, None, ())


def metaspace(scheme: str) -> Tokenizer:
    """The SentencePiece vocabulary as newer converters write it."""

    def change(library: tokenizers.Tokenizer) -> None:
        library.normalizer = normalizers.Sequence([])
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)

    return _changed("sentencepiece", change)


def _spaced_bytes() -> Tokenizer:
    """Byte-level with a space before each part, and a post-processor that trims offsets."""

    def change(library: tokenizers.Tokenizer) -> None:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        library.post_processor = processors.ByteLevel(trim_offsets=True)

    return _changed("smollm2_1k", change)


def _llama3_cut() -> Tokenizer:
    """A vocabulary cut as Llama 3's, with its way to take whole words."""

    def change(library: tokenizers.Tokenizer) -> None:
        library.pre_tokenizer = PRE_TOKENIZERS["llama3"].build()
        library.model.ignore_merges = True

    return _changed("smollm2_1k", change)


def _composing() -> Tokenizer:
    """Composes characters before anything else, so that not every text comes back as it was."""

    def change(library: tokenizers.Tokenizer) -> None:
        library.normalizer = normalizers.NFC()

    return _changed("smollm2_1k", change)


def _swallowing() -> Tokenizer:
    """Has special tokens that take blanks, that overlap, and that stand only for whole words."""

    def change(library: tokenizers.Tokenizer) -> None:
        library.add_special_tokens(
            [
                AddedToken("\n\n", normalized=False),
                AddedToken("|>", normalized=False),
                AddedToken("<s>", normalized=False, rstrip=True),
                AddedToken("</s>", normalized=False, lstrip=True),
                AddedToken("Hello", normalized=False, single_word=True),
                AddedToken("the", normalized=True),
            ]
        )

    return _changed("smollm2_1k", change)


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": lambda: _from_gguf("smollm2_1k"),
    "sentencepiece": lambda: _from_gguf("sentencepiece"),
    "sentencepiece without prefix": lambda: _from_gguf("sentencepiece_no_prefix"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "bytes": lambda: Tokenizer(byte_level_library(["<s>", "</s>"]), 256, {257}),
    "bytes with a space": _spaced_bytes,
    "cut as Llama 3": _llama3_cut,
    "composing": _composing,
    "swallowing": _swallowing,
}


@cache
def vocabulary(name: str) -> Tokenizer:
    """One of `VOCABULARIES`."""
    return VOCABULARIES[name]()
