"""What happened, as seen by the engine. Pure data.

`EngineState.handle(event)` is the one way in. Time and randomness arrive inside the events, so the
same events always give the same commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime_cache.cache.verification import Reading
from runtime_cache.engine.request import BadLogits, NewRequest, Sampled, TokenArray
from runtime_cache.ids import DEFAULT_TENANT, PrefixId, RequestId, StepId, TenantName

CancelReason = Literal["client", "client_gone", "slow_reader", "lease_expired", "shutdown"]


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """The service has validated and tokenised a request."""

    request: NewRequest
    now_s: float


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A request's owner, or the daemon for it, wants it ended. Unknown ids are ignored."""

    request_id: RequestId
    reason: CancelReason
    now_s: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """The step in flight has synchronised; its KV is in the pool.

    Attributes:
        samples: one entry per row of the batch that wanted logits, in row order.
    """

    step_id: StepId
    samples: tuple[Sampled | BadLogits, ...]
    now_s: float


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step in flight failed, and is over; every block it wrote is suspect.

    Attributes:
        message: what failed, in words, for the clients.
        code: the wire code (`errors.RuntimeCacheError.code`).
        retryable: whether clients may try again, and so may the engine.
    """

    step_id: StepId
    message: str
    code: str
    retryable: bool
    now_s: float


@dataclass(frozen=True, slots=True)
class StepHung:
    """The step in flight did not end in time. It goes on; a StepFailed follows when it is over.

    Attributes:
        message, code: as of StepFailed.
    """

    step_id: StepId
    message: str
    code: str
    now_s: float


@dataclass(frozen=True, slots=True)
class ClockTicked:
    """Time has passed; deadlines may have expired."""

    now_s: float


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """No new requests from now on; the admitted ones run to their end.

    Attributes:
        is_shutdown: the daemon ends; nothing is resumed after that. False if an operator wants it.
    """

    now_s: float
    is_shutdown: bool = True


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """An operator's drain is over. Ignored when the daemon ends."""

    now_s: float


@dataclass(frozen=True, slots=True)
class PrefixReleased:
    """A registered prefix is given up; its blocks become evictable."""

    prefix_id: PrefixId
    now_s: float
    tenant: TenantName = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class EvictAsked:
    """An operator wants cached blocks gone.

    Attributes:
        tenant: whose; None for every tenant's.
        max_blocks: how many at the most, next to be evicted first; None for all that may go.
            Goes together with the last two.
        digest: the one entry that is to go (a beginning of its digest, hexadecimal).
        used_until_s: what was not used later is to go.
        created_until_s: what was not committed later is to go.
        is_dry_run: tell what would go, and change nothing.
    """

    now_s: float
    tenant: TenantName | None = None
    max_blocks: int | None = None
    digest: str | None = None
    used_until_s: float | None = None
    created_until_s: float | None = None
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ShowAsked:
    """An operator wants to see a cached prefix.

    Attributes:
        digest: a beginning of its digest (hexadecimal); or
        prefix_id: its name, if it is registered. One of the two is set.
    """

    now_s: float
    digest: str | None = None
    prefix_id: PrefixId | None = None
    tenant: TenantName = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class PinAsked:
    """An operator wants a cached prefix kept.

    Attributes:
        digest: a beginning of its digest (hexadecimal).
        ttl_s: for how long (a lease), unless it is pinned; None until it is unpinned.
    """

    digest: str
    now_s: float
    ttl_s: float | None = None
    tenant: TenantName = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class UnpinAsked:
    """An operator gives up a pin or a lease."""

    digest: str
    now_s: float
    tenant: TenantName = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class ExplainAsked:
    """An operator wants to know what the cache would do for a prompt.

    Attributes:
        tokens: the prompt [int32, at least 1].
    """

    tokens: TokenArray
    now_s: float
    tenant: TenantName = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class VerifyAsked:
    """An operator wants cached KV to be read and compared: which blocks?

    Attributes:
        max_blocks: how many at the most [at least 1].
        first_block: those with smaller numbers are not wanted.
        tenant: whose; None for every tenant's.
        digest: only those of this prefix (a beginning of its digest, hexadecimal).
    """

    max_blocks: int
    now_s: float
    first_block: int = 0
    tenant: TenantName | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One of those blocks has been read."""

    reading: Reading
    now_s: float


#: What operators ask; answered within the same `handle`.
Question = (
    PrefixReleased
    | EvictAsked
    | ShowAsked
    | PinAsked
    | UnpinAsked
    | ExplainAsked
    | VerifyAsked
    | BlockRead
)

Event = (
    RequestArrived
    | CancelRequested
    | StepDone
    | StepFailed
    | StepHung
    | ClockTicked
    | DrainStarted
    | DrainEnded
    | Question
)
