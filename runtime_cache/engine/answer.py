"""One request's answer on its way from token ids to text. Pure."""

from __future__ import annotations

from runtime_cache.engine.commands import EmitTokens
from runtime_cache.engine.request import NewRequest, Sampled
from runtime_cache.engine.stopping import StopChecker, StopResult

#: What a token does that can end nothing.
_GOES_ON = StopResult("")


class Answer:
    """Detokenizer and stop checker of one request; survives its preemptions."""

    __slots__ = ("_checker", "_detokenizer", "_has_stops", "_request_id")

    def __init__(self, request: NewRequest) -> None:
        self._request_id = request.request_id
        self._detokenizer = request.detokenizer
        token_text = str if request.detokenizer is None else request.detokenizer.token_text
        self._checker = StopChecker(request.params, request.eos_token_ids, token_text)
        self._has_stops = bool(request.params.stop)

    def take(self, sampled: Sampled) -> tuple[EmitTokens, StopResult]:
        """What to show for the next token, and whether the answer ends with it."""
        token_id, reported = sampled.token_id, sampled.logprobs
        if self._checker.is_end(token_id):
            rest = self._incomplete()
            result = self._checker.feed(token_id, "")
            text = result.text + rest
        else:
            text = "" if self._detokenizer is None else self._detokenizer.step(token_id)
            result = _GOES_ON
            if self._has_stops:
                result = self._checker.feed(token_id, text)
                text = result.text
        logprobs = () if reported is None else (reported,)
        return EmitTokens(self._request_id, (token_id,), text, logprobs), result

    def rest(self) -> StopResult:
        """The text still held back, when the answer ends for another reason than its tokens."""
        return self._checker.flush(self._incomplete())

    def _incomplete(self) -> str:
        """What stands for a character whose last bytes did not come."""
        return "" if self._detokenizer is None else self._detokenizer.flush()
