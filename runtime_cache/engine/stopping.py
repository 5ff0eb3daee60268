"""When an answer ends by itself, and what of its text may be shown. Pure.

A stop string may begin at the end of one token and end in a later one, so the text that could be
its beginning is held back until it is known. What was emitted is never taken back.

Not here: the end by `max_tokens`, by the context's length, by deadline or cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from msgspec import Struct

from runtime_cache.engine.request import SamplingParams


class StopResult(Struct, frozen=True):
    """What one token did.

    Attributes:
        text: what may be shown now.
        stop: if the answer has ended with this token: the stop string that was found, or the text
            of the token itself; else None.
    """

    text: str
    stop: str | None = None


class StopChecker:
    """Looks for the end in one answer.

    The text of a token that ends the answer by its id is not part of the answer; neither is a stop
    string nor what follows it. The stop string that is complete first ends the answer, and of those
    that are complete together the longest, so that it does not matter how the text was cut into
    tokens.
    """

    __slots__ = ("_end_ids", "_held", "_is_finished", "_stops", "_token_text")

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Set[int],
        token_text: Callable[[int], str] = str,
    ) -> None:
        """Start an answer.

        Args:
            eos_token_ids: the model's own end tokens; not looked at if `params.ignore_eos`.
            token_text: names the token id that ended the answer (`Detokenizer.token_text`).

        Raises:
            ValueError: a stop string is empty.
        """
        if not all(params.stop):
            raise ValueError("a stop string is empty")
        own = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._end_ids = params.stop_token_ids | own
        # Longest first: of matches that end together the first found is the longest.
        self._stops = sorted(set(params.stop), key=lambda stop: (-len(stop), stop))
        self._token_text = token_text
        self._held = ""
        self._is_finished = False

    def is_end(self, token_id: int) -> bool:
        """Whether this token ends the answer by its id."""
        return token_id in self._end_ids

    def feed(self, token_id: int, piece: str) -> StopResult:
        """Take the next token of the answer.

        Args:
            piece: the text that the token completed; ignored if the token ends the answer.

        Raises:
            ValueError: the answer has already ended.
        """
        if self._is_finished:
            raise ValueError("a token was fed after the end of the answer")
        if self.is_end(token_id):
            return self._finish(self._take(), self._token_text(token_id))
        if not self._stops:
            return StopResult(piece)
        return self._search(piece)

    def flush(self, piece: str = "") -> StopResult:
        """The text still held back, when the answer ends for another reason.

        Args:
            piece: the detokenizer's own rest; a stop string may end in it.
        """
        if self._is_finished:
            return StopResult("")
        result = self._search(piece)
        if result.stop is not None:
            return result
        return StopResult(result.text + self._take())

    def _search(self, piece: str) -> StopResult:
        text = self._take() + piece
        start, stop = self._first_match(text)
        if stop is not None:
            return self._finish(text[:start], stop)
        cut = len(text) - self._held_length(text)
        self._held = text[cut:]
        return StopResult(text[:cut])

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Where the stop string that is complete first begins, and which it is."""
        first_end, found = len(text) + 1, None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and start + len(stop) < first_end:
                first_end, found = start + len(stop), stop
        return first_end - len(found or ""), found

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _finish(self, text: str, stop: str) -> StopResult:
        self._is_finished = True
        return StopResult(text, stop)

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held
