"""Says in one sentence what the cache did for a prompt, and why not more. Pure."""

from __future__ import annotations

from ipc.messages import CacheReport

_WHY = {
    "hit": "that is all that can be reused",
    "cold": "nothing cached begins like it",
    "evicted": "what comes next was cached and has been evicted",
    "diverged": "the nearest cached prefix goes on differently",
    "extended": "the nearest cached prefix ends, the prompt goes on",
    "too_short": "nothing of so short a prompt can be reused",
    "limit": "longer prefixes are not kept (cache.max_prefix_length)",
    "disabled": "caching was disabled",
}


def sentence(report: CacheReport, *, cached_tokens: int, prompt_tokens: int) -> str:
    """For people, such as "cached 37 of 5120 tokens: diverged at token 37; the nearest cached
    prefix has 812 tokens".
    """
    return f"cached {cached_tokens} of {prompt_tokens} tokens: {_why(report)}"


def _why(report: CacheReport) -> str:
    common, nearest = report.diverged_at, report.nearest_tokens
    if report.reason == "diverged" and common is not None and nearest is not None:
        return f"diverged at token {common}; the nearest cached prefix has {nearest} tokens"
    if report.reason == "extended" and nearest is not None:
        return f"the nearest cached prefix ends after {nearest} tokens, the prompt goes on"
    # A newer daemon may have other reasons: its own word is better than none.
    why = _WHY.get(report.reason, report.reason)
    return f"{why} because {report.detail}" if report.detail else why
