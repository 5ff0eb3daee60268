"""From logits to the next token. Pure: the same state and logits give the same token.

So they do on one machine. On another one or with another NumPy, float32 `exp` and sums may differ
in their last bits, and a draw that falls on the border of two tokens, within about a millionth of
all chances, may give the other one. The stream and greedy choices are the same everywhere.

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
8. one draw from the request's own stream; tokens less probable than e**-84 times the best are
   never drawn, which no stream of 53 bits could tell.

Reported log-probabilities are those of the raw logits, before step 1, right to 1e-5.

All of it runs between two steps, so it is written for time: a few passes of NumPy over a row, each
in float32 (`exp` in float64 takes ten times as long), sums within a block in float32 and over
blocks in float64, and nothing is sorted but the tokens that may matter.
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

# Below the one a temperature is greedy, above the other it is uniform; both are safe to divide by.
_MIN_TEMPERATURE = 1e-30
_MAX_TEMPERATURE = 1e30
# Logarithm of the least weight beside the best one's 1: below e**-87 numbers are subnormal in
# float32, and `exp` takes several times as long.
_LEAST_LOG_WEIGHT = np.float32(-84)
#: Tokens whose weights are summed in float32; a draw looks at one block token by token.
_BLOCK_TOKENS = 256
#: Columns whose maxima bound the k-th largest logit from below.
_NUM_COLUMNS = 1024
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
        #: Made when it is needed: greedy answers need none.
        self._bits: np.random.Philox | None = None
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
        if self._bits is None:
            self._bits = np.random.Philox(key=self.params.seed & _SEED_MASK)
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def adjusted(self, logits: Logits) -> Logits:
        """Logits [V] after penalties and bias; `logits` itself if there are none, else a copy.

        What leaves float32 is infinite.
        """
        if self._counts is None and not self._bias_ids.size:
            return logits
        changed: Logits = logits.copy()
        with np.errstate(over="ignore"):
            if self._counts is not None:
                self._counts.penalise(changed, self.params)
            changed[self._bias_ids] += self._bias
        return changed


def sample_rows(logits: Logits, states: Sequence[SamplerState]) -> tuple[Sampled | BadLogits, ...]:
    """Choose the next token of each row and count it in the row's state.

    One row after the other, so that a row stays in the processor's cache between its passes; only
    where every row wants no more than its largest logit, one pass takes them all. The state of a
    bad row is not changed.

    Args:
        logits: [n, V] fp32, one row for each state; not changed.

    Raises:
        ValueError: `logits` is not [n, V] with n states.
    """
    if logits.ndim != 2 or len(logits) != len(states):
        raise ValueError(f"{len(states)} states for logits of shape {logits.shape}")
    if all(state.is_plain_greedy for state in states):
        return _largest(logits)
    return tuple(_sample(row, state) for row, state in zip(logits, states, strict=True))


def _largest(logits: Logits) -> tuple[Sampled | BadLogits, ...]:
    """The largest of each row [n, V], as `_sample` chooses it."""
    ids = logits.argmax(axis=1)
    values = logits[np.arange(len(logits)), ids]
    if np.isfinite(values).all():
        return tuple(map(Sampled, ids.tolist()))
    return tuple(map(_greedy, ids.tolist(), values.tolist()))


def _greedy(best_id: int, best: float) -> Sampled | BadLogits:
    if math.isfinite(best):
        return Sampled(best_id)
    return BadLogits(f"the model's logits are not usable: the largest is {best}")


def _sample(logits: Logits, state: SamplerState) -> Sampled | BadLogits:
    """One row [V]; argmax stops at the first NaN, so `best` shows any."""
    best_id, best = _best(logits)
    if state.is_plain_greedy or not math.isfinite(best):
        return _greedy(best_id, best)
    token_id = _choose(logits, best_id, best, state)
    if token_id is None:
        return BadLogits("penalties and bias took the largest logit out of float32")
    state.accept(token_id)
    num_top = state.params.logprobs
    if num_top is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprobs(logits, best, token_id, num_top))


def _choose(logits: Logits, best_id: int, best: float, state: SamplerState) -> int | None:
    """Steps 1 to 8 on a usable row, given its largest value; None if steps 1 to 3 spoil it."""
    adjusted = state.adjusted(logits)
    if adjusted is not logits:
        best_id, best = _best(adjusted)
        if not math.isfinite(best):
            return None
    if state.params.temperature == 0:
        return best_id
    return _draw(adjusted, best, state.params, state.uniform())


def _best(logits: Logits) -> tuple[int, float]:
    """The largest logit, of equals that of the lowest id."""
    best_id = int(logits.argmax())
    return best_id, float(logits[best_id])


def _draw(logits: Logits, best: float, params: SamplingParams, uniform: float) -> int:
    """Steps 4 to 8; the draw walks the kept tokens in order of id."""
    temperature = min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
    kept = _top_k(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    if params.min_p > 0:
        least = best + temperature * math.log(params.min_p)
        kept = _at_least(logits, least) if kept is None else kept[_at_least(logits[kept], least)]
    weights = _weights(logits if kept is None else logits[kept], best, temperature)
    if params.top_p < 1:
        inside = _nucleus(weights, params.top_p)
        kept = inside if kept is None else kept[inside]
        weights = weights[inside]
    place = _place(weights, uniform)
    return place if kept is None else int(kept[place])


def _top_k(logits: Logits, k: int) -> _Ids:
    """Ids of the k largest values and of those equal to the k-th, ascending; 0 < k < V."""
    candidates = _at_least(logits, _below_kth(logits, k))
    values = logits[candidates]
    kept: _Ids = candidates[values >= np.partition(values, -k)[-k]]
    return kept


def _below_kth(logits: Logits, k: int) -> float:
    """A value that at least k of [V] reach, most of the time few more.

    The k-th largest of the maxima of disjoint columns is one, and costs one pass.
    """
    num_rows = len(logits) // _NUM_COLUMNS
    if num_rows < 2 or k > _NUM_COLUMNS // 4:
        return float(np.partition(logits, -k)[-k])
    columns = logits[: num_rows * _NUM_COLUMNS].reshape(num_rows, _NUM_COLUMNS)
    return float(np.partition(columns.max(axis=0), -k)[-k])


def _at_least(logits: Logits, least: float) -> _Ids:
    return np.flatnonzero(logits >= np.float32(least))


def _weights(logits: Logits, best: float, temperature: float) -> Logits:
    """Chances at a temperature, not normalised; `best` is the largest logit, its weight is 1."""
    # Beyond float32 is -inf, whose weight is 0, as it should be.
    with np.errstate(over="ignore"):
        scaled: Logits = logits - np.float32(best)
        if temperature != 1:
            scaled *= np.float32(1 / temperature)
    if scaled.min() >= _LEAST_LOG_WEIGHT:
        return np.exp(scaled, out=scaled)
    has_weight = scaled >= _LEAST_LOG_WEIGHT
    np.maximum(scaled, _LEAST_LOG_WEIGHT, out=scaled)
    np.exp(scaled, out=scaled)
    scaled *= has_weight
    return scaled


def _block_sums(weights: Logits) -> npt.NDArray[np.float64]:
    """Sums of consecutive blocks, the last one what is left over, maybe of no token."""
    num_full = len(weights) // _BLOCK_TOKENS
    end = num_full * _BLOCK_TOKENS
    sums = np.empty(num_full + 1)
    # As `sum(axis=1)`, three times as fast.
    sums[:-1] = np.einsum("ij->i", weights[:end].reshape(num_full, _BLOCK_TOKENS))
    sums[-1] = weights[end:].sum()
    return sums


def _place(weights: Logits, uniform: float) -> int:
    """The index that `uniform` of [0, 1) falls on when the weights are laid end to end.

    First a block, then an index in it. Its weight is not 0.
    """
    if len(weights) <= _BLOCK_TOKENS:
        cumulative = _cumulative(weights)
        return _first_above(cumulative, uniform * float(cumulative[-1]))
    blocks = np.cumsum(_block_sums(weights))
    target = uniform * float(blocks[-1])
    block = _first_above(blocks, target)
    before = float(blocks[block - 1]) if block else 0.0
    start = block * _BLOCK_TOKENS
    inside = _cumulative(weights[start : start + _BLOCK_TOKENS])
    return start + _first_above(inside, target - before)


def _cumulative(weights: Logits) -> npt.NDArray[np.float64]:
    # Converted first: `cumsum(dtype=...)` takes twice as long.
    return np.cumsum(weights.astype(np.float64))


def _first_above(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """Index of the first sum above `target`, or of the first that is the last sum if none is.

    The sums grow there, so what is at that index is above 0. Where none is, `target` comes from a
    sum that was rounded in another way.
    """
    below_last = math.nextafter(float(cumulative[-1]), 0)
    return int(np.searchsorted(cumulative, min(target, below_last), side="right"))


def _nucleus(weights: Logits, top_p: float) -> _Ids:
    """Indices of the smallest most probable set that has `top_p` of the sum, ascending.

    Weights below `(1 - top_p) / n` of the sum together have less than `1 - top_p` of it, so none of
    them can belong to the set; only the others are sorted.
    """
    total = _total(weights)
    likely = _at_least(weights, (1 - top_p) * total / len(weights))
    values = weights[likely]
    descending = np.sort(values)[::-1]
    reached = int(np.searchsorted(_cumulative(descending), top_p * total, side="left"))
    # Past the end where the sums were rounded in different ways.
    last = min(reached, len(values) - 1)
    least = descending[last]
    is_inside = values > least
    num_equal = last + 1 - int(np.count_nonzero(is_inside))
    is_inside[np.flatnonzero(values == least)[:num_equal]] = True
    inside: _Ids = likely[is_inside]
    return inside


def _total(weights: Logits) -> float:
    return float(_block_sums(weights).sum())


def _logprobs(logits: Logits, best: float, token_id: int, num_top: int) -> TokenLogprobs:
    # In float64: differences of float32 logits may be beyond float32.
    normaliser = best + math.log(_total(_weights(logits, best, 1.0)))
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
    candidates = _top_k(logits, min(num_top, len(logits)))
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
