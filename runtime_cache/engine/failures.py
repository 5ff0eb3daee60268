"""What becomes of requests when a step of theirs went wrong. Pure.

Nothing that the step wrote is trusted: it is dropped, and with it the partly filled blocks that it
wrote behind cached tokens. A request whose step failed on the device is computed again, once in its
life; the tokens of its answer stay, and are fed like those of a prompt. One that gets bad logits
after a hit is computed again without the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from runtime_cache.cache import verification
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.engine.commands import FailRequest
from runtime_cache.engine.events import StepFailed, StepHung
from runtime_cache.engine.request import BadLogits
from runtime_cache.engine.scheduler import Scheduler, Step
from runtime_cache.engine.sequence import Sequence
from runtime_cache.engine.snapshot import EngineCounters


class Failed(NamedTuple):
    """A request that has come to its end, and its final answer, which nobody has sent yet."""

    sequence: Sequence
    answer: FailRequest


class Failures:
    """Decides who is computed again, and who fails."""

    def __init__(
        self, scheduler: Scheduler, counters: EngineCounters, *, is_recomputing: bool
    ) -> None:
        """Args:
        is_recomputing: whether requests of failed steps are computed again at all.
        """
        self._scheduler = scheduler
        self._counters = counters
        self._is_recomputing = is_recomputing

    def hung(self, step: Step, event: StepHung) -> list[Failed]:
        """A step goes on longer than it may: who would not be computed again fails now.

        The blocks of all of them stay as they are until `failed`.
        """
        self._counters.hung_steps += 1
        doomed = [s for s in step.sequences if s.status == "stepping" and not self._may_go_on(s)]
        for sequence in doomed:
            self._scheduler.retire(sequence)
        return [self._fail(s, event.code, event.message, retryable=True) for s in doomed]

    def failed(self, step: Step, event: StepFailed) -> list[Failed]:
        """A step has failed, and nothing of it runs any more."""
        self._counters.failed_steps += 1
        self._scheduler.withdraw_copies(step)
        ended = []
        for sequence in sorted(step.sequences, key=lambda s: s.number, reverse=True):
            is_unanswered = sequence.status == "stepping"
            if is_unanswered and event.retryable and self._may_go_on(sequence):
                sequence.num_failures += 1
                self._recompute(sequence, "failed_step", is_all_suspect=False)
                continue
            self._scheduler.discard(sequence, is_all_suspect=False)
            if is_unanswered:
                ended.append(
                    self._fail(sequence, event.code, event.message, retryable=event.retryable)
                )
        return ended[::-1]

    def bad_logits(self, sequence: Sequence, logits: BadLogits) -> list[Failed]:
        """They may come from the KV of any earlier token.

        Who has reused any is computed again without the cache; who has not, fails.
        """
        is_unanswered = sequence.status == "stepping"
        if is_unanswered and sequence.blocks().num_hit_tokens:
            self._recompute(sequence, "bad_logits", is_all_suspect=True)
            return []
        self._scheduler.discard(sequence, is_all_suspect=True)
        if not is_unanswered:
            return []
        return [self._fail(sequence, "bad_logits", logits.message, retryable=False)]

    def convict(self, sequence: Sequence, tables: Iterable[BlockTable]) -> None:
        """Without the cache its logits are good: what it had reused is damaged somewhere.

        Args:
            tables: of all requests that have blocks.
        """
        damaged = next((node for node in sequence.suspects if node.is_indexed), None)
        sequence.suspects = []
        if damaged is not None:
            verification.drop(sequence.cache, damaged, tables)

    def _may_go_on(self, sequence: Sequence) -> bool:
        return self._is_recomputing and sequence.num_failures == 0

    def _recompute(self, sequence: Sequence, reason: str, *, is_all_suspect: bool) -> None:
        self._counters.recomputed += 1
        self._counters.recomputed_by[reason] += 1
        self._scheduler.recompute(sequence, is_all_suspect=is_all_suspect)

    def _fail(self, sequence: Sequence, code: str, message: str, *, retryable: bool) -> Failed:
        self._counters.failed += 1
        answer = FailRequest(sequence.request.request_id, code, message, retryable)
        return Failed(sequence, answer)
