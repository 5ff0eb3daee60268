"""An engine with a fake device: every answer is known beforehand, every KV read is checked.

The fake model's next token is a hash of all tokens before it. The fake KV pool remembers for each
slot which token, at which position, behind which prefix was written; a step that would read or copy
anything else, or write where it must not, fails the test.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from om_models.manifest import Gear
from runtime_cache.cache import invariants
from runtime_cache.cache.hashing import TOKEN_BYTES, root_digest
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.policy import DEFAULT_PRIORITY, CachePolicy
from runtime_cache.engine.batch import BatchRow, RowCopy, StepBatch, check_batch
from runtime_cache.engine.commands import (
    Command,
    EmitTokens,
    FailRequest,
    FinishRequest,
    RunStep,
)
from runtime_cache.engine.events import (
    CancelRequested,
    ClockTicked,
    DrainStarted,
    Event,
    EvictAsked,
    ExplainAsked,
    PinAsked,
    PrefixReleased,
    RequestArrived,
    ShowAsked,
    StepDone,
    StepFailed,
    StepHung,
    UnpinAsked,
)
from runtime_cache.engine.gears import GearTable, Role
from runtime_cache.engine.limits import EngineLimits
from runtime_cache.engine.request import BadLogits, NewRequest, Sampled, SamplingParams
from runtime_cache.engine.state import EngineState
from runtime_cache.ids import BlockId, PrefixId, RequestId, TenantName
from tests.support import handing_out
from tests.support.caching import BLOCK_SIZE

VOCAB = 64
#: What a failed step leaves in the blocks it was to write to: no position of any sequence.
POISON: tuple[int, ...] = ()

Final = FinishRequest | FailRequest


def next_token(tokens: Sequence[int]) -> int:
    """The fake model, greedy."""
    packed = np.asarray(tokens, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.sha256(packed).digest()[:4], "little") % VOCAB


def expected_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an engine without any cache would answer."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Letters:
    """A detokenizer: one letter a token, nothing ever incomplete."""

    def step(self, token_id: int) -> str:
        return chr(ord("A") + token_id)

    def flush(self) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"


def small_gears(max_model_len: int = 32, max_batch: int = 4) -> GearTable:
    """Prefill chunks of 4 and 8, decode batches of 1, 2 and 4."""
    pasts = (8, max_model_len)
    batches = [batch for batch in (1, 2, 4, 8, 16) if batch <= max_batch]
    return GearTable(
        [Gear(1, chunk, past) for chunk, past in product((4, 8), pasts)],
        [Gear(batch, 1, past) for batch, past in product(batches, pasts)],
    )


def make_caches(
    num_blocks: int, tenants: Sequence[str] = ("",), policy: CachePolicy | None = None
) -> dict[TenantName, CacheManager]:
    """Caches that share a pool of `num_blocks` blocks, the null block included, evenly."""
    share = (num_blocks - 1) // len(tenants)
    return {
        TenantName(tenant): CacheManager(
            blocks=range(1 + i * share, 1 + (i + 1) * share),
            block_size=BLOCK_SIZE,
            root=root_digest(
                bundle_digest=b"\x11" * 32, block_size=BLOCK_SIZE, tenant_salt=tenant.encode()
            ),
            policy=policy or CachePolicy(),
        )
        for i, tenant in enumerate(tenants)
    }


class Origin(NamedTuple):
    """By which kind of run a row was computed: the tokens [start, end) in this gear."""

    role: Role
    gear: Gear
    start: int
    end: int


class FakePool:
    """slot → all tokens up to its own, as written by the steps.

    Attributes:
        num_rows_written: computed and appended.
        num_rows_copied: copied inside the pool.
        origins: where the content of each slot came from.
    """

    def __init__(self, caches: Iterable[CacheManager]) -> None:
        self._caches = {block: cache for cache in caches for block in cache.pool.blocks}
        self._slots: dict[int, tuple[int, ...]] = {}
        self.origins: dict[int, Origin] = {}
        self.num_rows_written = self.num_rows_copied = 0

    def run(self, batch: StepBatch) -> tuple[Sampled, ...]:
        """What the device does: copy, read the past, write the new KV, return the next tokens."""
        check_batch(batch)
        for copy in _copies(batch):
            self._copy(copy)
        pasts = [self._read(row) for row in batch.rows]
        samples = []
        for row, tokens in zip(batch.rows, pasts, strict=True):
            end = row.num_past + len(row.token_ids)
            origin = Origin(batch.role, batch.gear, row.num_past, end)
            for token, slot in zip(row.token_ids.tolist(), self._appends(row), strict=True):
                tokens.append(token)
                self._slots[slot] = tuple(tokens)
                self.origins[slot] = origin
                self.num_rows_written += 1
            if row.sampler is not None:
                samples.append(Sampled(next_token(tokens)))
        return tuple(samples)

    def poison(self, batch: StepBatch) -> None:
        """A step that failed half-way: the blocks it was to write to hold anything."""
        targets = [slot for row in batch.rows for slot in self._appends(row)]
        for copy in _copies(batch):
            targets += self._targets(copy.target_slot, copy.num_tokens)
        for block in {slot // BLOCK_SIZE for slot in targets}:
            for slot in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE):
                self._slots[slot] = POISON

    def _copy(self, copy: RowCopy) -> None:
        targets = self._targets(copy.target_slot, copy.num_tokens)
        for offset, target in enumerate(targets):
            source = copy.source_slot + offset
            self._slots[target] = self._slots[source]
            self.origins[target] = self.origins[source]
            self.num_rows_copied += 1

    def _read(self, row: BatchRow) -> list[int]:
        """The past's tokens; each slot must hold its own position behind the same prefix."""
        tokens: list[int] = []
        for position, slot in enumerate(row.past_slots.tolist()):
            content = self._slots[slot]
            assert len(content) == position + 1, f"slot {slot} holds another position"
            assert content[:position] == tuple(tokens), f"slot {slot} is of another prefix"
            tokens.append(content[position])
        return tokens

    def _appends(self, row: BatchRow) -> list[int]:
        return [slot for run in row.appends for slot in self._targets(*run)]

    def _targets(self, first_slot: int, num_tokens: int) -> range:
        """The slots of a run that is to be written: in one block, and nobody's cached rows."""
        block, offset = divmod(first_slot, BLOCK_SIZE)
        assert block in self._caches, "a step would write into a block of no tenant"
        assert offset + num_tokens <= BLOCK_SIZE, "a run crosses a block"
        node = self._caches[block].index.node_of(BlockId(block))
        num_cached = 0 if node is None else len(node.tokens) // TOKEN_BYTES
        assert offset >= num_cached, "a step would write over cached rows"
        return range(first_slot, first_slot + num_tokens)


def _copies(batch: StepBatch) -> list[RowCopy]:
    return [copy for row in batch.rows for copy in row.copies]


def limits(
    *,
    max_waiting: int = 64,
    interleave_chunk_tokens: int = 4,
    max_running: int | None = None,
    max_overtakes: int = 32,
    match_window: int = 64,
    is_deterministic: bool = False,
    on_failed_step: Literal["recompute", "fail"] = "fail",
) -> EngineLimits:
    """An engine's limits, where a test does not care about all of them."""
    return EngineLimits(
        max_waiting,
        interleave_chunk_tokens,
        max_running,
        max_overtakes,
        match_window,
        is_deterministic,
        on_failed_step,
    )


class EngineRig:
    """Feeds events, plays the device, keeps all answers, checks everything after each event.

    Attributes:
        commands: those of the last event.
        batch: the step in flight.
        is_hung: whether it is late, and so can only fail.
        batches: all steps so far.
        token_ids: answer tokens by request.
        token_times: when they came, of the requests that have any.
        texts: answer text by request, the final answer's rest included.
        finals: the final answer by request.
        requests: all that arrived.
        first_past: tokens that were not computed, by request, as its first step shows.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 24,
        tenants: Sequence[str] = ("",),
        gears: GearTable | None = None,
        policy: CachePolicy | None = None,
        config: EngineLimits | None = None,
    ) -> None:
        """Args:
        num_blocks: of the pool, the null block included; the tenants share the others evenly.
        """
        self.caches = make_caches(num_blocks, tenants, policy)
        self.cache = next(iter(self.caches.values()))
        self.gears = gears or small_gears()
        self.config = config or limits()
        self.state = EngineState(self.caches, self.gears, self.config)
        for cache in self.caches.values():
            handing_out.watch(cache, lambda: self.state._in_flight is not None)
        self.pool = FakePool(self.caches.values())
        self.now_s = 100.0
        self.commands: list[Command] = []
        self.batch: StepBatch | None = None
        self.is_hung = False
        self.batches: list[StepBatch] = []
        self.token_ids: dict[int, list[int]] = {}
        self.token_times: dict[int, list[float]] = {}
        self.texts: dict[int, str] = {}
        self.finals: dict[int, Final] = {}
        self.requests: dict[int, NewRequest] = {}
        self.first_past: dict[int, int] = {}
        self._num_kept_before = self._num_kept()
        self._next_id = 1

    # -- events -------------------------------------------------------------------------------

    def arrive(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 4,
        *,
        deadline_s: float | None = None,
        params: SamplingParams | None = None,
        eos: frozenset[int] = frozenset(),
        tenant: str = "",
        use_cache: bool = True,
        cache_priority: int = DEFAULT_PRIORITY,
    ) -> RequestId:
        """A new request, plainly greedy unless `params` says otherwise; returns its id."""
        request = NewRequest(
            RequestId(self._next_id),
            np.asarray(prompt, dtype=np.int32),
            params or SamplingParams(max_tokens=max_tokens, temperature=0.0),
            eos_token_ids=eos,
            detokenizer=Letters(),
            deadline_s=deadline_s,
            tenant=TenantName(tenant),
            use_cache=use_cache,
            cache_priority=cache_priority,
        )
        return self._arrive(request)

    def register(self, prefix_id: str, prompt: Sequence[int], *, tenant: str = "") -> RequestId:
        """A new registration; returns its id."""
        request = NewRequest(
            RequestId(self._next_id),
            np.asarray(prompt, dtype=np.int32),
            SamplingParams(temperature=0.0),
            kind="register",
            prefix_id=PrefixId(prefix_id),
            tenant=TenantName(tenant),
        )
        return self._arrive(request)

    def cancel(self, request_id: int) -> None:
        self.handle(CancelRequested(RequestId(request_id), "client", self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.handle(ClockTicked(self.now_s))

    def drain(self) -> None:
        self.handle(DrainStarted(self.now_s))

    def evict(
        self,
        max_blocks: int | None = None,
        *,
        tenant: str | None = None,
        digest: str | None = None,
        idle_s: float | None = None,
        age_s: float | None = None,
    ) -> Command:
        """What a dry run foresees, and what then happens: the same, or the rig complains."""
        question = EvictAsked(
            self.now_s,
            None if tenant is None else TenantName(tenant),
            max_blocks,
            digest,
            used_until_s=None if idle_s is None else self.now_s - idle_s,
            created_until_s=None if age_s is None else self.now_s - age_s,
        )
        before = self.state.snapshot()
        foreseen = self._ask(replace(question, is_dry_run=True))
        assert self.state.snapshot() == before
        done = self._ask(question)
        assert done == foreseen
        return done

    def show(
        self, *, tenant: str = "", digest: str | None = None, prefix_id: str | None = None
    ) -> Command:
        name = None if prefix_id is None else PrefixId(prefix_id)
        return self._ask(ShowAsked(self.now_s, digest, name, TenantName(tenant)))

    def release_prefix(self, prefix_id: str, *, tenant: str = "") -> Command:
        return self._ask(PrefixReleased(PrefixId(prefix_id), self.now_s, TenantName(tenant)))

    def pin(self, digest: str, ttl_s: float | None = None, *, tenant: str = "") -> Command:
        return self._ask(PinAsked(digest, self.now_s, ttl_s, TenantName(tenant)))

    def unpin(self, digest: str, *, tenant: str = "") -> Command:
        return self._ask(UnpinAsked(digest, self.now_s, TenantName(tenant)))

    def explain(self, prompt: Sequence[int], *, tenant: str = "") -> Command:
        tokens = np.asarray(prompt, dtype=np.int32)
        return self._ask(ExplainAsked(tokens, self.now_s, TenantName(tenant)))

    def step_done(
        self,
        seconds: float = 1.0,
        *,
        samples: tuple[Sampled | BadLogits, ...] | None = None,
        bad: int | None = None,
    ) -> None:
        """The step in flight runs and is done.

        Args:
            samples: what the model says instead of the right tokens.
            bad: the request whose logits are not usable.
        """
        assert not self.is_hung, "a step that has hung is over without results"
        batch = self._take_batch()
        self.now_s += seconds
        sampled = self.pool.run(batch)
        if self.config.is_deterministic:
            self._check_origins(batch)
        wanted = [row.request_id for row in batch.rows if row.sampler is not None]
        given = [
            BadLogits("not a number") if request_id == bad else sample
            for request_id, sample in zip(wanted, sampled, strict=True)
        ]
        self.handle(StepDone(batch.step_id, samples or tuple(given), self.now_s))

    def step_failed(self, *, retryable: bool = True) -> None:
        """The step in flight fails."""
        batch = self._take_batch()
        self.pool.poison(batch)
        self.handle(StepFailed(batch.step_id, "broken", "device", retryable, self.now_s))

    def step_hung(self) -> None:
        """The step in flight does not end in time, and goes on."""
        assert self.batch is not None, "no step is in flight"
        self.is_hung = True
        self.handle(StepHung(self.batch.step_id, "late", "step_timeout", self.now_s))

    def run(self) -> None:
        """Let everything run to its end."""
        while self.batch is not None:
            if self.is_hung:
                self.step_failed()
            else:
                self.step_done()

    def handle(self, event: Event) -> None:
        self._num_kept_before = self._num_kept()
        self.commands = self.state.handle(event)
        for command in self.commands:
            self._take(command)
        self.check()

    def _check_origins(self, batch: StepBatch) -> None:
        """In deterministic mode every row that is read was computed as in an empty engine."""
        grid = self.gears.chunk
        for row in batch.rows:
            num_prompt = len(self.requests[row.request_id].prompt)
            for position, slot in enumerate(row.past_slots.tolist()):
                start, end, role = position, position + 1, "decode"
                if position < num_prompt:
                    start = position - position % grid
                    end, role = min(start + grid, num_prompt), "prefill"
                origin = self.pool.origins[slot]
                assert (origin.role, origin.start, origin.end) == (role, start, end)

    # -- what came of it ----------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold between two events."""
        scheduler = self.state._scheduler
        in_flight = () if self.state._in_flight is None else self.state._in_flight.sequences
        admitted = {id(s): s for s in (*scheduler.running, *in_flight)}.values()
        for cache in self.caches.values():
            invariants.check(cache, [s.blocks() for s in admitted if s.cache is cache])
        unanswered = [*scheduler.running, *scheduler.waiting]
        ids = [int(s.request.request_id) for s in unanswered]
        assert sorted(ids) == [int(i) for i in self.state.request_ids()]
        assert not set(ids) & set(self.finals)
        assert (self.batch is not None) == (self.state._in_flight is not None)
        if self.batch is None:
            assert not unanswered, "idle with requests left"
            kept = {
                block for cache in self.caches.values() for k in cache.keeps for block in k.blocks
            }
            assert sum(cache.num_live for cache in self.caches.values()) == len(kept)
        self._check_counters()

    def gauges(self) -> tuple[int, int, int]:
        """Live, evictable and free blocks."""
        snapshot = self.state.snapshot()
        return (
            snapshot.num_live_blocks,
            snapshot.num_evictable_blocks,
            snapshot.num_free_blocks,
        )

    def rows(self) -> list[tuple[int, int, int]]:
        """Of the step in flight: request, past and fed tokens of each row."""
        assert self.batch is not None
        return [(int(r.request_id), r.num_past, len(r.token_ids)) for r in self.batch.rows]

    def finished(self, request_id: int) -> FinishRequest:
        final = self.finals[request_id]
        assert isinstance(final, FinishRequest), final
        return final

    def failed(self, request_id: int) -> FailRequest:
        final = self.finals[request_id]
        assert isinstance(final, FailRequest), final
        return final

    # -- inside -------------------------------------------------------------------------------

    def _arrive(self, request: NewRequest) -> RequestId:
        request_id = request.request_id
        self._next_id += 1
        self.requests[request_id] = request
        self.token_ids[request_id] = []
        self.texts[request_id] = ""
        self.handle(RequestArrived(request, self.now_s))
        return request_id

    def _ask(self, question: Event) -> Command:
        """The answer to an operator's question."""
        self.handle(question)
        return self.commands[0]

    def _take_batch(self) -> StepBatch:
        assert self.batch is not None, "no step is in flight"
        batch, self.batch, self.is_hung = self.batch, None, False
        return batch

    def _take(self, command: Command) -> None:
        if isinstance(command, RunStep):
            assert self.batch is None, "two steps in flight"
            check_batch(command.batch)
            self.batch = command.batch
            self.batches.append(command.batch)
            for row in command.batch.rows:
                self.first_past.setdefault(row.request_id, row.num_past)
        elif isinstance(command, EmitTokens):
            assert command.request_id not in self.finals, "a token after the final answer"
            self.token_ids[command.request_id] += command.token_ids
            times = self.token_times.setdefault(command.request_id, [])
            times += [self.now_s] * len(command.token_ids)
            self.texts[command.request_id] += command.text
        elif isinstance(command, FinishRequest | FailRequest):
            assert command.request_id not in self.finals, "two final answers"
            self.finals[command.request_id] = command
            self._check_final(command)

    def _check_final(self, final: Final) -> None:
        request_id = final.request_id
        if isinstance(final, FinishRequest):
            self.texts[request_id] += final.text
            usage = final.usage
            if self.state.snapshot().engine.preemptions == 0:
                assert usage.cached_tokens == self.first_past.get(request_id, usage.cached_tokens)
        elif final.code == "capacity":
            # Nothing but what is kept can take the room of a request.
            tenant = self.requests[request_id].tenant
            assert max(self._num_kept_before[tenant], self._num_kept()[tenant]) > 0

    def _num_kept(self) -> dict[TenantName, int]:
        return {tenant: len(cache.keeps) for tenant, cache in self.caches.items()}

    def _check_counters(self) -> None:
        counters = self.state.snapshot().engine
        ended = (
            counters.refused
            + counters.finished
            + counters.cancelled
            + counters.expired
            + counters.failed
            + counters.registered
        )
        assert ended == len(self.finals)
        assert counters.arrived == self._next_id - 1 == ended + len(self.state.request_ids())
        assert counters.prefill_steps + counters.decode_steps == len(self.batches)
        self._check_latencies()

    def _check_latencies(self) -> None:
        """The histograms have each first step, each token and the time between any two."""
        latencies = self.state.latencies
        tenants = latencies.tenants.values()
        assert latencies.num_tokens == sum(map(len, self.token_times.values()))
        assert sum(t.queue.histogram.num_samples for t in tenants) == len(self.first_past)
        assert sum(t.ttft.histogram.num_samples for t in tenants) == len(self.token_times)
        spans_s = sum(times[-1] - times[0] for times in self.token_times.values())
        assert math.isclose(latencies.inter_token.histogram.total, spans_s, abs_tol=1e-6)
