"""What `rtcache-bench device` measures: through the driver alone, with nothing of the engine's.

Everything here runs on one thread, that of the device's context. A measurement is a list of
seconds, one a run; the first run, which warms up, is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from om_models.manifest import Gear, Manifest
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.engine.batch import BatchRow, SlotRun, StepBatch
from runtime_cache.engine.executor import Executor
from runtime_cache.engine.gears import GearTable, Role
from runtime_cache.engine.request import SamplingParams, TokenArray
from runtime_cache.engine.sampler import SamplerState
from runtime_cache.ids import RequestId, StepId

#: Fewer runs say nothing of the spread; more add nothing to it.
LEAST_RUNS, MOST_RUNS = 3, 200
#: The shortest piece that an asynchronous copy takes without a thought of alignment [bytes].
SMALLEST_COPY_BYTES = 64
#: How long one wait may take [ms].
_TIMEOUT_MS = 60_000


def repeat(work: Callable[[], None], seconds: float) -> list[float]:
    """Seconds that each run of `work` took, for about so long, after a first run to warm up."""
    work()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < LEAST_RUNS or (len(times) < MOST_RUNS and time.perf_counter() < end_s):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return times


class CopyTimes(NamedTuple):
    """Seconds of each run of a number of copies: until all were queued, and until all were done."""

    queued_s: list[float]
    done_s: list[float]


class MemoryProbe:
    """Copies and waits on a device that has nothing else to do."""

    def __init__(self, device: AclDevice, num_bytes: int) -> None:
        """Allocates that much twice on the device and once, pinned, on the host.

        Raises:
            OutOfDeviceMemory: no room; nothing was allocated.
            AclError: the driver refused; nothing is left.
        """
        self.device = device
        self.num_bytes = num_bytes
        self._base = device.malloc(2 * num_bytes)
        try:
            self._host = device.malloc_host(num_bytes)
        except BaseException:
            device.free(self._base)
            raise
        self._host.view[:] = 1

    def wait(self, seconds: float) -> list[float]:
        """How long it takes to wait for a stream that has nothing to do."""
        return repeat(self._synchronize, seconds)

    def upload(self, num_bytes: int, seconds: float) -> list[float]:
        """A copy from pinned memory to the device, and the wait for it."""
        return self._timed(
            self.device.copy_to_device, self._base, self._host.ptr, num_bytes, seconds
        )

    def download(self, num_bytes: int, seconds: float) -> list[float]:
        """A copy from the device to pinned memory, and the wait for it."""
        return self._timed(self.device.copy_to_host, self._host.ptr, self._base, num_bytes, seconds)

    def move(self, num_bytes: int, seconds: float) -> list[float]:
        """A copy from one place of the device's memory to another, and the wait for it."""
        target = self._base + self.num_bytes
        return self._timed(self.device.copy_on_device, target, self._base, num_bytes, seconds)

    def many_moves(self, count: int, row_bytes: int, seconds: float) -> CopyTimes:
        """So many copies of one row each, from and to rows in no order, and one wait for all."""
        random = np.random.RandomState(0)
        num_rows = self.num_bytes // row_bytes
        sources = self._base + random.randint(0, num_rows, count) * row_bytes
        targets = self._base + self.num_bytes + random.permutation(num_rows)[:count] * row_bytes
        pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
        queued_s: list[float] = []

        def run() -> None:
            start_s = time.perf_counter()
            for target, source in pairs:
                self.device.copy_on_device(target, source, row_bytes)
            queued_s.append(time.perf_counter() - start_s)
            self._synchronize()

        done_s = repeat(run, seconds)
        return CopyTimes(queued_s[1:], done_s)

    def close(self) -> None:
        """Frees all of it.

        Raises:
            AclError: the driver refused.
        """
        self.device.free_host(self._host)
        self.device.free(self._base)

    def _timed(
        self,
        copy: Callable[[int, int, int], None],
        target: int,
        source: int,
        num_bytes: int,
        seconds: float,
    ) -> list[float]:
        def run() -> None:
            copy(target, source, num_bytes)
            self._synchronize()

        return repeat(run, seconds)

    def _synchronize(self) -> None:
        self.device.synchronize(_TIMEOUT_MS)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a time to the first token: tokens in all, and how many of them are known."""

    num_tokens: int
    num_shared: int

    @classmethod
    def fitting(cls, max_tokens: int) -> Prompt:
        """500 known and 50 new tokens, or as many in the same proportion as a sequence may have."""
        num_tokens = min(550, max_tokens - 1)
        return cls(num_tokens, num_tokens * 10 // 11)


class StepProbe:
    """Steps of a bundle's model, each as the executor runs it: inputs up, run, KV in, logits down.

    What the pool holds does not matter to the time, and is whatever was there.
    """

    def __init__(self, executor: Executor, manifest: Manifest) -> None:
        """Takes an executor that is open; it stays the caller's."""
        self._executor = executor
        self._layout: KvLayout = executor.layout
        self._vocab_size = manifest.model.vocab_size
        self._gears = GearTable(manifest.prefill_gears, manifest.decode_gears)
        self._random = np.random.RandomState(0)
        self._sampler = SamplerState(SamplingParams(temperature=0.0), np.zeros(0, np.int32))

    @property
    def max_tokens(self) -> int:
        """The most tokens a sequence may have."""
        return min(self._gears.max_model_len, self._num_usable)

    def step(
        self, role: Role, gear: Gear, seconds: float, *, is_scattered: bool = True
    ) -> list[float]:
        """Full steps of one gear: all rows, all fed tokens, as many past slots as a sequence has.

        Args:
            is_scattered: the past lies all over the pool, in no order; else in a row.
        """
        num_past = min(gear.past, self._gears.max_model_len - gear.chunk)
        past = self._scattered(num_past) if is_scattered else self._in_a_row(num_past)
        rows = tuple(
            self._row(past, self._slots(index * gear.chunk, gear.chunk), wants_logits=True)
            for index in range(gear.batch)
        )
        batch = StepBatch(StepId(0), role, gear, rows)
        return repeat(lambda: self._run(batch), seconds)

    def first_token(self, prompt: Prompt, num_known: int, seconds: float) -> list[float]:
        """All steps of a prefill that finds so many of the prompt's tokens in the pool."""
        steps = self._prefill(prompt.num_tokens, num_known)

        def run() -> None:
            for batch in steps:
                self._run(batch)

        return repeat(run, seconds)

    def _prefill(self, num_tokens: int, num_known: int) -> list[StepBatch]:
        steps, past = [], num_known
        while past < num_tokens:
            chunk = self._gears.chunk_for(num_tokens - past, past=past)
            gear = self._gears.pick("prefill", chunk=chunk, past=past)
            row = self._row(
                self._in_a_row(past),
                self._slots(past, chunk),
                wants_logits=past + chunk == num_tokens,
            )
            steps.append(StepBatch(StepId(0), "prefill", gear, (row,)))
            past += chunk
        return steps

    def _run(self, batch: StepBatch) -> None:
        self._executor.run(batch)

    def _row(self, past: TokenArray, appended: TokenArray, *, wants_logits: bool) -> BatchRow:
        ids = self._random.randint(0, self._vocab_size, len(appended)).astype(np.int32)
        return BatchRow(
            request_id=RequestId(0),
            token_ids=ids,
            num_past=len(past),
            past_slots=past,
            appends=_runs(appended, self._layout.block_size),
            sampler=self._sampler if wants_logits else None,
        )

    @property
    def _num_usable(self) -> int:
        """Slots behind the null block."""
        return (self._layout.num_blocks - 1) * self._layout.block_size

    def _slots(self, first: int, count: int) -> TokenArray:
        """Slots in a row from the first usable one on; behind the last one it begins anew."""
        slots = (first + np.arange(count)) % self._num_usable + self._layout.block_size
        return slots.astype(np.int32)

    def _in_a_row(self, count: int) -> TokenArray:
        return self._slots(0, count)

    def _scattered(self, count: int) -> TokenArray:
        slots = self._random.randint(0, self._num_usable, count) + self._layout.block_size
        return slots.astype(np.int32)


def _runs(slots: TokenArray, block_size: int) -> tuple[SlotRun, ...]:
    """The runs of consecutive slots, cut where a block ends."""
    starts = [
        index
        for index, slot in enumerate(slots)
        if index == 0 or slot != slots[index - 1] + 1 or slot % block_size == 0
    ]
    ends = [*starts[1:], len(slots)]
    return tuple(
        SlotRun(int(slots[start]), end - start) for start, end in zip(starts, ends, strict=True)
    )
