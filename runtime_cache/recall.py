"""A prompt's text to token ids, with the ids the model chose wherever it wrote that text.

The text goes over from remembered ids to those of the canonical encoding (the library's, of the
whole text) at one byte, the seam, which lies

- at a divider (`om_models.spelling`), or inside or at the end of an answer, so that of what the
  model did not write only that has remembered ids which stands before one of its answers: those it
  had when that answer was asked for;
- where a token ends both in the remembered ids and in the canonical encoding, so that the rest is
  tokenised as it would be without a memory.

Equal texts may therefore get other ids after a restart, or when another answer of the same words
was given meanwhile: the canonical ones, as wherever a text is tokenised again. Both decode to the
same text, but for the space before a chat's answer that a SentencePiece vocabulary does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from om_models.spelling import Int32Array
from om_models.tokenizer import Tokenizer, utf8
from runtime_cache.text_memory import Nearest, TextMemory, TokenizedText


@dataclass(frozen=True)
class Recall:
    """Encodes the prompts of one tenant. May be used from any thread."""

    tokenizer: Tokenizer
    memory: TextMemory

    def encode(self, text: str, *, add_bos: bool, is_chat: bool) -> TokenizedText | Int32Array:
        """The text's tokens.

        Args:
            add_bos: as in `Tokenizer.encode`.
            is_chat: the text comes from the chat template. Only there a seam may lie inside an
                answer without a divider: any other text that happens to begin with a remembered
                one must be tokenised as if nobody had asked before.

        Returns:
            The ids alone if they do not spell the text exactly, so that nothing can be remembered.

        Raises:
            TokenizerError: the text has lone surrogates.
        """
        raw = utf8(text)
        nearest = self.memory.nearest(raw)
        if nearest is not None and self._has_same_bos(nearest.known, add_bos=add_bos):
            return self._joined(raw, nearest, add_bos=add_bos, is_chat=is_chat)
        tokens = self.tokenizer.encode(text, add_bos=add_bos)
        ends = self.tokenizer.ends(tokens, raw)
        return tokens if ends is None else TokenizedText(raw, tokens, ends)

    def remember(
        self, prompt: TokenizedText, answer: Sequence[int], *, is_continuation: bool
    ) -> None:
        """Keep the ids of an answer to `prompt`, up to the first that is not text.

        A special token inside an answer is not shown, so no prompt can mean it.

        Args:
            is_continuation: as in `Tokenizer.detokenizer`, so that the text is the one that a
                prompt which goes on from it will have.
        """
        text, ends = self.tokenizer.spell(answer, is_continuation=is_continuation)
        if not ends:
            return
        start = len(prompt.text)
        self.memory.remember(
            TokenizedText(
                prompt.text + text,
                np.concatenate([prompt.tokens, _int32(answer[: len(ends)])]),
                np.concatenate([prompt.ends, _int32(ends) + np.int32(start)]),
                (*prompt.answers, (start, start + len(text))),
            )
        )

    def _joined(
        self, raw: bytes, nearest: Nearest, *, add_bos: bool, is_chat: bool
    ) -> TokenizedText | Int32Array:
        """Remembered tokens and canonical ones; ids alone if the latter do not spell their text."""
        start, num_known = self._last_divider(raw, nearest)
        rest = raw[start:]
        tokens = self.tokenizer.encode(rest.decode("utf-8"), add_bos=add_bos and start == 0)
        ends = self.tokenizer.ends(tokens, rest)
        if ends is None:
            return np.concatenate([nearest.known.tokens[:num_known], tokens])
        canonical = TokenizedText(raw, tokens, ends + np.int32(start))
        seam = _seam(nearest, canonical) if is_chat else None
        if seam is None:
            return _join(nearest.known, num_known, canonical, 0, start)
        num_known, num_canonical = (
            text.num_tokens_to(seam) or 0 for text in (nearest.known, canonical)
        )
        return _join(nearest.known, num_known, canonical, num_canonical, seam)

    def _last_divider(self, raw: bytes, nearest: Nearest) -> tuple[int, int]:
        """Where the last divider in reach begins, and how many remembered tokens are before it.

        (0, 0) if there is none.
        """
        known, num_shared = nearest
        spelling = self.tokenizer.spelling
        if known.is_answer(num_shared) and spelling.has_divider_at(raw, num_shared):
            num_known = known.num_tokens_to(num_shared)
            if num_known is not None:
                return num_shared, num_known
        is_shared = known.ends <= num_shared
        found = np.flatnonzero(spelling.is_divider(known.tokens) & is_shared)
        index = int(found[-1]) if found.size else 0
        start = int(known.ends[index - 1]) if index else 0
        return (start, index) if start else (0, 0)

    def _has_same_bos(self, known: TokenizedText, *, add_bos: bool) -> bool:
        """Whether a BOS that is not in the text stands before it just if one is to be added."""
        bos = self.tokenizer.bos_token_id
        has_bos = bool(known.tokens[0] == bos)
        return bos is None or (has_bos if add_bos else not (has_bos and known.ends[0] == 0))


def _seam(nearest: Nearest, canonical: TokenizedText) -> int | None:
    """The last place inside or at the end of an answer where a token ends in both [bytes]."""
    known, num_shared = nearest
    for start, end in reversed(known.answers):
        last = min(end, num_shared)
        if last < canonical.ends[0]:
            break  # it is before all that was encoded
        common = np.intersect1d(
            _between(known.ends, start, last), _between(canonical.ends, start, last)
        )
        if common.size:
            return int(common[-1])
    return None


def _between(ends: Int32Array, first: int, last: int) -> Int32Array:
    """Those after `first`, up to `last`; `ends` are in order."""
    return ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, last, "right")]


def _join(
    known: TokenizedText, num_known: int, canonical: TokenizedText, num_canonical: int, seam: int
) -> TokenizedText:
    """The first tokens of the one, then the other's without its first."""
    return TokenizedText(
        canonical.text,
        np.concatenate([known.tokens[:num_known], canonical.tokens[num_canonical:]]),
        np.concatenate([known.ends[:num_known], canonical.ends[num_canonical:]]),
        tuple((start, min(end, seam)) for start, end in known.answers if start < seam),
    )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)
