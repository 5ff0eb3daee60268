"""A request's parameters and results, as the engine sees them. Pure data.

What is made for every token is a msgspec `Struct`: of all that is frozen it is the quickest made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from runtime_cache.cache.policy import DEFAULT_PRIORITY
from runtime_cache.cache.results import CacheReport
from runtime_cache.ids import DEFAULT_TENANT, PrefixId, RequestId, TenantName

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when an answer ends.

    Attributes:
        max_tokens: answer tokens at the most; None: as many as the context allows.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off; relative to the most probable token.
        seed: the random stream of this request; the service draws one when the client gave none.
        repetition_penalty: over prompt and answer; 1 is off.
        presence_penalty: over the answer; 0 is off.
        frequency_penalty: over the answer; 0 is off.
        logit_bias: token id → added to its logit.
        stop: strings that end the answer; not part of its text.
        stop_token_ids: token ids that end the answer besides the model's own.
        ignore_eos: the model's end tokens do not end the answer.
        logprobs: how many top log-probabilities to report per token; None for no report at all.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None


class Detokenizer(Protocol):
    """Turns one request's token ids into text as they come."""

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is still incomplete."""

    def flush(self) -> str:
        """Text of what is still incomplete when the answer ends (may be U+FFFD)."""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special tokens by name; does not change the stream."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A validated request.

    Attributes:
        prompt: token ids [int32, at least 1].
        kind: `generate`, or `register` for a prefix that is computed once and kept.
        eos_token_ids: end tokens of the model.
        detokenizer: None when no text is wanted.
        deadline_s: on the clock of the events; None for no deadline.
        arrived_s: when the client's message came, on the same clock; None for when the request
            is handed in.
        tenant: whose part of the cache it uses; the daemon says so, never the client.
        use_cache: False: it neither reuses cached KV nor leaves any.
        cache_priority: how long what it leaves in the cache is worth keeping [0..100].
    """

    request_id: RequestId
    prompt: TokenArray
    params: SamplingParams
    kind: Literal["generate", "register"] = "generate"
    prefix_id: PrefixId | None = None
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = field(default=None, compare=False)
    deadline_s: float | None = None
    arrived_s: float | None = None
    tenant: TenantName = DEFAULT_TENANT
    use_cache: bool = True
    cache_priority: int = DEFAULT_PRIORITY


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position (of the distribution before temperature and filters).

    Attributes:
        token_id: the chosen token.
        logprob: its natural log-probability.
        top: the most probable tokens, best first, as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampled(Struct, frozen=True):
    """The sampler's choice for one row of a batch."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class BadLogits:
    """The model's output for one row is not usable: it has NaN or +inf, or nothing but -inf."""

    message: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them whose KV came from the cache when it was first admitted.
        prefilled_tokens: token rows computed in prefill: the prompt's, and after a preemption
            whatever of prompt and answer had to be computed again.
        completion_tokens: answer tokens.
        queue_s: from arrival to the first step.
        ttft_s: from arrival to the first answer token; None if there was none.
        total_s: from arrival to the end.
        cache: what the cache did when it was first admitted; None if it never was.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    cache: CacheReport | None = None
