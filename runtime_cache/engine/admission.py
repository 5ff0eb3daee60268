"""Which requests can be served at all, and where their answers must end. Pure."""

from __future__ import annotations

from runtime_cache.cache.manager import CacheManager
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.request import NewRequest
from runtime_cache.engine.sequence import Sequence
from runtime_cache.errors import InvalidRequest, TooLong


class Admission:
    """The limits that a tenant's request is held against when it arrives.

    Attributes:
        max_sequence_tokens: the most tokens a request may have, prompt and answer together.
            Limited by the context, and by the cache if that is smaller: since the last token of
            an answer is never fed, the cache need hold one token less.
    """

    def __init__(self, cache: CacheManager, gears: GearTable, *, is_deterministic: bool) -> None:
        cache_tokens = cache.num_usable * cache.block_size
        self.max_sequence_tokens = min(gears.max_model_len, cache_tokens + 1)
        self._cache = cache
        self._is_deterministic = is_deterministic

    def sequence(self, request: NewRequest, now_s: float) -> Sequence:
        """Take a request in. Its answer ends at `max_tokens` or at the end of the context.

        Raises:
            InvalidRequest: it contradicts itself.
            TooLong: it could never run.
        """
        self._check_prompt(request)
        if request.kind == "register":
            self._check_registration(request)
        max_tokens = self.max_sequence_tokens
        if request.params.max_tokens is not None:
            max_tokens = min(max_tokens, len(request.prompt) + request.params.max_tokens)
        return Sequence(
            request,
            self._cache,
            max_tokens=max_tokens,
            arrived_s=now_s if request.arrived_s is None else request.arrived_s,
            is_deterministic=self._is_deterministic,
        )

    def _check_prompt(self, request: NewRequest) -> None:
        num_tokens, limit = len(request.prompt), self.max_sequence_tokens - 1
        max_tokens = request.params.max_tokens
        if num_tokens == 0:
            raise InvalidRequest("the prompt is empty")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequest(f"`max_tokens` is {max_tokens}, but an answer has at least 1")
        if "" in request.params.stop:
            raise InvalidRequest("a stop string is empty")
        if num_tokens > limit:
            raise TooLong(
                f"the prompt has {num_tokens} tokens; with room for one answer token, context and "
                f"pool take prompts of at most {limit}"
            )

    def _check_registration(self, request: NewRequest) -> None:
        cache = self._cache
        num_blocks = cache.num_blocks_for(cache.policy.cacheable(len(request.prompt)))
        limit = cache.keeps.max_blocks
        if request.prefix_id is None:
            raise InvalidRequest("a registration needs a `prefix_id`")
        if num_blocks > limit:
            raise TooLong(
                f"the prefix takes {num_blocks} blocks; all that is kept together may take {limit}"
            )
