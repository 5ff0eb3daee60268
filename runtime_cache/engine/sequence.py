"""One admitted or waiting request: its tokens, how far they are computed, and its story. Pure.

    tokens   0 ........ num_computed ........ num_tokens ........ max_tokens
             KV in the pool | to be fed next | room for the answer

The last token of an answer that goes on has been sampled but not fed yet, so an answering sequence
has exactly one token to feed. A sequence with more is prefilling: its prompt, or after a
preemption prompt and answer so far.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.hashing import HashChain
from runtime_cache.engine.answer import Answer
from runtime_cache.engine.batch import BatchRow, SlotRun
from runtime_cache.engine.gears import Role
from runtime_cache.engine.request import NewRequest, TokenArray, Usage
from runtime_cache.engine.sampler import SamplerState
from runtime_cache.errors import InternalError

#: waiting: in the queue, has no blocks.    ready: has blocks, is in no step.
#: stepping: in the step in flight.         leaving: answered, but its step is still in flight.
#: ended: has no blocks, is forgotten.
Status = Literal["waiting", "ready", "stepping", "leaving", "ended"]
Happening = Literal["admitted", "launched", "step_done", "step_failed", "preempted", "answered"]

#: Everything that can happen to a sequence. Any other pair is a bug of the engine.
TRANSITIONS: dict[tuple[Status, Happening], Status] = {
    ("waiting", "admitted"): "ready",
    ("waiting", "answered"): "ended",
    ("ready", "launched"): "stepping",
    ("ready", "preempted"): "waiting",
    ("ready", "answered"): "ended",
    ("stepping", "step_done"): "ready",
    ("stepping", "step_failed"): "ended",
    ("stepping", "answered"): "leaving",
    ("leaving", "step_done"): "ended",
    ("leaving", "step_failed"): "ended",
}
_STORY_LENGTH = 32


class Sequence:
    """The running state of one request.

    Attributes:
        num_tokens: tokens known so far, prompt and answer. For a registration: those in the
            prefix's full blocks, since the rest is of no use.
        num_computed: how many of them, from the front, have their KV in the pool.
        max_tokens: where the answer ends by its length.
        prefill_end: tokens before this position are prefilled, those from it on are decoded.
        table: its blocks; None unless it is admitted.
        chain: its block digests.
        sampler: None for a registration.
        last_step: number of the last step it was in; 0 for none.
    """

    __slots__ = (
        "_story",
        "_tokens",
        "answer",
        "arrived_s",
        "cached_tokens",
        "chain",
        "first_step_s",
        "first_token_s",
        "last_step",
        "max_tokens",
        "num_computed",
        "num_tokens",
        "prefill_end",
        "prefilled_tokens",
        "request",
        "sampler",
        "status",
        "table",
    )

    def __init__(
        self, request: NewRequest, chain: HashChain, *, max_tokens: int, arrived_s: float
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
        self.chain = chain
        self.max_tokens = max_tokens
        self.num_tokens = num_prompt - num_prompt % chain.block_size if is_register else num_prompt
        self.num_computed = self.prefill_end = self.last_step = 0
        # Not touched until used, so a long context costs address space rather than memory.
        self._tokens: TokenArray = np.empty(max_tokens, dtype=np.int32)
        self._tokens[:num_prompt] = request.prompt
        self.table: BlockTable | None = None
        self.sampler = None if is_register else SamplerState(request.params, request.prompt)
        self.answer = Answer(request)
        self.arrived_s = arrived_s
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_tokens: int | None = None
        self.prefilled_tokens = 0
        self.status: Status = "waiting"
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
    def role(self) -> Role:
        """The kind of step it needs next; a single token can always join a decode step."""
        return "decode" if self.num_to_feed == 1 else "prefill"

    @property
    def max_hit_tokens(self) -> int:
        """The longest useful cache hit: an answer needs the logits of the last token."""
        return self.num_tokens if self.sampler is None else self.num_tokens - 1

    @property
    def num_answered(self) -> int:
        """Answer tokens so far."""
        return max(0, self.num_tokens - len(self.request.prompt))

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
            cached_tokens=self.cached_tokens or 0,
            prefilled_tokens=self.prefilled_tokens,
            completion_tokens=self.num_answered,
            queue_s=first_step_s - self.arrived_s,
            ttft_s=ttft_s,
            total_s=now_s - self.arrived_s,
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

    def admit(self, table: BlockTable) -> None:
        """Take the blocks for all its tokens; those found in the cache are computed."""
        self.move("admitted")
        self.table = table
        self.num_computed = table.num_hit_tokens
        self.prefill_end = self.num_tokens
        if self.cached_tokens is None:
            self.cached_tokens = table.num_hit_tokens

    def preempt(self) -> BlockTable:
        """Give up the blocks, for the caller to release; everything else stays."""
        self.move("preempted")
        self.num_computed = 0
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
            request_id=self.request.request_id,
            token_ids=self._tokens[start:end],
            num_past=start,
            past_slots=table.slots[:start],
            appends=_slot_runs(table, start, end),
            sampler=self.sampler if end == self.num_tokens else None,
        )

    def advance(self, num_fed: int) -> int:
        """The step is done; the KV of the fed tokens is in the pool.

        Returns:
            How many of them were prefilled.
        """
        self.move("step_done")
        num_prefilled = max(0, min(num_fed, self.prefill_end - self.num_computed))
        self.prefilled_tokens += num_prefilled
        self.num_computed += num_fed
        return num_prefilled

    def append(self, token_id: int, now_s: float) -> None:
        """Add a sampled token."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = now_s


def _slot_runs(table: BlockTable, start: int, end: int) -> tuple[SlotRun, ...]:
    """Where the tokens [start, end) go: one run per block they touch."""
    size = table.block_size
    runs = []
    while start < end:
        block, offset = divmod(start, size)
        num_tokens = min(end - start, size - offset)
        runs.append(SlotRun(table.blocks[block] * size + offset, num_tokens))
        start += num_tokens
    return tuple(runs)
