"""What each key has used of its quota. Pure: time arrives as an argument.

Tokens go through a bucket that holds one minute's worth and is filled steadily. A request is taken
as long as there is anything in it; what it turns out to use is taken out as it is used, so the
level may fall below zero, and the key then waits until it is above again. So nobody has to guess
how long an answer will be, no answer is cut short, and over time no key gets more than its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from runtime_cache.errors import OverQuota

_MINUTE_S = 60.0
#: When to try again if too many requests are unfinished, which may end at any time [milliseconds].
_BUSY_RETRY_MS = 1000


Limit = Annotated[int, Meta(ge=1, le=10**12)]


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a key may use; absent: without limit.

    Attributes:
        max_requests: unfinished at a time, over all its connections.
        tokens_per_minute: of prompts, whether cached or not, and answers.
    """

    max_requests: Limit | None = None
    tokens_per_minute: Limit | None = None


@dataclass
class _Use:
    """Of one key.

    Attributes:
        num_requests: unfinished.
        level_tokens: in the bucket at `filled_s`; None: full.
    """

    num_requests: int = 0
    level_tokens: float | None = None
    filled_s: float = 0.0


class Quotas:
    """The uses of all keys, by name; they outlive a reload of the list.

    Attributes:
        num_refused: requests that were over a quota.
    """

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        """Args:
        quota_of: what the key of a name may use now.
        """
        self._quota_of = quota_of
        self.num_refused = 0
        self._uses: dict[str, _Use] = {}

    def take(self, name: str, now_s: float) -> None:
        """Count a new request of a key; `give_back` when it has ended.

        Raises:
            OverQuota: it is not counted, but as one more that was refused.
        """
        try:
            self._check(name, now_s)
        except OverQuota:
            self.num_refused += 1
            raise
        self._uses[name].num_requests += 1

    def _check(self, name: str, now_s: float) -> None:
        quota = self._quota_of(name)
        use = self._uses.setdefault(name, _Use())
        if quota.max_requests is not None and use.num_requests >= quota.max_requests:
            raise OverQuota(
                f"this key has {use.num_requests} unfinished requests, its quota is "
                f"{quota.max_requests}",
                retry_after_ms=_BUSY_RETRY_MS,
            )
        if quota.tokens_per_minute is not None:
            self._check_tokens(use, quota.tokens_per_minute, now_s)

    def give_back(self, name: str) -> None:
        """A request that was taken has ended."""
        use = self._uses[name]
        use.num_requests -= 1
        if not use.num_requests and use.level_tokens is None:
            del self._uses[name]

    def spend(self, name: str, num_tokens: int, now_s: float) -> None:
        """Tokens that a request of the key uses."""
        per_minute = self._quota_of(name).tokens_per_minute
        if per_minute is not None:
            use = self._uses.setdefault(name, _Use())
            _fill(use, per_minute, now_s)
            use.level_tokens = (use.level_tokens or 0.0) - num_tokens

    def _check_tokens(self, use: _Use, per_minute: int, now_s: float) -> None:
        _fill(use, per_minute, now_s)
        level = use.level_tokens or 0.0
        if level <= 0:
            wait_s = (1 - level) * _MINUTE_S / per_minute
            raise OverQuota(
                f"this key has used its {per_minute} tokens a minute up",
                retry_after_ms=math.ceil(wait_s * 1000),
            )


def _fill(use: _Use, per_minute: int, now_s: float) -> None:
    """Bring the level to `now_s`; a smaller bucket, after a reload, holds less."""
    level = float(per_minute)
    if use.level_tokens is not None:
        level = use.level_tokens + max(0.0, now_s - use.filled_s) * per_minute / _MINUTE_S
    use.level_tokens = min(level, float(per_minute))
    use.filled_s = now_s
