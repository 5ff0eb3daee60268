"""What operators ask of the engine, as methods of its loop; the answer comes with the call. Pure.

`engine.questions` answers them inside the state machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from runtime_cache.cache.results import Evicted, Keep, ShownEntry
from runtime_cache.cache.verification import Reading, Verdict
from runtime_cache.engine.commands import (
    Command,
    Report,
    ReportEvicted,
    ReportExplained,
    ReportJudged,
    ReportPinned,
    ReportRefused,
    ReportReleased,
    ReportShown,
    ReportToRead,
    ReportUnpinned,
)
from runtime_cache.engine.events import (
    BlockRead,
    EvictAsked,
    ExplainAsked,
    PinAsked,
    PrefixReleased,
    Question,
    ShowAsked,
    UnpinAsked,
    VerifyAsked,
)
from runtime_cache.engine.request import TokenArray
from runtime_cache.errors import (
    CapacityError,
    InternalError,
    InvalidRequest,
    RequestError,
    RuntimeCacheError,
    UnknownEntry,
    UnknownPrefix,
)
from runtime_cache.ids import DEFAULT_TENANT, PrefixId, TenantName

SomeReport = TypeVar("SomeReport", bound=Report)


class OperatorQuestions:
    """The questions; who inherits this feeds them to the state machine.

    Every one raises InvalidRequest if there is no such tenant, and DeviceLost or InternalError,
    what `EngineLoop.fatal` holds, if the engine is broken.
    """

    _clock: Callable[[], float]

    def _answer(self, question: Question) -> list[Command]:
        """What the state machine answers."""
        raise NotImplementedError

    def release_prefix(self, prefix_id: PrefixId, tenant: TenantName = DEFAULT_TENANT) -> bool:
        """Give up a registered prefix; False if there is no such one.

        Raises:
            InvalidRequest, DeviceLost, InternalError: as all of them.
        """
        question = PrefixReleased(prefix_id, self._clock(), tenant)
        return self._ask(question, ReportReleased).is_known

    def evict(
        self,
        tenant: TenantName | None,
        *,
        max_blocks: int | None = None,
        digest: str | None = None,
        used_until_s: float | None = None,
        created_until_s: float | None = None,
        is_dry_run: bool = False,
    ) -> Evicted:
        """Evict cached blocks: what `EvictAsked` says; all that may go if nothing is said.

        Args:
            tenant: None for every tenant.

        Raises:
            UnknownEntry: nothing cached has the digest.
            InvalidRequest: the beginning of the digest is ambiguous.
        """
        question = EvictAsked(
            self._clock(), tenant, max_blocks, digest, used_until_s, created_until_s, is_dry_run
        )
        return self._ask(question, ReportEvicted).evicted

    def show(
        self, tenant: TenantName, digest: str | None, prefix_id: PrefixId | None = None
    ) -> ShownEntry:
        """A cached prefix, by its digest or by the name it is registered by.

        Raises:
            UnknownEntry, InvalidRequest: as `evict`.
            UnknownPrefix: nothing is registered by this name.
        """
        return self._ask(ShowAsked(self._clock(), digest, prefix_id, tenant), ReportShown).shown

    def pin(self, tenant: TenantName, digest: str, ttl_s: float | None = None) -> Keep:
        """Keep a cached prefix, for a time or until it is unpinned; a pin stays a pin.

        Raises:
            UnknownEntry, InvalidRequest: as `evict`.
            CapacityError: too much would be kept.
        """
        return self._ask(PinAsked(digest, self._clock(), ttl_s, tenant), ReportPinned).keep

    def unpin(self, tenant: TenantName, digest: str) -> Keep:
        """Give up a pin or lease.

        Raises:
            UnknownEntry, InvalidRequest: as `evict`.
        """
        return self._ask(UnpinAsked(digest, self._clock(), tenant), ReportUnpinned).keep

    def explain(self, tenant: TenantName, tokens: TokenArray) -> ReportExplained:
        """What the cache would do for a prompt now.

        Raises:
            InvalidRequest: the prompt is empty.
        """
        return self._ask(ExplainAsked(tokens, self._clock(), tenant), ReportExplained)

    def blocks_to_read(
        self, tenant: TenantName | None, digest: str | None, *, first_block: int, max_blocks: int
    ) -> ReportToRead:
        """Which blocks `VerifyAsked` means.

        Args:
            tenant: None for every tenant.

        Raises:
            UnknownEntry, InvalidRequest: as `evict`.
        """
        question = VerifyAsked(max_blocks, self._clock(), first_block, tenant, digest)
        return self._ask(question, ReportToRead)

    def judge(self, reading: Reading) -> Verdict:
        """What a reading of a block says; one that is damaged leaves the cache."""
        return self._ask(BlockRead(reading, self._clock()), ReportJudged).verdict

    def _ask(self, question: Question, kind: type[SomeReport]) -> SomeReport:
        for command in self._answer(question):
            if isinstance(command, kind):
                return command
            if isinstance(command, ReportRefused):
                raise _refusal(command)
        raise InternalError(f"no answer to {question}")


def _refusal(report: ReportRefused) -> RuntimeCacheError:
    """The error that the answer stands for."""
    if report.retry_after_ms is not None:
        return CapacityError(report.message, retry_after_ms=report.retry_after_ms)
    kinds: dict[str, type[RequestError]] = {k.code: k for k in (UnknownEntry, UnknownPrefix)}
    return kinds.get(report.code, InvalidRequest)(report.message)
