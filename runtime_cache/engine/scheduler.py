"""Who runs next. Pure.

- First come, first served. A request is admitted when there are blocks for its whole prompt, and
  only while no other prompt is being prefilled: equal prompts that arrive together are computed
  once, since the later ones are matched when the first is in the cache.
- While answers are running and a prompt is being prefilled, chunks and decode steps alternate, and
  a chunk is no longer than `interleave_chunk_tokens`.
- When the pool is short, the youngest admitted request gives its blocks up and goes back to the
  front of the queue. Those it had committed stay cached. So requests are always in order of
  arrival, all running ones before all waiting ones, and the oldest always goes on.

At most one step is in flight; nothing here is called meanwhile but `enqueue` and `retire`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from runtime_cache.cache.manager import CacheManager
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.gears import GearTable, Role
from runtime_cache.engine.sequence import Sequence
from runtime_cache.ids import StepId


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
    """This request is alone and still has no room: registered prefixes hold the blocks."""

    sequence: Sequence


Decision = Step | Computed | Stuck


class Scheduler:
    """The queue and the running requests.

    Attributes:
        waiting: in order of arrival.
        running: admitted, in order of arrival.
        num_preemptions: so far.
    """

    def __init__(
        self,
        cache: CacheManager,
        gears: GearTable,
        *,
        max_running: int,
        interleave_chunk_tokens: int,
    ) -> None:
        """Args:
        max_running: requests admitted at a time.
        interleave_chunk_tokens: the longest chunk while answers are running.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._cache = cache
        self._gears = gears
        self._max_running = max_running
        self._interleave_chunk_tokens = interleave_chunk_tokens
        self._last_step = StepId(0)
        self._last_role: Role = "decode"

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new request at the end of the queue."""
        self.waiting.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """A request has got its final answer.

        If it is in the step in flight its blocks stay until `settle`.
        """
        before = sequence.status
        sequence.move("answered")
        if before == "waiting":
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if before == "ready":
            self._cache.release(sequence.take_blocks())

    def settle(self, sequence: Sequence, num_fed: int) -> int:
        """A sequence's step is done: its full blocks enter the cache.

        Returns:
            How many of the fed tokens were prefilled.
        """
        num_prefilled = sequence.advance(num_fed)
        table = sequence.blocks()
        if sequence.num_computed // table.block_size > table.num_committed:
            sequence.chain.extend(sequence.tokens)
            self._cache.commit(table, sequence.chain, sequence.num_computed)
        if sequence.status == "ended":
            self._cache.release(sequence.take_blocks())
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
        self._cache.drop(sequence.take_blocks(), is_all_suspect=is_all_suspect)

    def decide(self, now_s: float) -> Decision | None:
        """What to do next while no step is in flight; None if there is nothing to do.

        A `Step` has started when this returns. After `Computed` or `Stuck` the caller ends that
        request and asks again.
        """
        return self._extend_answers() or self._admit() or self._next_step(now_s)

    # -- blocks -------------------------------------------------------------------------------

    def _extend_answers(self) -> Stuck | None:
        """Give every running answer room for its next token, the oldest first."""
        for sequence in tuple(self.running):
            if sequence.status != "ready":
                continue  # preempted for an older one just now
            while not self._cache.reserve(sequence.blocks(), sequence.num_tokens):
                if len(self.running) == 1:
                    return Stuck(sequence)
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    break
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._cache.release(sequence.preempt())
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self) -> Computed | Stuck | None:
        while self.waiting and self._may_admit():
            sequence = self.waiting[0]
            if not self._try_admit(sequence):
                return None if self.running else Stuck(sequence)
            self.running.append(self.waiting.popleft())
            if sequence.num_to_feed == 0:
                return Computed(sequence)
        return None

    def _may_admit(self) -> bool:
        is_prefilling = bool(self.running) and self.running[-1].role == "prefill"
        return len(self.running) < self._max_running and not is_prefilling

    def _try_admit(self, sequence: Sequence) -> bool:
        sequence.chain.extend(sequence.tokens)
        table = self._cache.admit(
            sequence.chain,
            num_tokens=sequence.num_tokens,
            max_tokens=sequence.max_tokens,
            max_hit_tokens=sequence.max_hit_tokens,
            is_retry=sequence.cached_tokens is not None,
        )
        if table is None:
            return False
        sequence.admit(table)
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
            chunk = self._gears.chunk_for(youngest.num_to_feed, past=past, max_tokens=cap)
            return self._launch("prefill", [youngest], chunk, now_s)
        return self._launch("decode", self._decode_rows(answering), 1, now_s)

    def _decode_rows(self, answering: list[Sequence]) -> list[Sequence]:
        """Those that waited longest, as many as a gear holds with the longest past among them."""
        rows: list[Sequence] = []
        longest_past = 0
        for sequence in sorted(answering, key=lambda s: s.last_step):
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
        rows = tuple(sequence.launch(step_id, chunk, now_s) for sequence in sequences)
        return Step(StepBatch(step_id, role, gear, rows), tuple(sequences))
