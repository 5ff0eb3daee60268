"""Makes the engine's requests out of what clients ask."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ipc import messages as wire
from runtime_cache.engine.request import NewRequest, SamplingParams, TokenArray
from runtime_cache.ids import PrefixId, RequestId, TenantName
from runtime_cache.intake import Intake
from runtime_cache.work import Work


@dataclass(frozen=True)
class Defaults:
    """What a request gets that says nothing of its own, and what none may exceed.

    Attributes:
        max_unsent_tokens: of one answer; if its client gives no credit for more, it ends.
    """

    max_tokens: int | None = None
    deadline_ms: int | None = None
    max_unsent_tokens: int = 4096


class RequestMaker:
    """Knows what a request gets that says nothing of its own.

    Attributes:
        defaults: may be replaced at any time.
    """

    def __init__(
        self, intakes: Mapping[TenantName, Intake], bundle_digest: str, defaults: Defaults
    ) -> None:
        self.defaults = defaults
        self._intakes = intakes
        self._bundle_digest = bundle_digest

    def deadline_s(self, work: Work) -> float | None:
        """When its answer has to end, by the engine's clock; None for no such time."""
        if not isinstance(work.message, wire.AnswerRequest):
            return None
        deadline_ms = work.message.deadline_ms or self.defaults.deadline_ms
        return None if deadline_ms is None else work.arrived_s + deadline_ms / 1000

    def request(
        self,
        request_id: RequestId,
        work: Work,
        message: wire.AnswerRequest | wire.Register,
        tokens: TokenArray,
    ) -> NewRequest:
        """What the engine is to do.

        Args:
            tokens: of the prompt.
        """
        if isinstance(message, wire.Register):
            return NewRequest(
                request_id,
                tokens,
                SamplingParams(temperature=0.0),
                kind="register",
                prefix_id=self._prefix_id(tokens),
                arrived_s=work.arrived_s,
                tenant=work.tenant,
            )
        intake = self._intakes[work.tenant]
        params = intake.params(message, seed=secrets.randbits(53))
        if params.max_tokens is None:
            params = replace(params, max_tokens=self.defaults.max_tokens)
        return NewRequest(
            request_id,
            tokens,
            params,
            eos_token_ids=intake.tokenizer.eos_token_ids,
            # A chat answer is a text of its own; what `generate` gives goes on from the prompt.
            detokenizer=intake.tokenizer.detokenizer(
                is_continuation=isinstance(message, wire.Generate)
            ),
            deadline_s=self.deadline_s(work),
            arrived_s=work.arrived_s,
            tenant=work.tenant,
            use_cache=message.use_cache,
            cache_priority=message.cache_priority,
        )

    def _prefix_id(self, tokens: TokenArray) -> PrefixId:
        """Equal tokens on equal bundles have equal names, in every process."""
        content = self._bundle_digest.encode() + tokens.tobytes()
        return PrefixId(f"p-{hashlib.sha256(content).hexdigest()[:32]}")
