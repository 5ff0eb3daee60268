"""Which bytes of a text each of its tokens stands for, and where texts fall apart by themselves.

Only what can be checked is told: the tokens' own bytes, put together, must be the text. The
library's offsets are not used: byte-level post-processors trim them, and in SentencePiece
vocabularies those of the space before a text overlap the first word's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Spelling:
    """One vocabulary's spelling. Immutable; its methods may be called from any thread.

    A *divider* is a special token whose name, wherever it is written, is taken for this token
    before anything else is looked at. What stands on one side of it therefore has no influence on
    how the other side is tokenised.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        added: Mapping[int, tokenizers.AddedToken],
        state: Mapping[str, Any],
    ) -> None:
        """Read the rules of a vocabulary.

        Args:
            pieces: the bytes of every token id, added tokens by name.
            added: the added tokens by id.
            state: `tokenizer.json`.
        """
        self._pieces = pieces
        self._is_space_forced = _is_space_forced(state)
        self._splits = _mask(len(pieces), [i for i, t in added.items() if not t.normalized])
        dividers = _dividers(added)
        self._is_divider = _mask(len(pieces), list(dividers))
        names = sorted(map(re.escape, dividers.values()), key=len, reverse=True)
        self._divider = re.compile("|".join(names).encode("utf-8")) if names else None

    def ends(self, token_ids: Int32Array, text: bytes) -> Int32Array | None:
        """Where in a text each of its tokens ends [int32, bytes].

        A space that the vocabulary itself puts before a text or a part of it takes no room.

        Args:
            token_ids: of the text, as the library encodes it.
            text: UTF-8.

        Returns:
            None if the tokens do not spell the text exactly: it was normalised, or has something
            that the vocabulary cannot write.
        """
        pieces = [self._pieces[i] for i in token_ids.tolist()]
        position = done = 0
        for start in self._part_starts(token_ids):
            position += sum(map(len, pieces[done:start]))
            done = start
            if pieces[start].startswith(b" ") and self._is_put_before(text, position):
                pieces[start] = pieces[start][1:]
        if b"".join(pieces) != text:
            return None
        return np.cumsum([len(piece) for piece in pieces], dtype=np.int32)

    def is_divider(self, token_ids: Int32Array) -> BoolArray:
        """Which of the tokens are dividers."""
        return self._is_divider[token_ids]

    def has_divider_at(self, text: bytes, position: int) -> bool:
        """Whether a divider is written at this byte of a text."""
        return self._divider is not None and self._divider.match(text, position) is not None

    def _part_starts(self, token_ids: Int32Array) -> Iterator[int]:
        """The first tokens of the parts into which added tokens cut the text."""
        splits = self._splits[token_ids]
        follows = np.concatenate([[True], splits[:-1]])[: splits.size]
        yield from np.flatnonzero(follows & ~splits).tolist()

    def _is_put_before(self, text: bytes, position: int) -> bool:
        """Whether the space that begins a part is not the text's own."""
        return self._is_space_forced or not text.startswith(b" ", position)


def _is_space_forced(state: Mapping[str, Any]) -> bool:
    """Whether a space is put before each part even if it begins with one (a `Prepend`).

    Byte-level and Metaspace pre-tokenizers put one only where there is none.
    """
    return any(part["type"] == "Prepend" for part in _parts(state["normalizer"], "normalizers"))


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The parts of one step of `tokenizer.json`."""
    if step is None:
        return []
    parts: list[dict[str, Any]] = step[name] if step["type"] == "Sequence" else [step]
    return parts


def _dividers(added: Mapping[int, tokenizers.AddedToken]) -> dict[int, str]:
    """The dividers among the added tokens, with their names.

    The library takes the leftmost of the added tokens, and of those the longest, before it
    normalises anything. So a token is found everywhere unless another one can begin before it and
    reach into it, or is longer.
    """
    names = [token.content for token in added.values() if not token.normalized]
    tails = {name[i:] for name in names for i in range(1, len(name))}
    every_name = "\0".join(names)
    return {
        token_id: token.content
        for token_id, token in added.items()
        if token.special
        and _is_found_as_written(token)
        and every_name.count(token.content) == 1
        and tails.isdisjoint(token.content[:i] for i in range(1, len(token.content)))
    }


def _is_found_as_written(token: tokenizers.AddedToken) -> bool:
    # A token at a blank end could be swallowed by a neighbour that takes the blanks around it.
    takes_more = token.lstrip or token.rstrip or token.single_word or token.normalized
    return not takes_more and bool(token.content) and token.content == token.content.strip()


def _mask(size: int, token_ids: Sequence[int]) -> BoolArray:
    mask = np.zeros(size, dtype=np.bool_)
    mask[list(token_ids)] = True
    return mask
