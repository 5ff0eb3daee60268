"""How requests ended: one line of the log each, and counted for metrics.

What clients ask and are answered is in the log only with `log.prompts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import structlog

from ipc import messages as wire
from ipc.server import ClientRef
from runtime_cache.metrics.snapshot import Outcome, PromptTokens
from runtime_cache.work import Work

log = structlog.get_logger(__name__)

#: Messages that are answered at once and change something. What operators changed has a line of its
#: own, where it is done.
_CHANGING = (wire.Release, wire.Pin, wire.Unpin, wire.Drain, wire.Resume, wire.Reload)
#: The fields of messages that hold what is asked.
_PROMPT_FIELDS = ("prompt", "prompt_ids", "prefix_id", "messages", "text")


class Used(NamedTuple):
    """What a request used; None for what does not apply.

    Attributes:
        cache: what the cache did: `hit`, or why not more.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prefilled_tokens: int | None = None
    completion_tokens: int | None = None
    cache: str | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None


class RequestLog:
    """Hears of every request's final reply.

    Attributes:
        outcomes: so many ended so.
        ended_tokens: tenant → tokens of their prompts.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str] | None = None,
        allows: Callable[[str], bool] = lambda event: True,
    ) -> None:
        """Args:
        decode: token ids to text, to log what was asked and answered; None not to.
        allows: whether one more line of an event may be written for what was refused.
        """
        self.outcomes: Counter[Outcome] = Counter()
        self.ended_tokens: dict[str, PromptTokens] = {}
        self._decode = decode
        self._allows = allows

    def done(self, work: Work, reply: wire.AnyReply, now_s: float) -> None:
        """A request gets this final reply, or nobody hears it any more."""
        kind, outcome, used = wire.type_name(work.message), outcome_of(reply), used_by(reply)
        self.outcomes[Outcome(work.tenant, kind, outcome)] += 1
        self._add_tokens(work.tenant, used)
        if work.request_id is None and not self._may_tell(reply):
            return
        log.info(
            "request_done",
            tenant=work.tenant,
            request=work.request_id,
            message_id=work.message.id,
            kind=kind,
            outcome=outcome,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            prefilled_tokens=used.prefilled_tokens,
            completion_tokens=used.completion_tokens,
            cache=used.cache,
            queue_ms=used.queue_ms,
            ttft_ms=used.ttft_ms,
            total_ms=used.total_ms or round((now_s - work.arrived_s) * 1000, 3),
        )
        if self._decode is not None:
            log.info(
                "request_text",
                request=work.request_id,
                message_id=work.message.id,
                asked=_asked(work.message),
                answered=self._decode(work.token_ids),
            )

    def answered(self, client: ClientRef, message: wire.AnyRequest, reply: wire.AnyReply) -> None:
        """A message was answered at once, refused perhaps; what only asks is not worth a line."""
        if not isinstance(reply, wire.Error) and not isinstance(message, _CHANGING):
            return
        kind, outcome = wire.type_name(message), outcome_of(reply)
        self.outcomes[Outcome(client.tenant, kind, outcome)] += 1
        if outcome == "ok" and isinstance(message, wire.ADMIN_REQUESTS):
            return
        if not self._may_tell(reply):
            return
        named = message.tenant if isinstance(message, wire.Release) else None
        log.info(
            "request_done",
            tenant=client.tenant if named is None else named,
            message_id=message.id,
            kind=kind,
            outcome=outcome,
        )

    def _may_tell(self, reply: wire.AnyReply) -> bool:
        """Whether it has a line. To be refused costs a client nothing, so it could fill a disk."""
        return not isinstance(reply, wire.Error) or self._allows("request_done")

    def _add_tokens(self, tenant: str, used: Used) -> None:
        if used.prompt_tokens:
            before = self.ended_tokens.get(tenant, PromptTokens())
            self.ended_tokens[tenant] = PromptTokens(
                before.prompt + used.prompt_tokens, before.cached + (used.cached_tokens or 0)
            )


def used_by(reply: wire.AnyReply) -> Used:
    """What the request used, as far as its final reply says."""
    if isinstance(reply, wire.Registered):
        return Used(prompt_tokens=reply.num_tokens, cached_tokens=reply.cached_tokens)
    if not isinstance(reply, wire.Done):
        return Used()
    usage, timing = reply.usage, reply.timing
    return Used(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
        completion_tokens=usage.completion_tokens,
        cache=None if reply.cache is None else reply.cache.reason,
        queue_ms=timing.queue_ms,
        ttft_ms=timing.ttft_ms,
        total_ms=timing.total_ms,
    )


def outcome_of(reply: wire.AnyReply) -> str:
    """The finish reason of an answer, the code of an error, `ok` for all else."""
    if isinstance(reply, wire.Done):
        return reply.finish_reason
    return reply.code if isinstance(reply, wire.Error) else "ok"


def _asked(message: wire.AnyRequest) -> dict[str, Any]:
    """The prompt of a message, in the words of the wire."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return {name: fields[name] for name in _PROMPT_FIELDS if fields.get(name) is not None}
