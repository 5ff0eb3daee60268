"""What the engine wants done. Pure data, imperatives; carried out by `engine.loop`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheReport, Evicted, Keep, ShownEntry
from runtime_cache.cache.verification import Verdict
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.events import CancelReason
from runtime_cache.engine.request import TokenLogprobs, Usage
from runtime_cache.ids import PrefixId, RequestId

FinishReason = Literal[
    "stop",
    "length",
    "cancelled",
    "deadline",
    "slow_reader",
    "lease_expired",
    "shutdown",
    "registered",
]
EarlyEnd = Literal["cancelled", "slow_reader", "lease_expired", "shutdown"]


def end_of(reason: CancelReason) -> EarlyEnd:
    """How a request ends that is cancelled for this reason."""
    return "cancelled" if reason == "client" or reason == "client_gone" else reason


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run this batch on the device, then feed back StepDone or StepFailed."""

    batch: StepBatch


class EmitTokens(Struct, frozen=True):
    """New answer tokens of a request.

    Attributes:
        text: what may be shown now; empty while bytes of a character or a possible stop string
            are held back.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """The one final answer of a request that was admitted and did not fail.

    Attributes:
        text: the rest of the text that was still held back.
        stop: the stop string or the text of the token id that ended the answer, if one did.
        prefix_id: for `registered` only.
        num_kept_blocks: for `registered` only: the blocks that hold what is kept of the prefix.
    """

    request_id: RequestId
    reason: FinishReason
    text: str
    usage: Usage
    stop: str | None = None
    prefix_id: PrefixId | None = None
    num_kept_blocks: int = 0


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The one final answer of a request that was refused or failed."""

    request_id: RequestId
    code: str
    message: str
    retryable: bool
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ReportEvicted:
    """Answer to EvictAsked: what was, or would be, evicted and not."""

    evicted: Evicted


@dataclass(frozen=True, slots=True)
class ReportShown:
    """Answer to ShowAsked."""

    shown: ShownEntry


@dataclass(frozen=True, slots=True)
class ReportReleased:
    """Answer to PrefixReleased.

    Attributes:
        is_known: False if no such prefix was registered.
    """

    prefix_id: PrefixId
    is_known: bool


@dataclass(frozen=True, slots=True)
class ReportPinned:
    """Answer to PinAsked."""

    keep: Keep


@dataclass(frozen=True, slots=True)
class ReportUnpinned:
    """Answer to UnpinAsked: what is no longer kept."""

    keep: Keep


@dataclass(frozen=True, slots=True)
class ReportExplained:
    """Answer to ExplainAsked."""

    report: CacheReport
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReportToRead:
    """Answer to VerifyAsked.

    Attributes:
        nodes: whose blocks to read, in the order of their numbers.
        next_block: the number of the first block that was left out; None if none was.
    """

    nodes: tuple[PrefixNode, ...]
    next_block: int | None = None


@dataclass(frozen=True, slots=True)
class ReportJudged:
    """Answer to BlockRead."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ReportRefused:
    """Answer to a question that cannot be granted; nothing has changed."""

    code: str
    message: str
    retryable: bool
    retry_after_ms: int | None = None


Report = (
    ReportEvicted
    | ReportShown
    | ReportReleased
    | ReportPinned
    | ReportUnpinned
    | ReportExplained
    | ReportToRead
    | ReportJudged
    | ReportRefused
)
Command = RunStep | EmitTokens | FinishRequest | FailRequest | Report
