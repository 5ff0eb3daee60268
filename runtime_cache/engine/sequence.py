"""One admitted or waiting request: its tokens, how far they are computed, and its story. Pure.

    tokens   0 ........ num_computed ........ num_tokens ........ max_tokens
             KV in the pool | to be fed next | room for the answer

The last token of an answer that goes on has been sampled but not fed yet, so an answering sequence
has exactly one token to feed. A sequence with more is prefilling: its prompt, or after a
preemption prompt and answer so far.

In deterministic mode a token's KV must always be computed in the same way: prompts by prefill
chunks on a grid, answers one token a decode step, after a preemption as well. Only the prompt's KV
is shared then.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from runtime_cache.cache.block_table import BlockCopy, BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheReport, MatchHint
from runtime_cache.engine.answer import Answer
from runtime_cache.engine.batch import BatchRow, RowCopy, SlotRun
from runtime_cache.engine.gears import Role
from runtime_cache.engine.request import NewRequest, TokenArray, Usage
from runtime_cache.engine.sampler import SamplerState
from runtime_cache.errors import InternalError

#: waiting: in the queue, has no blocks.    ready: has blocks, is in no step.
#: stepping: in the step in flight.         leaving: answered, but its step is still in flight.
#: ended: has no blocks, is forgotten.
Status = Literal["waiting", "ready", "stepping", "leaving", "ended"]
Happening = Literal[
    "admitted", "launched", "step_done", "step_failed", "preempted", "recomputed", "answered"
]

#: Everything that can happen to a sequence. Any other pair is a bug of the engine.
TRANSITIONS: dict[tuple[Status, Happening], Status] = {
    ("waiting", "admitted"): "ready",
    ("waiting", "answered"): "ended",
    ("ready", "launched"): "stepping",
    ("ready", "preempted"): "waiting",
    ("ready", "answered"): "ended",
    ("stepping", "step_done"): "ready",
    ("stepping", "step_failed"): "ended",
    ("stepping", "recomputed"): "waiting",
    ("stepping", "answered"): "leaving",
    ("leaving", "step_done"): "ended",
    ("leaving", "step_failed"): "ended",
}
_STORY_LENGTH = 32
_UNWANTED = CacheReport(0, "disabled", detail="the request says so (use_cache)")


class Sequence:
    """The running state of one request.

    Attributes:
        cache: that of its tenant.
        number: its place in the order of arrival.
        num_tokens: tokens known so far, prompt and answer. For a registration: those that may be
            kept, since the rest is of no use.
        num_computed: how many of them, from the front, have their KV in the pool.
        max_tokens: where the answer ends by its length.
        prefill_end: tokens before this position are prefilled, those from it on are decoded.
        table: its blocks; None unless it is admitted.
        chain: its block digests.
        sampler: None for a registration.
        report: what the cache did at its first admission; None before.
        is_caching: whether it reads and writes the cache.
        suspects: blocks of others that it got bad logits with, and is being computed without.
        num_failures: steps that it was in and that failed.
        num_overtaken: how many later requests were admitted before it.
        last_step: number of the last step it was in; 0 for none.
        last_token_s: when its last answer token came; None before the first.
    """

    __slots__ = (
        "_hint",
        "_is_deterministic",
        "_story",
        "_tokens",
        "answer",
        "arrived_s",
        "cache",
        "chain",
        "first_step_s",
        "first_token_s",
        "is_caching",
        "last_step",
        "last_token_s",
        "max_tokens",
        "num_computed",
        "num_failures",
        "num_overtaken",
        "num_tokens",
        "number",
        "prefill_end",
        "prefilled_tokens",
        "report",
        "request",
        "sampler",
        "status",
        "suspects",
        "table",
    )

    def __init__(
        self,
        request: NewRequest,
        cache: CacheManager,
        *,
        max_tokens: int,
        arrived_s: float,
        is_deterministic: bool,
    ) -> None:
        """Start as waiting.

        Args:
            max_tokens: prompt and answer together, at least one more than the prompt.

        Raises:
            InvalidRequest: the sampling parameters cannot be used.
        """
        num_prompt = len(request.prompt)
        is_register = request.kind == "register"
        self.request = request
        self.cache = cache
        self.number = 0
        self.max_tokens = max_tokens
        self.num_tokens = cache.policy.cacheable(num_prompt) if is_register else num_prompt
        self.num_computed = self.last_step = 0
        self.prefill_end = self.num_tokens
        # Not touched until used, so a long context costs address space rather than memory.
        self._tokens: TokenArray = np.empty(max_tokens, dtype=np.int32)
        self._tokens[:num_prompt] = request.prompt
        self.table: BlockTable | None = None
        self.sampler = None if is_register else SamplerState(request.params, request.prompt)
        self.answer = Answer(request)
        self.chain = cache.new_chain()
        self.chain.extend(request.prompt)
        self.arrived_s = arrived_s
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.report: CacheReport | None = None
        self.prefilled_tokens = 0
        self.is_caching = request.use_cache
        self.suspects: list[PrefixNode] = []
        self.num_failures = self.num_overtaken = 0
        self.status: Status = "waiting"
        self._hint = MatchHint()
        self._is_deterministic = is_deterministic
        self._story: deque[tuple[Happening, Status, int]] = deque(maxlen=_STORY_LENGTH)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def tokens(self) -> TokenArray:
        """All tokens so far [int32, num_tokens]; known tokens never change."""
        return self._tokens[: self.num_tokens]

    @property
    def num_to_feed(self) -> int:
        """Known tokens without KV."""
        return self.num_tokens - self.num_computed

    @property
    def num_to_prefill(self) -> int:
        """Those of them that are fed in chunks."""
        return self.prefill_end - self.num_computed

    @property
    def role(self) -> Role:
        """The kind of step it needs next.

        A single token joins a decode step; in deterministic mode only a token of the answer does.
        """
        if self._is_deterministic:
            return "prefill" if self.num_to_prefill > 0 else "decode"
        return "decode" if self.num_tokens - self.num_computed == 1 else "prefill"

    @property
    def max_hit_tokens(self) -> int:
        """The longest useful cache hit: an answer needs the logits of the last token."""
        if self.sampler is None:
            return self.num_tokens
        return (self.prefill_end if self._is_deterministic else self.num_tokens) - 1

    @property
    def num_reusable(self) -> int:
        """How many tokens from the front others may reuse the KV of."""
        if self._is_deterministic:
            return min(self.num_computed, self.prefill_end)
        return self.num_computed

    @property
    def num_answered(self) -> int:
        """Answer tokens so far."""
        return max(0, self.num_tokens - len(self.request.prompt))

    def match_length(self) -> int:
        """How many of its tokens are cached now, in whole blocks."""
        if not self.is_caching:
            return 0
        return self.cache.match_length(self.chain, self._hint, self.max_hit_tokens)

    def blocks(self) -> BlockTable:
        """The table of an admitted sequence.

        Raises:
            InternalError: it is not admitted.
        """
        if self.table is None:
            raise InternalError(f"no blocks: {self.story()}")
        return self.table

    def usage(self, now_s: float) -> Usage:
        """What it used, if it ends now."""
        first_step_s = now_s if self.first_step_s is None else self.first_step_s
        ttft_s = None if self.first_token_s is None else self.first_token_s - self.arrived_s
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=0 if self.report is None else self.report.cached_tokens,
            prefilled_tokens=self.prefilled_tokens,
            completion_tokens=self.num_answered,
            queue_s=first_step_s - self.arrived_s,
            ttft_s=ttft_s,
            total_s=now_s - self.arrived_s,
            cache=self.report,
        )

    def story(self) -> str:
        """The last things that happened to it, for error messages."""
        steps = ", ".join(f"{what} → {status} (step {n})" for what, status, n in self._story)
        return f"request {self.request.request_id} is {self.status}: {steps or 'just arrived'}"

    # -- what happens to it -------------------------------------------------------------------

    def move(self, happening: Happening) -> None:
        """Change the status.

        Raises:
            InternalError: this cannot happen in this status; nothing has changed.
        """
        status = TRANSITIONS.get((self.status, happening))
        if status is None:
            raise InternalError(f"{happening} cannot happen now; {self.story()}")
        self.status = status
        self._story.append((happening, status, self.last_step))

    def admit(self, table: BlockTable) -> CacheReport:
        """Take the blocks for all its tokens; those found in the cache are computed.

        Returns:
            What the cache did at the first admission.
        """
        self.move("admitted")
        self.table = table
        self.num_computed = table.num_hit_tokens
        if not self._is_deterministic:
            self.prefill_end = self.num_tokens
        if self.report is None:
            self.report = table.report or _UNWANTED
        return self.report

    def preempt(self) -> BlockTable:
        """Give up the blocks, for the caller to release; everything else stays."""
        self.move("preempted")
        self.num_computed = 0
        return self.take_blocks()

    def start_again(self, *, is_caching: bool) -> BlockTable:
        """Give up the blocks, for the caller to drop, and compute again what is lost.

        The tokens stay, those of the answer too: so the answer goes on where it was.

        Args:
            is_caching: False to compute everything without the cache from now on.
        """
        self.move("recomputed")
        self.num_computed = 0
        self.is_caching = self.is_caching and is_caching
        return self.take_blocks()

    def take_blocks(self) -> BlockTable:
        """Hand the table over to the caller, who releases it."""
        table, self.table = self.blocks(), None
        return table

    def launch(self, step: int, num_fed: int, now_s: float) -> BatchRow:
        """Enter a step with the next `num_fed` tokens."""
        self.last_step = step
        self.move("launched")
        if self.first_step_s is None:
            self.first_step_s = now_s
        start, end = self.num_computed, self.num_computed + num_fed
        table = self.blocks()
        return BatchRow(
            self.request.request_id,
            self._tokens[start:end],
            start,
            table.slots[:start],
            _slot_runs(table, start, end),
            self.sampler if end == self.num_tokens else None,
            () if table.copy is None else _row_copies(table, table.copy, start),
        )

    def advance(self, num_fed: int) -> int:
        """The step is done; the KV of the fed tokens is in the pool.

        Returns:
            How many of them were prefilled.
        """
        self.move("step_done")
        start = self.num_computed
        self.num_computed = start + num_fed
        if start >= self.prefill_end:
            return 0
        num_prefilled = min(num_fed, self.prefill_end - start)
        self.prefilled_tokens += num_prefilled
        return num_prefilled

    def append(self, token_id: int, now_s: float) -> None:
        """Add a sampled token."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


def _row_copies(table: BlockTable, copy: BlockCopy, num_past: int) -> tuple[RowCopy, ...]:
    """What the first step after the admission copies into the end of the past."""
    source, num_tokens = copy
    target_slot = int(table.slots[num_past - num_tokens])
    return (RowCopy(source * table.block_size, target_slot, num_tokens),)


def _slot_runs(table: BlockTable, start: int, end: int) -> tuple[SlotRun, ...]:
    """Where the tokens [start, end) go: one run per block they touch."""
    size = table.block_size
    if end - start == 1:
        return (SlotRun(table.blocks[start // size] * size + start % size, 1),)
    runs = []
    while start < end:
        block, offset = divmod(start, size)
        num_tokens = min(end - start, size - offset)
        runs.append(SlotRun(table.blocks[block] * size + offset, num_tokens))
        start += num_tokens
    return tuple(runs)
