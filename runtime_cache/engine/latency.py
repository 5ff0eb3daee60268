"""How long requests wait, steps take and tokens are apart. Pure.

Written once a step and once a request; nothing here is done per token in the usual case.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.gears import Role
from runtime_cache.engine.request import BadLogits, Sampled, Usage
from runtime_cache.engine.sequence import Sequence
from runtime_cache.histogram import SECONDS, TOKENS, Histogram, Timing
from runtime_cache.ids import TenantName


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class TenantLatencies:
    """What one tenant's requests took.

    Attributes:
        queue: from arrival to the first step, of every request that came so far.
        ttft: from arrival to the first answer token, of every answer that came so far.
        total: from arrival to the end, of the answers that ended by a stop or their length.
        prefill: from the first step to the first token, of the same answers.
        decode: from the first token to the end, of the same.
        prompt_tokens, prefilled_tokens, answer_tokens: of the same.
    """

    queue: Timing = field(default_factory=Timing)
    ttft: Timing = field(default_factory=Timing)
    total: Timing = field(default_factory=Timing)
    prefill: Histogram = field(default_factory=_seconds)
    decode: Histogram = field(default_factory=_seconds)
    prompt_tokens: Histogram = field(default_factory=_tokens)
    prefilled_tokens: Histogram = field(default_factory=_tokens)
    answer_tokens: Histogram = field(default_factory=_tokens)


class Latencies:
    """All tenants' together, and the steps'.

    Attributes:
        tenants: see `TenantLatencies`.
        inter_token: between two tokens of an answer, what preempted it in between included.
        steps: by role, from the decision to the end, of the steps that did not fail.
    """

    def __init__(self, tenants: Iterable[TenantName]) -> None:
        self.tenants = {tenant: TenantLatencies() for tenant in tenants}
        self._step_begun_s = 0.0
        self.inter_token = Timing()
        self.steps: dict[Role, Timing] = {"prefill": Timing(), "decode": Timing()}

    @property
    def num_tokens(self) -> int:
        """Answer tokens that were sampled so far."""
        firsts = sum(tenant.ttft.histogram.num_samples for tenant in self.tenants.values())
        return firsts + self.inter_token.histogram.num_samples

    def note_launch(self, sequences: Rows[Sequence], now_s: float) -> None:
        """A step is about to be launched with these, those that waited longest first."""
        self._step_begun_s = now_s
        for sequence in sequences:
            if sequence.first_step_s is not None:
                return  # so were all that follow
            tenant = self.tenants[sequence.request.tenant]
            tenant.queue.observe(now_s, now_s - sequence.arrived_s)

    def note_step(
        self,
        batch: StepBatch,
        sequences: Rows[Sequence],
        samples: Rows[Sampled | BadLogits],
        now_s: float,
        *,
        is_mixed: bool,
    ) -> None:
        """A step is done; nothing of it is settled yet.

        Args:
            sequences: those of its rows; those that waited longest come first.
            is_mixed: not all of them have use for their token: some were answered meanwhile, or
                have bad logits.
        """
        self.steps[batch.role].observe(now_s, now_s - self._step_begun_s)
        if not samples:
            return  # a chunk that does not end its prompt
        last_s = sequences[0].last_token_s
        is_mixed = is_mixed or len(samples) != len(sequences)
        if not is_mixed and last_s is not None and last_s == sequences[-1].last_token_s:
            self.inter_token.observe(now_s, now_s - last_s, len(sequences))
            return
        given = iter(samples)
        for row, sequence in zip(batch.rows, sequences, strict=True):
            if row.sampler is not None and isinstance(next(given), Sampled):
                self._note_token(sequence, now_s)

    def note_answer(self, tenant: TenantName, usage: Usage, now_s: float) -> None:
        """An answer has ended by itself."""
        latencies = self.tenants[tenant]
        latencies.total.observe(now_s, usage.total_s)
        if usage.ttft_s is not None:
            latencies.prefill.observe(usage.ttft_s - usage.queue_s)
            latencies.decode.observe(usage.total_s - usage.ttft_s)
        latencies.prompt_tokens.observe(usage.prompt_tokens)
        latencies.prefilled_tokens.observe(usage.prefilled_tokens)
        latencies.answer_tokens.observe(usage.completion_tokens)

    def _note_token(self, sequence: Sequence, now_s: float) -> None:
        if sequence.status != "stepping":
            return  # nobody has use for it any more
        if sequence.last_token_s is not None:
            self.inter_token.observe(now_s, now_s - sequence.last_token_s)
            return
        ttft = self.tenants[sequence.request.tenant].ttft
        ttft.observe(now_s, now_s - sequence.arrived_s)
