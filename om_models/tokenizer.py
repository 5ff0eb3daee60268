"""Text to token ids and back, from a bundle's `tokenizer.json`.

Encoding is the `tokenizers` library's. Decoding is ours, from one table of the bytes each token
stands for: a streamed answer must equal the decoding of the whole, and the library's `DecodeStream`
has no flush for an incomplete character and differs or panics on invalid UTF-8 (figures in
`docs/decisions.md`). Only the decoders of Llama-type vocabularies are known: byte-level, and
SentencePiece with byte fallback.

Not here: how a tokenizer is read from a checkpoint (`TokenizerSource` is the result of that).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from om_models.spelling import Spelling

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NOT_UNICODE = "the text is not valid Unicode: it has lone surrogates"


class TokenizerError(ValueError):
    """A tokenizer's files are missing, damaged or of an unknown kind, or a text is not Unicode."""


def utf8(text: str) -> bytes:
    """The text's bytes.

    Raises:
        TokenizerError: it has lone surrogates, so it has no UTF-8 form.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(_NOT_UNICODE) from error


class Tokenizer:
    """A loaded tokenizer. Immutable after loading; its methods may be called from any thread.

    Attributes:
        bos_token_id: put before a text prompt; None if the model wants none.
        eos_token_ids: tokens that end an answer.
        spelling: which bytes of a text its tokens stand for.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
    ) -> None:
        library.no_padding()
        library.no_truncation()
        self._library = library
        state = json.loads(library.to_str())
        self._rules = _decode_rules(state)
        self._bytes = _bytes_table(library, self._rules)
        added = library.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        self._shown = [b"" if i in special else piece for i, piece in enumerate(self._bytes)]
        self._whole = [_whole_text(piece) for piece in self._shown]
        self.spelling = Spelling(self._bytes, added, state)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self._check_ids()

    @classmethod
    def load(
        cls, path: Path, bos_token_id: int | None = None, eos_token_ids: Iterable[int] = ()
    ) -> Tokenizer:
        """Read `tokenizer.json`.

        Raises:
            TokenizerError: the file is missing or damaged, its decoder is of an unknown kind, or
                one of the ids is outside the vocabulary.
        """
        return cls(read_library(path), bos_token_id, eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's own vocabulary may be padded beyond."""
        return len(self._bytes)

    def encode(self, text: str, *, add_bos: bool) -> npt.NDArray[np.int32]:
        """Token ids of `text` [int32, 0..]. Special tokens written in the text are recognised.

        Args:
            add_bos: put the BOS token first, unless the model has none or the text begins with it.

        Raises:
            TokenizerError: the text has lone surrogates, so it has no UTF-8 form.
        """
        try:
            # Unlike `encode`, this lets other threads run (that one holds them up for half a
            # second per 900 kB).
            ids = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:  # TypeError is how the library says it
            raise TokenizerError(_NOT_UNICODE) from error
        bos = self.bos_token_id
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """Text of the ids; special tokens and ids outside the vocabulary are left out.

        Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid part.
        """
        stream = self.detokenizer()
        return "".join([stream.step(int(i)) for i in token_ids]) + stream.flush()

    def detokenizer(self, *, is_continuation: bool = False) -> TokenDetokenizer:
        """A new stream for one answer; all its pieces together equal `decode` of the ids.

        Args:
            is_continuation: the text goes on after another one, so that the space before its
                first word is kept where a SentencePiece vocabulary would drop it.
        """
        strips = self._rules.strips_leading_space and not is_continuation
        return TokenDetokenizer(
            self._shown, self._whole, self.token_text, strips_leading_space=strips
        )

    def ends(self, token_ids: npt.NDArray[np.int32], text: bytes) -> npt.NDArray[np.int32] | None:
        """As `Spelling.ends`, for what `encode` gave: a BOS that it put there takes no room."""
        bos = self.bos_token_id
        if bos is None or token_ids[:1].tolist() != [bos] or text.startswith(self._bytes[bos]):
            return self.spelling.ends(token_ids, text)
        ends = self.spelling.ends(token_ids[1:], text)
        return None if ends is None else np.concatenate([np.zeros(1, dtype=np.int32), ends])

    def spell(self, token_ids: Sequence[int], *, is_continuation: bool) -> tuple[bytes, list[int]]:
        """What an answer's tokens add to the text, up to the first that adds nothing by rule.

        That one is a special token, which is not shown, or an id that no token has: the text
        cannot tell of it, nor of where it stands.

        Args:
            is_continuation: as in `detokenizer`.

        Returns:
            The text [UTF-8], and where in it each token ends [bytes]. A token that leaves a
            character incomplete ends where the one before it did; the last one takes what is left.
        """
        stream = self.detokenizer(is_continuation=is_continuation)
        text, ends, last = bytearray(), list[int](), 0
        for token_id in token_ids:
            if not (0 <= token_id < len(self._shown) and self._shown[token_id]):
                break
            text += stream.step(token_id).encode("utf-8")
            last = last if stream.is_inside_character else len(text)
            ends.append(last)
        text += stream.flush().encode("utf-8")
        return bytes(text), [*ends[:-1], len(text)] if ends else []

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text, special tokens by name; empty if there is no such id.

        A token that is a part of a character shows U+FFFD.
        """
        if not 0 <= token_id < len(self._bytes):
            return ""
        return self._bytes[token_id].decode("utf-8", "replace")

    def _check_ids(self) -> None:
        for name, ids in (("BOS", {self.bos_token_id} - {None}), ("EOS", self.eos_token_ids)):
            wrong = sorted(i for i in ids if i is not None and not 0 <= i < self.vocab_size)
            if wrong:
                raise TokenizerError(
                    f"{name} token id {wrong[0]} is outside the vocabulary of {self.vocab_size}"
                )


class TokenDetokenizer:
    """Turns one answer's token ids into text as they come (`engine.request.Detokenizer`)."""

    __slots__ = ("_decoder", "_is_plain", "_shown", "_strips", "_whole", "token_text")

    def __init__(
        self,
        shown: Sequence[bytes],
        whole: Sequence[str | None],
        token_text: Callable[[int], str],
        *,
        strips_leading_space: bool,
    ) -> None:
        """Start an answer.

        Args:
            shown: bytes that each token id adds to the text.
            whole: the same as text, where they are whole characters; None where they are not.
            token_text: name of a token id.
            strips_leading_space: the first space of the text is dropped.
        """
        self.token_text = token_text
        self._shown = shown
        self._whole = whole
        self._strips = strips_leading_space
        #: Nothing is incomplete and nothing to be stripped: a token's text is that of the table.
        self._is_plain = not strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is still incomplete."""
        if not 0 <= token_id < len(self._shown):
            return ""
        if self._is_plain and (text := self._whole[token_id]) is not None:
            return text
        piece = self._shown[token_id]
        if self._strips and piece:
            piece = piece.removeprefix(b" ")
            self._strips = False
        text = self._decoder.decode(piece)
        self._is_plain = not self._strips and not self.is_inside_character
        return text

    @property
    def is_inside_character(self) -> bool:
        """Whether a character is still incomplete."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Text of what is still incomplete: U+FFFD or nothing."""
        return self._decoder.decode(b"", True)


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A checkpoint's tokenizer, read and ready to be put into a bundle.

    Attributes:
        bos_token_id: None if the model adds none to a prompt.
        eos_token_ids: every token that ends an answer, the model's own EOS first.
        chat_template: Jinja source that knows its BOS and EOS (`chat.with_tokens`), or None.
    """

    library: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`: the same bytes for the same source.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(self.library.to_str(), encoding="utf-8")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself, for use before or without a bundle."""
        return Tokenizer(
            tokenizers.Tokenizer.from_str(self.library.to_str()),
            self.bos_token_id,
            self.eos_token_ids,
        )


def _whole_text(piece: bytes) -> str | None:
    """The text of bytes that are whole characters; None if they are not."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def read_library(path: Path) -> tokenizers.Tokenizer:
    """The library's object from `tokenizer.json`.

    Raises:
        TokenizerError: the file is missing, unreadable or not a tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read the tokenizer {path}: {error}") from error
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer.json: {error}") from error


@dataclass(frozen=True, slots=True)
class _DecodeRules:
    """What a `tokenizer.json` says of the way from tokens to text."""

    is_byte_level: bool = False
    space_marker: str | None = None
    has_byte_tokens: bool = False
    strips_leading_space: bool = False


def _decode_rules(state: dict[str, Any]) -> _DecodeRules:
    decoder = state["decoder"] or {"type": "none"}
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    found: dict[str, Any] = {}
    for part in parts:
        found.update(_decode_rule(part))
    return _DecodeRules(**found)


def _decode_rule(part: dict[str, Any]) -> dict[str, Any]:
    """One decoder of the file as fields of `_DecodeRules`."""
    match part:
        case {"type": "ByteLevel"}:
            return {"is_byte_level": True}
        case {"type": "ByteFallback"}:
            return {"has_byte_tokens": True}
        case {"type": "Fuse"}:
            return {}
        case {"type": "Replace", "pattern": {"String": marker}, "content": " "}:
            return {"space_marker": marker}
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return {"strips_leading_space": True}
        case {"type": "Metaspace", "replacement": marker}:
            strips = part.get("prepend_scheme", "always") != "never"
            return {"space_marker": marker, "strips_leading_space": strips}
    raise TokenizerError(
        f"the tokenizer's decoder has a part of an unknown kind, {json.dumps(part)}; known are "
        "byte-level and SentencePiece (Replace, ByteFallback, Fuse, Strip, Metaspace)"
    )


def _bytes_table(library: tokenizers.Tokenizer, rules: _DecodeRules) -> list[bytes]:
    """The bytes of every token id; empty for ids that no token has."""
    vocab = library.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    to_bytes = _byte_level_bytes if rules.is_byte_level else _sentencepiece_bytes
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token, rules)
    # Added tokens stand for their own text, whatever their letters would mean in the vocabulary.
    for token_id, added in library.get_added_tokens_decoder().items():
        table[token_id] = added.content.encode("utf-8")
    return table


def _byte_level_bytes(token: str, rules: _DecodeRules) -> bytes:
    try:
        return bytes([BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:  # no byte-level spelling: the token is plain text
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str, rules: _DecodeRules) -> bytes:
    if rules.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match.group(1), 16)])
    if rules.space_marker is not None:
        token = token.replace(rules.space_marker, " ")
    return token.encode("utf-8")


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if chr(byte) not in letters]
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_of_letter()
