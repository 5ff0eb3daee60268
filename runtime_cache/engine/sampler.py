"""From logits to the next token. Pure: the same state and logits always give the same token.

In this order, with vLLM's meaning of each parameter:

1. repetition penalty over the tokens of prompt and answer: positive logits divided, others
   multiplied by it;
2. frequency and presence penalty over the answer: `frequency * count + presence` subtracted;
3. `logit_bias` added (vLLM adds it before the penalties; after them, a ban stays a ban);
4. temperature 0: the largest logit, the lowest id among equals. Otherwise divide by it;
5. top-k: tokens below the k-th largest logit go; those equal to it stay;
6. min-p: tokens less probable than `min_p` times the best go;
7. top-p: of what is left, renormalised, the smallest set of the most probable tokens that reaches
   `top_p` stays, at least one; among equals the lower ids;
8. one draw from the request's own stream.

Reported log-probabilities are those of the raw logits, before step 1. Steps 5-7 work on the few
tokens that are left, never in Python over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime_cache.engine.request import (
    BadLogits,
    Sampled,
    SamplingParams,
    TokenArray,
    TokenLogprobs,
)
from runtime_cache.errors import InvalidRequest

Logits = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]

# Far below any temperature that differs from greedy, far enough above 0 to divide by.
_MIN_TEMPERATURE = 1e-30
#: A smaller repetition penalty acts like this one; divided by less, logits leave float32.
_MIN_REPETITION_PENALTY = 1e-6
_MAX_BIAS = float(np.finfo(np.float32).max) / 4
_SEED_MASK = (1 << 64) - 1


class SamplerState:
    """What a request's sampling remembers from token to token: its random stream and its counts.

    It belongs to the request, not to a step: `sample` accepts the token it returns, so a request
    that is preempted and computed again goes on with the stream where it was.
    """

    __slots__ = ("_bias", "_bias_ids", "_bits", "_counts", "is_plain_greedy", "params")

    def __init__(self, params: SamplingParams, prompt_tokens: TokenArray) -> None:
        """Start a stream.

        Args:
            prompt_tokens: ids below the vocabulary's size [int32, n]; so are those in
                `params.logit_bias`.

        Raises:
            InvalidRequest: a bias is not finite or beyond what float32 logits can take.
        """
        self.params = params
        self._bits = np.random.Philox(key=params.seed & _SEED_MASK)
        self._bias_ids, self._bias = _bias_arrays(params)
        self._counts = _TokenCounts(prompt_tokens) if _has_penalties(params) else None
        self.is_plain_greedy = (
            params.temperature == 0
            and params.logprobs is None
            and self._counts is None
            and not params.logit_bias
        )

    def accept(self, token_id: int) -> None:
        """Count an answer token. `sample` does this itself."""
        if self._counts is not None:
            self._counts.add(token_id)

    def uniform(self) -> float:
        """The stream's next number in [0, 1), of 53 bits."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def adjusted(self, logits: Logits) -> Logits:
        """Logits [V] after penalties and bias; `logits` itself if there are none, else a copy."""
        if self._counts is None and not self._bias_ids.size:
            return logits
        changed: Logits = logits.copy()
        if self._counts is not None:
            self._counts.penalise(changed, self.params)
        changed[self._bias_ids] += self._bias
        return changed


def sample_rows(logits: Logits, states: Sequence[SamplerState]) -> tuple[Sampled | BadLogits, ...]:
    """Choose the next token of each row and count it in the row's state.

    Rows that are plainly greedy cost one argmax together. The state of a bad row is not changed.

    Args:
        logits: [n, V] fp32, one row for each state; not changed.

    Raises:
        ValueError: `logits` is not [n, V] with n states.
    """
    if logits.ndim != 2 or len(logits) != len(states):
        raise ValueError(f"{len(states)} states for logits of shape {logits.shape}")
    best_ids = np.argmax(logits, axis=1)
    best = np.take_along_axis(logits, best_ids[:, np.newaxis], axis=1)[:, 0]
    return tuple(
        _sample(row, state, best_id, value)
        for row, state, best_id, value in zip(
            logits, states, best_ids.tolist(), best.tolist(), strict=True
        )
    )


def _sample(logits: Logits, state: SamplerState, best_id: int, best: float) -> Sampled | BadLogits:
    """One row [V], given its largest value; argmax stops at the first NaN, so `best` shows any."""
    if not math.isfinite(best):
        return BadLogits(f"the model's logits are not usable: the largest is {best}")
    params = state.params
    if state.is_plain_greedy:
        return Sampled(best_id)
    adjusted = state.adjusted(logits)
    if params.temperature == 0:
        token_id = int(np.argmax(adjusted))
    else:
        token_id = _draw(adjusted, params, state.uniform())
    state.accept(token_id)
    if params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprobs(logits, token_id, params.logprobs))


def _draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    """Steps 4 to 8; the draw walks the kept tokens in order of id."""
    best = float(logits.max())
    kept = _top_k_min_p(logits, best, params)
    chances = _softmax(logits if kept is None else logits[kept], best, params.temperature)
    if params.top_p < 1:
        inside = _nucleus(chances, params.top_p)
        kept = inside if kept is None else kept[inside]
        chances = chances[inside]
    cumulative = np.cumsum(chances)
    # `uniform` is at most 1 - 2**-53, so the product is below the last sum and the index exists.
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return index if kept is None else int(kept[index])


def _top_k_min_p(logits: Logits, best: float, params: SamplingParams) -> _Ids | None:
    """Ids that pass both filters, ascending; None for all of them."""
    least = -math.inf
    if 0 < params.top_k < len(logits):
        least = float(np.partition(logits, -params.top_k)[-params.top_k])
    if params.min_p > 0:
        least = max(least, best + params.temperature * math.log(params.min_p))
    return None if least == -math.inf else np.flatnonzero(logits >= np.float32(least))


def _softmax(logits: Logits, best: float, temperature: float) -> npt.NDArray[np.float64]:
    """Chances at a temperature; `best` is the largest logit.

    It is subtracted first, and in float64, so that nothing overflows at any temperature.
    """
    scaled = logits.astype(np.float64)
    scaled -= best
    scaled /= max(temperature, _MIN_TEMPERATURE)
    weights = np.exp(scaled, out=scaled)
    weights /= weights.sum()
    return weights


def _nucleus(chances: npt.NDArray[np.float64], top_p: float) -> _Ids:
    """Indices of the smallest most probable set whose sum reaches `top_p`, ascending.

    Tokens below `(1 - top_p) / n` together weigh less than `1 - top_p`, so none of them can belong
    to it; only the others are sorted.
    """
    likely = np.flatnonzero(chances >= (1 - top_p) / len(chances))
    by_chance = likely[np.argsort(-chances[likely], kind="stable")]
    count = int(np.searchsorted(np.cumsum(chances[by_chance]), top_p, side="left")) + 1
    return np.sort(by_chance[:count])


def _logprobs(logits: Logits, token_id: int, num_top: int) -> TokenLogprobs:
    best = float(logits.max())
    # In float64: differences of float32 logits may be beyond float32.
    normaliser = best + math.log(float(np.exp(logits.astype(np.float64) - best).sum()))
    top = _top(logits, num_top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits[token_id]) - normaliser,
        top=tuple((i, float(logits[i]) - normaliser) for i in top.tolist()),
    )


def _top(logits: Logits, num_top: int) -> _Ids:
    """Ids of the largest logits, best first, among equals the lower id first."""
    if num_top <= 0:
        return np.empty(0, dtype=np.int64)
    num_top = min(num_top, len(logits))
    least = np.partition(logits, -num_top)[-num_top]
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:num_top]]


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _bias_arrays(params: SamplingParams) -> tuple[_Ids, Logits]:
    for token_id, bias in params.logit_bias:
        # Not written as `>`: a NaN must not pass either.
        if not abs(bias) <= _MAX_BIAS:
            raise InvalidRequest(f"logit_bias of token {token_id} is out of range: {bias}")
    ids, biases = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
    return np.asarray(ids, dtype=np.int64), np.asarray(biases, dtype=np.float32)


class _TokenCounts:
    """How often each token of prompt and answer occurs in the answer; only tokens that occur.

    `_ids[:_size]` are distinct, `_counts` beside them is 0 for those of the prompt alone.
    """

    __slots__ = ("_counts", "_ids", "_place", "_size")

    def __init__(self, prompt_tokens: TokenArray) -> None:
        distinct = np.unique(prompt_tokens)
        self._size = len(distinct)
        self._ids: _Ids = np.empty(max(16, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts: Logits = np.zeros(len(self._ids), dtype=np.float32)
        self._place = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, self._size)
        if place == self._size:
            self._grow_for_one()
            self._ids[place] = token_id
        self._counts[place] += 1

    def penalise(self, logits: Logits, params: SamplingParams) -> None:
        """Apply steps 1 and 2 to `logits` [V], in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        factor = np.float32(max(params.repetition_penalty, _MIN_REPETITION_PENALTY))
        values = np.where(values > 0, values / factor, values * factor)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values

    def _grow_for_one(self) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._size += 1
