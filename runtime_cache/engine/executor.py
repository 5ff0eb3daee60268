"""Carries out steps on the device: inputs up, copies, run, new KV into the pool, logits down.

Not pure: this is the engine's hand. Every function here runs on the device thread. In service it
allocates nothing on the device, and waits once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from om_models.contract import GraphContract
from om_models.manifest import Gear, Manifest, OmFile
from runtime_cache.device.acl_codes import AclClass, class_of
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.kv_pool import KvPool
from runtime_cache.device.kv_reader import KvReader
from runtime_cache.device.om_model import LoadedGear, OmModel
from runtime_cache.device.teardown import Teardown
from runtime_cache.engine.batch import InputViews, StepBatch, check_batch, write_inputs
from runtime_cache.engine.device_counters import ProbeCounters, RoleCounters
from runtime_cache.engine.gears import Role
from runtime_cache.errors import (
    AclError,
    BundleError,
    DeviceLost,
    InternalError,
    StepTimeout,
)

#: How often a device is asked whether it still works before it counts as lost.
MAX_PROBES = 3
#: The copy of a few bytes that takes longer has not ended [milliseconds].
_PROBE_TIMEOUT_MS = 5_000

Logits = npt.NDArray[np.float32]
#: Told on the device thread how long what it does next may take [seconds]: `DeviceThread.promise`.
Promise = Callable[[float], None]
#: Told on the device thread which model is loaded next, and its place among all, from 1.
OnLoad = Callable[[OmFile, int], None]
Queued = TypeVar("Queued")


def _promise_nobody(may_take_s: float) -> None:
    """Nobody watches the thread."""


def _tell_nobody(om: OmFile, number: int) -> None:
    """Nobody wants to know what is being loaded."""


class _Moved(NamedTuple):
    """Token rows that one step put into the pool."""

    rows_copied: int
    rows_appended: int


@dataclass(frozen=True, slots=True)
class _Runnable:
    """One gear of one role: which model runs it, and the host arrays of its inputs."""

    model: OmModel
    gear: LoadedGear
    inputs: InputViews


class Executor:
    """The models and the KV pool of one bundle on one device.

    Attributes:
        layout: the pool, cut into blocks.
        probes: what `recover` has seen.
    """

    def __init__(
        self, device: AclDevice, layout: KvLayout, step_timeout_ms: int, promise: Promise
    ) -> None:
        """Use `Executor.open`."""
        self.layout = layout
        self.probes = ProbeCounters()
        self._device = device
        self._step_timeout_ms = step_timeout_ms
        self._promise = promise
        self._runnables: dict[tuple[Role, Gear], _Runnable] = {}
        self._counters: dict[Role, RoleCounters] = {
            "prefill": RoleCounters(),
            "decode": RoleCounters(),
        }
        self._is_in_flight = False
        self._teardown = Teardown()

    @classmethod
    def open(
        cls,
        device: AclDevice,
        manifest: Manifest,
        bundle_dir: Path,
        *,
        block_size: int,
        step_timeout_ms: int = 60_000,
        promise: Promise = _promise_nobody,
        on_load: OnLoad = _tell_nobody,
    ) -> Executor:
        """Allocates the pool and loads the bundle's models.

        The device stays the caller's, and must be closed after the executor.

        Args:
            manifest: of the bundle in `bundle_dir`, its files already verified.
            block_size: tokens per block of the pool.
            step_timeout_ms: how long one step may take on the device.
            promise: told before each wait for the device.
            on_load: told before each model.

        Raises:
            BundleError: an `.om` is not what the manifest says; nothing is left.
            ConfigError: the block size does not suit the pool; nothing is left.
            OutOfDeviceMemory: no room for pool, models or buffers; nothing is left.
            AclError: the driver refused; nothing is left.
        """
        layout = KvLayout.from_spec(manifest.kv, block_size)
        executor = cls(device, layout, step_timeout_ms, promise)
        with executor._teardown.undo_on_error():
            executor._load(manifest, bundle_dir, on_load)
        return executor

    @property
    def counters(self) -> MappingProxyType[Role, RoleCounters]:
        """Per role, counted over the executor's life; for reading."""
        return MappingProxyType(self._counters)

    @property
    def is_in_flight(self) -> bool:
        """Whether work of a step that timed out may still be running."""
        return self._is_in_flight

    def run(self, batch: StepBatch) -> Logits:
        """Runs one step and waits for it; on return its KV is in the pool.

        Returns:
            [rows with a sampler, vocab] fp32, in row order. Valid until the next run, which may
            overwrite it; [0, vocab] if no row has a sampler.

        Raises:
            InternalError: the batch fits no gear, or it copies or appends outside the blocks.
            AclError: a call or the queued work failed.
            StepTimeout: the step did not end in time, and `is_in_flight` stays true: what it uses
                is not to be used otherwise before `recover` has returned.
            DeviceLost: nothing in this process can use the device again.
                In each case every block the step was to write is suspect.
        """
        logits, moved = self._run(batch)
        self._count(batch, moved)
        return logits

    def warm_up(self, batch: StepBatch) -> Logits:
        """Runs a step that serves nobody, and is not counted: the first one of a process is slow.

        It may write to slots that nothing is cached in.

        Raises:
            AclError, StepTimeout, DeviceLost, InternalError: as `run`.
        """
        return self._run(batch)[0]

    @property
    def max_read_tokens(self) -> int:
        """How many tokens `read` takes at once."""
        return self._reader.max_tokens

    def read(self, first_slot: int, num_tokens: int) -> bytes:
        """Copies the KV of a run of slots to the host, for an operator who wants it checked.

        No step does this: in service KV never leaves device memory.

        Args:
            num_tokens: at most `max_read_tokens`.

        Returns:
            [groups, num_tokens, bytes of a token in a group], in the pool's order.

        Raises:
            InternalError: the run leaves the blocks, or is too long.
            AclError, DeviceLost: as `run`; nothing of the pool has changed.
            StepTimeout: so too; or an earlier step has not ended, and is not waited for.
        """
        self.resynchronize(timeout_ms=1)
        rows = self._run_queued(
            lambda: self._reader.queue(first_slot, num_tokens), self._step_timeout_ms
        )
        return rows.tobytes()

    def resynchronize(self, timeout_ms: int | None = None) -> None:
        """Waits for the work of a step that timed out; nothing to do in the usual case.

        That step has been reported as failed, so an error of its work is not reported again.

        Args:
            timeout_ms: how long to wait; None for as long as a step may take.

        Raises:
            StepTimeout: it still runs; `run` is not possible yet.
            DeviceLost: nothing in this process can use the device again.
        """
        if self._is_in_flight:
            self._settle(self._step_timeout_ms if timeout_ms is None else timeout_ms)

    def recover(self, timeout_ms: int) -> None:
        """After a run that failed: waits for what still runs, then asks whether the device works.

        Args:
            timeout_ms: how long to wait for what still runs.

        Raises:
            StepTimeout: something still runs, perhaps the question itself.
            DeviceLost: the device says that it is lost, or does not work when asked repeatedly.
        """
        self.resynchronize(timeout_ms)
        for _ in range(MAX_PROBES):
            self.probes.num_probes += 1
            try:
                self._probe()
            except AclError as error:
                self.probes.num_failed += 1
                if isinstance(error, DeviceLost | StepTimeout):
                    raise
                failure = error
            else:
                return
        detail = f"{MAX_PROBES} times in a row, when asked after a failed step; {failure.detail}"
        call = (failure.function, failure.acl_code, failure.acl_name)
        raise DeviceLost(*call, detail) from failure

    def close(self, timeout_ms: int | None = None) -> None:
        """Waits for work in flight, unloads the models, frees the pool. Idempotent.

        Args:
            timeout_ms: as for `resynchronize`.

        Raises:
            StepTimeout: a step still runs and uses all of it, so nothing was released and
                `is_in_flight` stays true. Only the end of the process frees it safely.
            DeviceError: the first failure, after everything was tried.
        """
        with suppress(DeviceLost):  # the releases will say so themselves
            self.resynchronize(timeout_ms)
        self._teardown.close()

    def _load(self, manifest: Manifest, bundle_dir: Path, on_load: OnLoad) -> None:
        self._pool = KvPool(self._device, self.layout)
        self._teardown.push(self._pool.close)
        self._reader = KvReader(self._device, self._pool)
        self._teardown.push(self._reader.close)
        contract = GraphContract.of(manifest)
        for number, om in enumerate(manifest.oms, 1):
            if not om.prefill and not om.decode:
                raise BundleError(f"{om.path}: the manifest lists no gears for it")
            on_load(om, number)
            model = OmModel(self._device, bundle_dir / om.path, om, contract, self._pool)
            self._teardown.push(model.close)
            self._add_gears("prefill", om.prefill, model)
            self._add_gears("decode", om.decode, model)

    def _add_gears(self, role: Role, gears: tuple[Gear, ...], model: OmModel) -> None:
        for gear in gears:
            loaded = model.gears[gear]
            inputs = InputViews(**loaded.inputs)
            self._runnables[role, gear] = _Runnable(model, loaded, inputs)

    def _runnable(self, batch: StepBatch) -> _Runnable:
        runnable = self._runnables.get((batch.role, batch.gear))
        if runnable is None:
            raise InternalError(
                f"step {batch.step_id}: the bundle has no {batch.role} {batch.gear}"
            )
        return runnable

    def _run(self, batch: StepBatch) -> tuple[Logits, _Moved]:
        check_batch(batch)
        runnable = self._runnable(batch)
        self.resynchronize()
        write_inputs(batch, runnable.inputs, self.layout.rows_per_slot)
        wanted = [index for index, row in enumerate(batch.rows) if row.sampler is not None]
        moved = self._run_queued(
            lambda: self._queue(batch, runnable, wanted), self._step_timeout_ms
        )
        return _rows(runnable.model.outputs.logits, wanted), moved

    def _run_queued(self, queue: Callable[[], Queued], timeout_ms: int) -> Queued:
        """Queues all of it, waits once."""
        self._is_in_flight = True
        try:
            queued = queue()
        except DeviceLost:
            self._is_in_flight = False
            raise
        except BaseException:
            # What was queued before still reads the staging buffers; the first error is reported,
            # unless it is not over.
            with suppress(DeviceLost):
                self._settle(timeout_ms)
            raise
        self._wait(timeout_ms)
        return queued

    def _probe(self) -> None:
        """Two questions: the driver's opinion, and whether the null block's zeros arrive."""
        self._device.check_status()
        timeout_ms = min(self._step_timeout_ms, _PROBE_TIMEOUT_MS)
        null = self._run_queued(self._reader.queue_null, timeout_ms)
        if null.any():
            detail = "the null block of the KV pool is not zero"
            raise AclError("acl.rt.memcpy_async", 0, "wrong bytes", detail)

    def _queue(self, batch: StepBatch, runnable: _Runnable, wanted: list[int]) -> _Moved:
        model = runnable.model
        model.upload(runnable.gear)
        rows_copied = self._queue_copies(batch)  # before the run, which reads them
        model.execute(runnable.gear)
        rows_appended = self._queue_appends(batch, model)
        if wanted:
            model.outputs.download_logits(wanted[-1] + 1)
        return _Moved(rows_copied, rows_appended)

    def _queue_copies(self, batch: StepBatch) -> int:
        """Queues one copy per run of copied tokens and group; returns the token rows they hold."""
        token_bytes = self.layout.group_token_bytes
        copied_bytes = 0
        for group in range(self.layout.num_groups):
            for row in batch.rows:
                for source_slot, target_slot, num_tokens in row.copies:
                    num_bytes = num_tokens * token_bytes
                    source = self._pool.run_ptr(group, source_slot, num_tokens)
                    target = self._pool.run_ptr(group, target_slot, num_tokens)
                    self._device.copy_on_device(target, source, num_bytes)
                    copied_bytes += num_bytes
        return copied_bytes // self.layout.token_bytes

    def _queue_appends(self, batch: StepBatch, model: OmModel) -> int:
        """Queues one copy per run of slots and group; returns the token rows they hold."""
        token_bytes = self.layout.group_token_bytes
        row_bytes = batch.gear.chunk * token_bytes
        copy, run_ptr = self._device.copy_on_device, self._pool.run_ptr
        for group in range(self.layout.num_groups):
            row_source = model.outputs.ptrs[f"new_kv_{group}"]
            for row in batch.rows:
                source = row_source
                for first_slot, num_tokens in row.appends:
                    num_bytes = num_tokens * token_bytes
                    copy(run_ptr(group, first_slot, num_tokens), source, num_bytes)
                    source += num_bytes
                row_source += row_bytes
        return sum([len(row.token_ids) for row in batch.rows])

    def _settle(self, timeout_ms: int) -> None:
        """Waits until nothing is queued; only a time-out or a lost device is an error here."""
        try:
            self._wait(timeout_ms)
        except (StepTimeout, DeviceLost):
            raise
        except AclError:
            return

    def _wait(self, timeout_ms: int) -> None:
        """Waits for all that is queued, and says whether it is over.

        Raises:
            StepTimeout: it may not be over.
            AclError: it failed.
        """
        self._promise(timeout_ms / 1000)
        try:
            self._device.synchronize(timeout_ms)
        except AclError as error:
            if class_of(error.acl_code) is AclClass.TIMEOUT:
                call = (error.function, error.acl_code, error.acl_name)
                raise StepTimeout(*call, error.detail) from error
            self._is_in_flight = False
            raise
        finally:
            self._promise(0.0)
        self._is_in_flight = False

    def _count(self, batch: StepBatch, moved: _Moved) -> None:
        counters = self._counters[batch.role]
        counters.num_steps += 1
        counters.rows_copied += moved.rows_copied
        counters.rows_appended += moved.rows_appended
        counters.rows_padded += batch.gear.batch * batch.gear.chunk - moved.rows_appended


def _rows(logits: Logits, wanted: list[int]) -> Logits:
    """The wanted rows: a view in the usual case, when they are the first ones."""
    if wanted == list(range(len(wanted))):
        return logits[: len(wanted)]
    return logits[wanted]
