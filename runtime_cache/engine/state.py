"""The engine's state machine: events in, commands out. Pure.

`EngineState.handle` is the one way in; it is synchronous and deterministic, and time arrives in the
events. Each event is applied, then deadlines are looked at, then the next step is decided if none
is in flight.

What is always true between two events:
- a request that arrived gets exactly one final answer (FinishRequest or FailRequest);
- at most one step is in flight, and the blocks of its requests are given back by its StepDone or
  StepFailed, never before;
- if no step is in flight, nothing could run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import Keep
from runtime_cache.engine import questions
from runtime_cache.engine.admission import Admission
from runtime_cache.engine.commands import (
    Command,
    FailRequest,
    FinishReason,
    FinishRequest,
    RunStep,
    end_of,
)
from runtime_cache.engine.deadlines import Deadlines
from runtime_cache.engine.events import (
    CancelRequested,
    ClockTicked,
    DrainEnded,
    DrainStarted,
    Event,
    RequestArrived,
    StepDone,
    StepFailed,
    StepHung,
)
from runtime_cache.engine.failures import Failed, Failures
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.latency import Latencies
from runtime_cache.engine.limits import EngineLimits, check_limits
from runtime_cache.engine.pace import Pace
from runtime_cache.engine.request import BadLogits, NewRequest, Sampled
from runtime_cache.engine.scheduler import Computed, Scheduler, Step
from runtime_cache.engine.sequence import Sequence
from runtime_cache.engine.snapshot import (
    EngineCounters,
    EngineSnapshot,
    TenantSnapshot,
    sums,
    tenant_snapshot,
)
from runtime_cache.engine.stopping import StopResult
from runtime_cache.engine.waiting import WaitingQueue
from runtime_cache.errors import (
    CapacityError,
    Draining,
    InternalError,
    QueueFull,
    RequestError,
    RuntimeCacheError,
)
from runtime_cache.ids import PrefixId, RequestId, StepId, TenantName

_NO_TEXT = StopResult("")
#: By whether the daemon ends.
_WHY_CLOSED = {
    True: "the daemon is shutting down",
    False: "the daemon is being drained: an operator lets it take no new requests",
}


class EngineState:
    """All requests, from arrival to final answer."""

    def __init__(
        self, caches: Mapping[TenantName, CacheManager], gears: GearTable, limits: EngineLimits
    ) -> None:
        """Start empty.

        Args:
            caches: one of each tenant.

        Raises:
            ConfigError: a limit is out of range.
        """
        check_limits(limits, caches, gears)
        self._caches = caches
        self._limits = limits
        queues = {
            tenant: WaitingQueue(
                match_window=limits.match_window, max_overtakes=limits.max_overtakes
            )
            for tenant in caches
        }
        self._scheduler = Scheduler(
            queues,
            gears,
            max_running=limits.max_running or gears.max_batch,
            interleave_chunk_tokens=limits.interleave_chunk_tokens,
        )
        self._admissions = {
            tenant: Admission(cache, gears, is_deterministic=limits.is_deterministic)
            for tenant, cache in caches.items()
        }
        self._unanswered: dict[RequestId, Sequence] = {}
        self._in_flight: Step | None = None
        self._has_leavers = False
        self._deadlines = Deadlines()
        self._pace = Pace()
        self._counters = EngineCounters()
        self._failures = Failures(
            self._scheduler, self._counters, is_recomputing=limits.on_failed_step == "recompute"
        )
        self._is_draining = False
        self._is_ending = False
        self._now_s = -math.inf
        self._out: list[Command] = []

    # -- what is seen from outside ------------------------------------------------------------

    @property
    def tenants(self) -> tuple[TenantName, ...]:
        """Whose requests are taken."""
        return tuple(self._caches)

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens any tenant's request may have, prompt and answer together.

        Limited by the gears, and by the tenant's share of the pool if that is smaller.
        """
        return max(map(self.max_sequence_tokens_of, self._caches))

    def max_sequence_tokens_of(self, tenant: TenantName) -> int:
        """The same for one tenant."""
        return self._admissions[tenant].max_sequence_tokens

    @property
    def next_deadline_s(self) -> float | None:
        """When to send the next ClockTicked; None if nothing waits for a time."""
        times = [self._deadlines.next_s]
        times += (cache.keeps.next_expiry_s for cache in self._caches.values())
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused: the daemon ends, or an operator wants it so."""
        return self._is_draining

    @property
    def is_ending(self) -> bool:
        """Whether they are refused because the daemon ends."""
        return self._is_ending

    @property
    def is_drained(self) -> bool:
        """Whether the daemon's last drain is over: nothing unanswered, no step in flight."""
        return self._is_ending and not self._unanswered and self._in_flight is None

    @property
    def latencies(self) -> Latencies:
        """How long requests wait and steps take; for reading."""
        return self._scheduler.latencies

    def request_ids(self) -> list[RequestId]:
        """The requests without a final answer, in order of arrival."""
        return list(self._unanswered)

    def snapshot(self) -> EngineSnapshot:
        """Gauges and counters now."""
        scheduler = self._scheduler
        tenants = {
            tenant: tenant_snapshot(
                cache,
                num_waiting=scheduler.num_waiting(tenant),
                num_running=sum(sequence.cache is cache for sequence in scheduler.running),
                requests_by_reason=scheduler.requests_by_reason[tenant].copy(),
            )
            for tenant, cache in self._caches.items()
        }
        return EngineSnapshot(
            **sums(tenants.values(), TenantSnapshot),
            is_step_in_flight=self._in_flight is not None,
            is_draining=self._is_draining,
            engine=replace(
                self._counters,
                preemptions=scheduler.num_preemptions,
                cancelled_by=self._counters.cancelled_by.copy(),
                recomputed_by=self._counters.recomputed_by.copy(),
            ),
            tenants=tenants,
        )

    def handle(self, event: Event) -> list[Command]:
        """Take one event.

        Returns:
            What to do now, in this order; at most one RunStep.

        Raises:
            InternalError: the event cannot happen now, or an invariant is broken. The state is
                then not to be used any more.
        """
        self._out = []
        self._now_s = max(self._now_s, event.now_s)
        for cache in self._caches.values():
            cache.now_s = self._now_s
            cache.expire()
        self._apply(event)
        for request_id in self._deadlines.expired(self._now_s):
            self._counters.expired += 1
            self._end_early(self._unanswered[request_id], "deadline")
        self._run_next()
        return self._out

    def _apply(self, event: Event) -> None:
        match event:
            case StepDone():
                self._on_step_done(event)
            case RequestArrived():
                self._on_arrived(event.request)
            case CancelRequested():
                self._on_cancel(event)
            case StepFailed():
                self._end_failed(self._failures.failed(self._take_step(event.step_id), event))
            case StepHung():
                self._end_failed(self._failures.hung(self._step(event.step_id), event))
            case ClockTicked():
                pass  # the deadlines are looked at after every event
            case DrainStarted(is_shutdown=is_shutdown):
                self._is_draining = True
                self._is_ending = self._is_ending or is_shutdown
            case DrainEnded():
                self._is_draining = self._is_ending
            case _:
                retry_after_ms = self._pace.retry_after_ms(self._now_s)
                report = questions.answer(
                    self._caches, event, tables=self._tables(), retry_after_ms=retry_after_ms
                )
                self._out.append(report)

    def _tables(self) -> list[BlockTable]:
        """Of all requests that have blocks."""
        in_flight = () if self._in_flight is None else self._in_flight.sequences
        return [s.table for s in (*self._scheduler.running, *in_flight) if s.table is not None]

    # -- arrivals -----------------------------------------------------------------------------

    def _on_arrived(self, request: NewRequest) -> None:
        if request.request_id in self._unanswered:
            raise InternalError(f"twice: {self._unanswered[request.request_id].story()}")
        if request.tenant not in self._caches:
            raise InternalError(f"request {request.request_id} is of no tenant: {request.tenant!r}")
        self._counters.arrived += 1
        try:
            self._check_open(request.tenant)
            sequence = self._admissions[request.tenant].sequence(request, self._now_s)
        except (RequestError, CapacityError) as error:
            self._counters.refused += 1
            self._out.append(_failure(request.request_id, error))
            return
        self._unanswered[request.request_id] = sequence
        self._scheduler.enqueue(sequence)
        if request.deadline_s is not None:
            self._deadlines.add(request.request_id, request.deadline_s)

    def _check_open(self, tenant: TenantName) -> None:
        retry_after_ms = self._pace.retry_after_ms(self._now_s)
        if self._is_draining:
            raise Draining(_WHY_CLOSED[self._is_ending], retry_after_ms=retry_after_ms)
        num_waiting = self._scheduler.num_waiting(tenant)
        if num_waiting >= self._limits.max_waiting:
            raise QueueFull(f"{num_waiting} requests are waiting", retry_after_ms=retry_after_ms)

    # -- steps --------------------------------------------------------------------------------

    def _run_next(self) -> None:
        while self._in_flight is None:
            decision = self._scheduler.decide(self._now_s)
            if decision is None:
                return
            if isinstance(decision, Step):
                self._start(decision)
            elif isinstance(decision, Computed):
                self._register(decision.sequence)
            else:
                self._fail_stuck(decision.sequence)

    def _start(self, step: Step) -> None:
        self._in_flight = step
        self._has_leavers = False
        if step.batch.role == "prefill":
            self._counters.prefill_steps += 1
        else:
            self._counters.decode_steps += 1
        self._out.append(RunStep(step.batch))

    def _step(self, step_id: StepId) -> Step:
        step = self._in_flight
        if step is None or step.batch.step_id != step_id:
            raise InternalError(f"step {step_id} has ended, but in flight is {step and step.batch}")
        return step

    def _take_step(self, step_id: StepId) -> Step:
        step = self._step(step_id)
        self._in_flight = None
        return step

    def _on_step_done(self, event: StepDone) -> None:
        step = self._take_step(event.step_id)
        num_wanted = sum([row.sampler is not None for row in step.batch.rows])
        if len(event.samples) != num_wanted:
            raise InternalError(
                f"step {event.step_id} has {len(event.samples)} samples for {num_wanted} rows"
            )
        has_bad = BadLogits in map(type, event.samples)
        is_mixed = has_bad or self._has_leavers
        self.latencies.note_step(
            step.batch, step.sequences, event.samples, self._now_s, is_mixed=is_mixed
        )
        if has_bad:
            self._scheduler.withdraw_copies(step)
        samples = iter(event.samples)
        num_fed = num_prefilled = 0
        bad: list[tuple[Sequence, BadLogits]] = []
        cleared: list[Sequence] = []
        for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
            sampled = None if row.sampler is None else next(samples)
            if isinstance(sampled, BadLogits):
                bad.append((sequence, sampled))
                continue
            num_fed += len(row.token_ids)
            num_prefilled += self._scheduler.settle(sequence, len(row.token_ids))
            if sequence.status == "ready":
                self._go_on(sequence, sampled)
            if sampled is not None and sequence.suspects:
                cleared.append(sequence)
        self._counters.prefill_tokens += num_prefilled
        self._counters.decode_tokens += num_fed - num_prefilled
        # Last, since what is dropped here may be what the others have just gone on from.
        for sequence, logits in bad:
            self._end_failed(self._failures.bad_logits(sequence, logits))
        for sequence in cleared:
            self._failures.convict(sequence, self._tables())

    def _go_on(self, sequence: Sequence, sampled: Sampled | None) -> None:
        """After a step: take the sampled token, end what is complete."""
        if sampled is not None:
            self._take_token(sequence, sampled)
        elif sequence.num_to_feed == 0:
            self._register(sequence)

    def _take_token(self, sequence: Sequence, sampled: Sampled) -> None:
        sequence.append(sampled.token_id, self._now_s)
        emitted, result = sequence.answer.take(sampled)
        self._out.append(emitted)
        if result.stop is not None:
            self._counters.finished += 1
            self._finish(sequence, "stop", StopResult("", stop=result.stop))
        elif sequence.num_tokens == sequence.max_tokens:
            self._counters.finished += 1
            rest = sequence.answer.rest()
            self._finish(sequence, "length" if rest.stop is None else "stop", rest)

    def _end_failed(self, failed: list[Failed]) -> None:
        for sequence, answer in failed:
            self._forget(sequence)
            self._out.append(answer)

    # -- ends ---------------------------------------------------------------------------------

    def _on_cancel(self, event: CancelRequested) -> None:
        sequence = self._unanswered.get(event.request_id)
        if sequence is None:
            self._counters.late += 1
            return
        self._counters.cancelled += 1
        self._counters.cancelled_by[event.reason] += 1
        self._end_early(sequence, end_of(event.reason))

    def _end_early(self, sequence: Sequence, reason: FinishReason) -> None:
        self._finish(sequence, reason, sequence.answer.rest())

    def _register(self, sequence: Sequence) -> None:
        """A registration is computed: its blocks are held by the prefix from now on."""
        prefix_id = sequence.request.prefix_id
        if prefix_id is None:
            raise InternalError(f"nothing to compute: {sequence.story()}")
        keep = sequence.cache.register(prefix_id, sequence.blocks())
        if keep is None:
            self._fail(sequence, questions.full(sequence.cache))
            return
        self._counters.registered += 1
        self._finish(sequence, "registered", _NO_TEXT, keep)

    def _fail_stuck(self, sequence: Sequence) -> None:
        cache = sequence.cache
        needed = cache.num_blocks_for(sequence.num_tokens)
        self._fail(
            sequence,
            f"{needed} blocks are needed, but registrations, pins and leases hold "
            f"{cache.keeps.num_blocks} of {cache.num_usable}",
        )

    def _fail(self, sequence: Sequence, sentence: str) -> None:
        """For want of blocks."""
        self._counters.failed += 1
        self._retire(sequence)
        retry_after_ms = self._pace.retry_after_ms(self._now_s)
        error = CapacityError(sentence, retry_after_ms=retry_after_ms)
        self._out.append(_failure(sequence.request.request_id, error))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        rest: StopResult,
        keep: Keep | None = None,
    ) -> None:
        self._retire(sequence)
        usage = sequence.usage(self._now_s)
        if reason in ("stop", "length"):
            self.latencies.note_answer(sequence.request.tenant, usage, self._now_s)
        self._out.append(
            FinishRequest(
                request_id=sequence.request.request_id,
                reason=reason,
                text=rest.text,
                usage=usage,
                stop=rest.stop if reason == "stop" else None,
                prefix_id=None if keep is None else PrefixId(keep.name),
                num_kept_blocks=0 if keep is None else len(keep.blocks),
            )
        )

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.retire(sequence)
        self._has_leavers |= sequence.status == "leaving"
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """The request has its final answer."""
        request_id = sequence.request.request_id
        del self._unanswered[request_id]
        self._deadlines.discard(request_id)
        self._pace.note_end(self._now_s)


def _failure(request_id: RequestId, error: RuntimeCacheError) -> FailRequest:
    return FailRequest(
        request_id=request_id,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
    )
