"""A tokenizer from the metadata of a GGUF file, as llama.cpp reads it.

Two kinds of vocabulary: `gpt2`, byte-level BPE with merges in the file, and `llama`, SentencePiece
BPE whose merges follow from the scores. Other kinds are refused by name.

Source of the keys: the GGUF specification (ggml `docs/gguf.md`); of the defaults: llama.cpp
`src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from om_models.chat import with_tokens
from om_models.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from om_models.tokenizer import TokenizerError, TokenizerSource

_PREFIX = "tokenizer.ggml."
_SPACE = "▁"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn; older converters recorded only one of a model's end tokens.
_END_TEXTS = frozenset(
    {
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)


def tokenizer_from_gguf(path: Path) -> TokenizerSource:
    """Read the tokenizer of a GGUF file.

    An `add_eos_token` flag is not followed: prompts are continued, not ended.

    Raises:
        TokenizerError: the file cannot be read, has no tokenizer, or has one of a kind that is
            not known here.
    """
    vocabulary = _Vocabulary(_read_fields(path), path)
    kind = vocabulary.get("model", None)
    if kind == "gpt2":
        pre = _pre_tokenizer(vocabulary)
        library, adds_bos = _byte_level(vocabulary, pre), pre.adds_bos
    elif kind == "llama":
        library, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise TokenizerError(
            f"{path} has a tokenizer of the unknown kind {kind!r}; known are 'gpt2' and 'llama'"
        )
    _add_whole_tokens(library, vocabulary)
    return TokenizerSource(
        library=library,
        bos_token_id=_bos_token_id(vocabulary, adds_bos=adds_bos),
        eos_token_ids=_end_token_ids(vocabulary),
        chat_template=_chat_template(vocabulary),
    )


class _Vocabulary:
    """The tokenizer's part of the metadata, checked for shape."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self._fields = fields
        self.path = path
        # Padding of a vocabulary may be written as empty tokens; each needs a name of its own.
        texts = enumerate(self._list("tokens"))
        self.tokens: list[str] = [text or f"[EMPTY_{i}]" for i, text in texts]
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise TokenizerError(f"{path}: the vocabulary has the same token twice")
        self.types: Sequence[int] = self._list("token_type", gguf.TokenType.NORMAL)

    def get(self, key: str, default: Any) -> Any:
        return self._fields.get(_PREFIX + key, default)

    @property
    def chat_template(self) -> str | None:
        return self._fields.get("tokenizer.chat_template")

    @property
    def scores(self) -> Sequence[float]:
        return self._list("scores")

    @property
    def merges(self) -> list[tuple[str, str]]:
        merges = self._fields.get(_PREFIX + "merges")
        if not isinstance(merges, list):
            raise TokenizerError(f"{self.path} has no {_PREFIX}merges")
        return [_split_merge(merge) for merge in merges]

    def token_id(self, key: str) -> int | None:
        """The special token under `key`, if the file names one inside the vocabulary."""
        token_id = self.get(key, None)
        is_known = isinstance(token_id, int) and 0 <= token_id < len(self.tokens)
        return token_id if is_known else None

    def of_type(self, *types: gguf.TokenType) -> Iterator[str]:
        return (t for t, kind in zip(self.tokens, self.types, strict=True) if kind in types)

    def _list(self, key: str, default: Any = None) -> list[Any]:
        """A list with one value for each token."""
        values = self._fields.get(_PREFIX + key)
        if values is None and default is not None:
            return [default] * len(self.tokens)
        if not isinstance(values, list) or not values:
            raise TokenizerError(f"{self.path} has no {_PREFIX}{key}")
        if key != "tokens" and len(values) != len(self.tokens):
            raise TokenizerError(
                f"{self.path}: {_PREFIX}{key} has {len(values)} values "
                f"for {len(self.tokens)} tokens"
            )
        return values


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        reader = gguf.GGUFReader(path)
        return {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith("tokenizer.")
        }
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise TokenizerError(f"{path} cannot be read as GGUF: {error}") from error


def _split_merge(merge: str) -> tuple[str, str]:
    # A piece may itself begin with a space, so the separator is looked for from the second letter.
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{vocabulary.path} names the pre-tokenizer {name!r}, which is not known here; "
            f"known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    library = _bpe(vocabulary, vocabulary.merges, ignore_merges=pre.ignores_merges)
    library.pre_tokenizer = pre.build()
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    unknown = next(vocabulary.of_type(gguf.TokenType.UNKNOWN), None)
    merges = _merges_by_score(vocabulary)
    library = _bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    prepend = [normalizers.Prepend(_SPACE)] if has_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    library.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return library


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score of the result first.

    SentencePiece always joins the neighbours whose union scores highest. Among the ways to make
    one token the order is that of transformers' converter: the longer first half first.
    """
    names = (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN, gguf.TokenType.BYTE)
    skipped = frozenset(vocabulary.of_type(*names))
    scores = vocabulary.scores
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.ids.items():
        if token in skipped:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary.ids and right in vocabulary.ids:
                found.append((scores[token_id], cut, len(token) - cut, left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _bpe(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{vocabulary.path}: the merges are damaged: {error}") from error


def _add_whole_tokens(library: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make the tokens that are never built by merging known as such.

    Control tokens and the unknown token are special, so not part of an answer's text; user-defined
    ones are text.
    """
    control = vocabulary.of_type(gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN)
    user_defined = vocabulary.of_type(gguf.TokenType.USER_DEFINED)
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    library.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])


def _bos_token_id(vocabulary: _Vocabulary, *, adds_bos: bool) -> int | None:
    if not vocabulary.get("add_bos_token", adds_bos):
        return None
    return vocabulary.token_id("bos_token_id")


def _end_token_ids(vocabulary: _Vocabulary) -> tuple[int, ...]:
    """By their keys, EOS first, then by their texts; each once."""
    named = [vocabulary.token_id(key) for key in _END_KEYS]
    control = vocabulary.of_type(gguf.TokenType.CONTROL)
    by_text = [vocabulary.ids[text] for text in control if text in _END_TEXTS]
    return tuple(dict.fromkeys(i for i in [*named, *by_text] if i is not None))


def _chat_template(vocabulary: _Vocabulary) -> str | None:
    source = vocabulary.chat_template
    if source is None:
        return None
    bos, eos = (vocabulary.token_id(key) for key in ("bos_token_id", "eos_token_id"))
    return with_tokens(
        source,
        bos_token=None if bos is None else vocabulary.tokens[bos],
        eos_token=None if eos is None else vocabulary.tokens[eos],
    )
