"""Who runs next. Pure.

- Each tenant has its queue (`waiting`) and its cache; their queues are tried in the order of their
  oldest request. A request is admitted when its cache has blocks for its whole prompt.
- Only one prompt is prefilled at a time: equal prompts that arrive together are computed once,
  since the later ones are matched when the first is in the cache.
- While answers are running and a prompt is being prefilled, chunks and decode steps alternate, and
  a chunk is no longer than `interleave_chunk_tokens`.
- When a cache is short of blocks, the youngest admitted request of its tenant gives its blocks up
  and goes back to the front of its queue. What it had computed stays cached. So the oldest admitted
  of each tenant always goes on.

At most one step is in flight; nothing here is called meanwhile but `enqueue` and `retire`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.gears import GearTable, Role
from runtime_cache.engine.latency import Latencies
from runtime_cache.engine.sequence import Sequence
from runtime_cache.engine.waiting import WaitingQueue
from runtime_cache.ids import StepId, TenantName


@dataclass(frozen=True, slots=True)
class Step:
    """Run this; `sequences` are those of the batch's rows."""

    batch: StepBatch
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """This registration has nothing (more) to compute."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Stuck:
    """This request is alone in its cache and still has no room: kept prefixes hold the blocks."""

    sequence: Sequence


Decision = Step | Computed | Stuck


class Scheduler:
    """The queues and the running requests.

    Attributes:
        running: admitted, in order of admission.
        num_preemptions: so far.
        requests_by_reason: what the cache did, by tenant; a request counts once.
        latencies: how long requests wait and steps take; the rest of it is written by the engine.
    """

    def __init__(
        self,
        queues: Mapping[TenantName, WaitingQueue],
        gears: GearTable,
        *,
        max_running: int,
        interleave_chunk_tokens: int,
    ) -> None:
        """Args:
        queues: one of each tenant, empty.
        max_running: requests admitted at a time.
        interleave_chunk_tokens: the longest chunk while answers are running.
        """
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.requests_by_reason = {tenant: Counter[str]() for tenant in queues}
        self.latencies = Latencies(queues)
        self._queues = queues
        self._gears = gears
        self._max_running = max_running
        self._interleave_chunk_tokens = interleave_chunk_tokens
        self._num_arrived = 0
        self._last_step = StepId(0)
        self._last_role: Role = "decode"

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The requests in the queues."""
        return tuple(chain.from_iterable(self._queues.values()))

    def num_waiting(self, tenant: TenantName) -> int:
        """Requests in this tenant's queue."""
        return len(self._queues[tenant])

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new request to its tenant's queue."""
        self._num_arrived += 1
        sequence.number = self._num_arrived
        self._queue_of(sequence).add(sequence)

    def retire(self, sequence: Sequence) -> None:
        """A request has got its final answer; what it had computed stays cached.

        If it is in the step in flight its blocks stay until `settle`.
        """
        before = sequence.status
        sequence.move("answered")
        if before == "waiting":
            self._queue_of(sequence).remove(sequence)
            return
        self.running.remove(sequence)
        if before == "ready":
            _commit(sequence, is_tail=True)
            sequence.cache.release(sequence.take_blocks())

    def settle(self, sequence: Sequence, num_fed: int) -> int:
        """A sequence's step is done: its full blocks enter the cache.

        So does its last, partly filled block when its prompt is complete and when it has ended.

        Returns:
            How many of the fed tokens were prefilled.
        """
        num_prefilled = sequence.advance(num_fed)
        table = sequence.blocks()
        if table.copy is not None:
            sequence.cache.copied(table)
        is_over = sequence.status == "ended"
        is_tail = is_over or (num_prefilled > 0 and sequence.num_to_prefill == 0)
        # After most steps no block has become full, and there is nothing to do.
        if is_tail or sequence.num_computed >= (table.num_committed + 1) * table.block_size:
            _commit(sequence, is_tail=is_tail)
        if is_over:
            sequence.cache.release(sequence.take_blocks())
        return num_prefilled

    def discard(self, sequence: Sequence, *, is_all_suspect: bool) -> None:
        """A sequence's step has failed: it ends, and what the step wrote is dropped.

        Args:
            is_all_suspect: what its earlier steps wrote is dropped too.
        """
        before = sequence.status
        sequence.move("step_failed")
        if before == "stepping":
            self.running.remove(sequence)
        sequence.cache.drop(sequence.take_blocks(), is_all_suspect=is_all_suspect)

    def recompute(self, sequence: Sequence, *, is_all_suspect: bool) -> None:
        """A sequence's step has failed: what the step wrote is dropped, and computed again.

        It goes before all that wait; of several the one that is put back last goes first.

        Args:
            is_all_suspect: what it reused or computed before is not trusted either, so it goes on
                without the cache. What others hold or go on from stays, as its `suspects`, until
                it has shown whose fault it was.
        """
        self.running.remove(sequence)
        table = sequence.start_again(is_caching=not is_all_suspect)
        stayed = sequence.cache.drop(table, is_all_suspect=is_all_suspect)
        sequence.suspects = sequence.suspects or stayed
        self._queue_of(sequence).put_back(sequence)

    def withdraw_copies(self, step: Step) -> None:
        """A step has gone wrong: what it may have spoilt is not to be copied.

        Who, of the same tenants, has a copy before it goes back to its queue, to be matched with
        what is left. To be called before `discard`, so that these requests hold nothing of what is
        dropped.
        """
        tenants = {sequence.request.tenant for sequence in step.sequences}
        for sequence in self.running[::-1]:  # the oldest is put back last, and goes first
            if sequence.status != "ready" or sequence.request.tenant not in tenants:
                continue
            if sequence.blocks().copy is not None:
                self._preempt(sequence)

    def decide(self, now_s: float) -> Decision | None:
        """What to do next while no step is in flight; None if there is nothing to do.

        A `Step` has started when this returns. After `Computed` or `Stuck` the caller ends that
        request and asks again.
        """
        return self._extend_answers() or self._admit() or self._next_step(now_s)

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self._queues[sequence.request.tenant]

    # -- blocks -------------------------------------------------------------------------------

    def _extend_answers(self) -> Stuck | None:
        """Give every running answer room for its next token, the oldest first."""
        needy = [s for s in self.running if s.num_tokens > s.blocks().num_reserved]
        for sequence in needy:
            if sequence.status != "ready":
                continue  # preempted for an older one just now
            while not sequence.cache.reserve(sequence.blocks(), sequence.num_tokens):
                peers = [other for other in self.running if other.cache is sequence.cache]
                if len(peers) == 1:
                    return Stuck(sequence)
                self._preempt(peers[-1])
                if peers[-1] is sequence:
                    break
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        _commit(sequence, is_tail=True)
        sequence.cache.release(sequence.preempt())
        self._queue_of(sequence).put_back(sequence)
        self.num_preemptions += 1

    def _admit(self) -> Computed | Stuck | None:
        while self._may_admit():
            admitted = self._admit_one()
            if admitted is None or isinstance(admitted, Stuck):
                return admitted
            if admitted.num_to_feed == 0:
                _commit(admitted, is_tail=True)
                return Computed(admitted)
        return None

    def _may_admit(self) -> bool:
        is_prefilling = bool(self.running) and self.running[-1].role == "prefill"
        return len(self.running) < self._max_running and not is_prefilling

    def _admit_one(self) -> Sequence | Stuck | None:
        """Admit the next request of the first tenant that has room for it."""
        queues = [queue for queue in self._queues.values() if queue]
        for queue in sorted(queues, key=lambda queue: queue.oldest):
            sequence = queue.next()
            if self._try_admit(sequence):
                queue.take(sequence)
                self.running.append(sequence)
                return sequence
            if all(other.cache is not sequence.cache for other in self.running):
                return Stuck(sequence)
        return None

    def _try_admit(self, sequence: Sequence) -> bool:
        request, is_retry = sequence.request, sequence.report is not None
        sequence.chain.extend(sequence.tokens)
        table = sequence.cache.admit(
            sequence.chain,
            num_tokens=sequence.num_tokens,
            max_tokens=sequence.max_tokens,
            max_hit_tokens=sequence.max_hit_tokens,
            priority=request.cache_priority,
            is_caching=sequence.is_caching,
            is_kept=request.kind == "register",
            is_retry=is_retry,
        )
        if table is None:
            return False
        reason = sequence.admit(table).reason
        self.requests_by_reason[request.tenant][reason] += not is_retry
        return True

    # -- steps --------------------------------------------------------------------------------

    def _next_step(self, now_s: float) -> Step | None:
        if not self.running:
            return None
        youngest = self.running[-1]
        answering = [s for s in self.running if s.role == "decode"]
        if youngest.role == "prefill" and not (answering and self._last_role == "prefill"):
            cap = self._interleave_chunk_tokens if answering else None
            past = youngest.num_computed
            chunk = self._gears.chunk_for(youngest.num_to_prefill, past=past, max_tokens=cap)
            return self._launch("prefill", [youngest], chunk, now_s)
        return self._launch("decode", self._decode_rows(answering), 1, now_s)

    def _decode_rows(self, answering: list[Sequence]) -> list[Sequence]:
        """Those that waited longest, as many as a gear holds with the longest past among them."""
        longest_past = max(sequence.num_computed for sequence in answering)
        in_order = sorted(answering, key=attrgetter("last_step"))
        if len(in_order) <= self._gears.max_batch_at(longest_past):
            return in_order
        rows: list[Sequence] = []
        longest_past = 0
        for sequence in in_order:
            past = max(longest_past, sequence.num_computed)
            if len(rows) < self._gears.max_batch_at(past):
                rows.append(sequence)
                longest_past = past
        return rows

    def _launch(self, role: Role, sequences: list[Sequence], chunk: int, now_s: float) -> Step:
        past = max(sequence.num_computed for sequence in sequences)
        gear = self._gears.pick(role, batch=len(sequences), chunk=chunk, past=past)
        self._last_step = step_id = StepId(self._last_step + 1)
        self._last_role = role
        self.latencies.note_launch(sequences, now_s)
        rows = [sequence.launch(step_id, chunk, now_s) for sequence in sequences]
        return Step(StepBatch(step_id, role, gear, tuple(rows)), tuple(sequences))


def _commit(sequence: Sequence, *, is_tail: bool) -> None:
    """Let others find what the sequence has computed.

    Args:
        is_tail: its last block too if that is partly filled.
    """
    table, num_tokens = sequence.blocks(), sequence.num_reusable
    if not table.is_caching:
        return
    num_full = sequence.cache.policy.cacheable(num_tokens) // table.block_size
    if is_tail or num_full > table.num_committed:
        sequence.chain.extend(sequence.tokens)
        sequence.cache.commit(table, sequence.chain, num_tokens, is_tail=is_tail)
