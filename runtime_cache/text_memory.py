"""Texts whose token ids are known, because the model wrote a part of them: bounded, searchable.

A model's answer is seldom tokenised again into the ids that the model chose, so a prompt that goes
on from it can only meet its KV if those ids are remembered.

Not here: which part of a remembered text a prompt may use (`recall`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from sortedcontainers import SortedList  # type: ignore[import-untyped]

from om_models.spelling import Int32Array

#: Of one tenant: about 700 conversations of 8000 tokens.
DEFAULT_MAX_BYTES = 64 * 1024**2
#: What a text costs besides its characters and tokens, roughly.
OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """A text and the tokens that stand for it.

    Attributes:
        text: UTF-8.
        tokens: ids [int32, n].
        ends: where in the text each token ends [int32, n; bytes]. A token without a text of its
            own, or that leaves a character incomplete, ends where the one before it did.
        answers: the parts of the text that the model wrote, as (start, end) [bytes], in order;
            everything else is tokenised as the library does.
    """

    text: bytes
    tokens: Int32Array
    ends: Int32Array
    answers: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        """What it takes to remember it [host memory]."""
        return len(self.text) + self.tokens.nbytes + self.ends.nbytes + OVERHEAD_BYTES

    def num_tokens_to(self, position: int) -> int | None:
        """How many tokens stand for the text before this byte; None if none of them ends there."""
        index = int(np.searchsorted(self.ends, position))
        has_end = index < self.ends.size and self.ends[index] == position
        return index + 1 if has_end else None

    def is_answer(self, position: int) -> bool:
        """Whether the byte before this one is the model's."""
        return any(start < position <= end for start, end in self.answers)

    def is_beginning_of(self, other: TokenizedText) -> bool:
        """Whether the other text begins with this one, token by token."""
        head = other.tokens[: self.tokens.size]
        return other.text.startswith(self.text) and np.array_equal(head, self.tokens)


class Nearest(NamedTuple):
    """A remembered text, and how many bytes at its beginning it shares with the one looked up."""

    known: TokenizedText
    num_shared: int


class TextMemory:
    """The texts of one tenant, the least recently used forgotten first. Safe for any thread.

    A text that is the beginning of another one, token by token, is not kept beside it: a
    conversation is one text, and a branch from an earlier turn is found in it.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Start with nothing.

        Args:
            max_bytes: of host memory, for all texts together (`TokenizedText.num_bytes`).
        """
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[bytes, TokenizedText] = OrderedDict()  # oldest use first
        self._sorted = SortedList()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """What all texts take [host memory]."""
        return self._num_bytes

    def nearest(self, text: bytes) -> Nearest | None:
        """The remembered text that shares the longest beginning with this one; None without any.

        It counts as used if that beginning reaches into something the model wrote.
        """
        with self._lock:
            found = [Nearest(known, _num_shared(known.text, text)) for known in self._around(text)]
            nearest = max(found, key=lambda entry: entry.num_shared, default=None)
            if nearest is None or nearest.num_shared == 0:
                return None
            known, num_shared = nearest
            if any(start < num_shared for start, _ in known.answers):
                self._known.move_to_end(known.text)
            return nearest

    def remember(self, new: TokenizedText) -> None:
        """Keep a text; of one that is known, the new ids count.

        A text larger than the whole memory is not kept.
        """
        if new.num_bytes > self._max_bytes:
            return
        with self._lock:
            # Between a text and a beginning of it stand only other texts with that beginning, and
            # each of them would have taken its place already: to look at the neighbours is enough.
            for known in self._around(new.text):
                if new.is_beginning_of(known) and len(known.text) > len(new.text):
                    self._known.move_to_end(known.text)
                    return
                if known.text == new.text or known.is_beginning_of(new):
                    self._forget(known)
            self._known[new.text] = new
            self._sorted.add(new.text)
            self._num_bytes += new.num_bytes
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._known.values())))

    def _around(self, text: bytes) -> list[TokenizedText]:
        """The last text that is not after this one in order, and the first that is.

        No text shares a longer beginning with it than these do.
        """
        index = self._sorted.bisect_right(text)
        return [self._known[key] for key in self._sorted[max(0, index - 1) : index + 1]]

    def _forget(self, known: TokenizedText) -> None:
        del self._known[known.text]
        self._sorted.remove(known.text)
        self._num_bytes -= known.num_bytes


def _num_shared(one: bytes, other: bytes) -> int:
    """Length of the beginning that two texts share [bytes]."""
    size = min(len(one), len(other))
    if one.startswith(other[:size]):
        return size
    both = (np.frombuffer(text, dtype=np.uint8, count=size) for text in (one, other))
    return int(np.argmax(np.not_equal(*both)))
