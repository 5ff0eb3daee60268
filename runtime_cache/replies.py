"""The daemon's replies, from what the engine answers. Pure functions of their arguments."""

from __future__ import annotations

from ipc import messages as wire
from runtime_cache.cache.results import CacheReport
from runtime_cache.engine.commands import FailRequest, FinishRequest, ReportExplained
from runtime_cache.engine.request import TokenLogprobs, Usage
from runtime_cache.errors import Draining, InternalError, RuntimeCacheError
from runtime_cache.outflow import Outflow

#: Stands for minus infinity, which JSON cannot carry.
_MIN_LOGPROB = -9999.0
#: About what a restart takes: when to try again with requests that came too late [milliseconds].
_RESTART_MS = 5000


def never_started(
    message: wire.AnyRequest, reason: wire.FinishReason, waited_s: float
) -> wire.AnyReply:
    """The final reply to a request that ended while its text was still being tokenised."""
    if not isinstance(message, wire.AnswerRequest):
        return cancelled(message.id)
    return wire.Done(
        id=message.id,
        index=0,
        text="",
        token_ids=(),
        finish_reason=reason,
        usage=wire.Usage(0, 0, 0, 0),
        timing=timing(Usage(0, 0, 0, 0, queue_s=waited_s, ttft_s=None, total_s=waited_s)),
    )


def draining() -> Draining:
    """What a request gets that comes too late."""
    return Draining("the daemon is shutting down", retry_after_ms=_RESTART_MS)


def cancelled(message_id: wire.MessageId) -> wire.Error:
    """The final reply to a cancelled request that is not an answer."""
    return wire.Error(
        id=message_id, code="cancelled", message="the request was cancelled", retryable=True
    )


def refusal(message_id: wire.MessageId, error: RuntimeCacheError) -> wire.Error:
    """The final reply to a request that is refused."""
    return wire.Error(
        id=message_id,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
    )


def done(message_id: wire.MessageId, outflow: Outflow, end: FinishRequest) -> wire.Done:
    """The final reply to an answer that did not fail; carries what was not sent before.

    Raises:
        InternalError: it is the end of a registration.
    """
    if end.reason == "registered":
        raise InternalError(f"request {end.request_id} was not a registration")
    report = end.usage.cache
    return wire.Done(
        id=message_id,
        index=outflow.num_sent,
        text=outflow.held_text + end.text,
        token_ids=outflow.held_ids,
        finish_reason=end.reason,
        usage=usage(end.usage),
        timing=timing(end.usage),
        stop=end.stop,
        logprobs=outflow.held_logprobs,
        cache=None if report is None else cache_report(report),
    )


def failed(message_id: wire.MessageId, end: FailRequest) -> wire.Error:
    """The final reply to a request that the engine refused, or that failed in it."""
    return wire.Error(
        id=message_id,
        code=end.code,
        message=end.message,
        retryable=end.retryable,
        retry_after_ms=end.retry_after_ms,
    )


def logprobs(entry: TokenLogprobs) -> wire.Logprobs:
    """One position's log-probabilities, finite."""
    top = tuple(wire.TopToken(token_id, max(value, _MIN_LOGPROB)) for token_id, value in entry.top)
    return wire.Logprobs(entry.token_id, max(entry.logprob, _MIN_LOGPROB), top)


def usage(used: Usage) -> wire.Usage:
    """Token counts."""
    return wire.Usage(
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        prefilled_tokens=used.prefilled_tokens,
        completion_tokens=used.completion_tokens,
    )


def cache_report(report: CacheReport) -> wire.CacheReport:
    """What the cache did or would do, and why not more."""
    return wire.CacheReport(report.reason, report.diverged_at, report.nearest_tokens, report.detail)


def explained(message_id: wire.MessageId, found: ReportExplained) -> wire.Explained:
    """What the cache would do."""
    return wire.Explained(
        id=message_id,
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.report.cached_tokens,
        cache=cache_report(found.report),
    )


def timing(used: Usage) -> wire.Timing:
    """Durations [milliseconds], and the rate after the first token."""
    ttft_s, num_tokens = used.ttft_s, used.completion_tokens
    rate = None
    if ttft_s is not None and num_tokens > 1 and used.total_s > ttft_s:
        rate = round((num_tokens - 1) / (used.total_s - ttft_s), 3)
    return wire.Timing(
        queue_ms=round(used.queue_s * 1000, 3),
        ttft_ms=None if ttft_s is None else round(ttft_s * 1000, 3),
        total_ms=round(used.total_s * 1000, 3),
        tokens_per_s=rate,
    )
