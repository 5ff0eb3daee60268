"""Everything below the service, opened and closed as one: bundle, device, executor, engine.

The daemon and the benchmarks stand on this.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import cached_property

import structlog

from om_models import memory_plan
from om_models.bundle import Bundle
from om_models.chat import ChatTemplateError
from om_models.manifest import Manifest
from runtime_cache import shortage
from runtime_cache.cache.hashing import root_digest
from runtime_cache.cache.manager import CacheManager
from runtime_cache.config import CacheConfig, Config, parse_bytes
from runtime_cache.device.acl_device import AclDevice, MemoryInfo
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.select import load_acl
from runtime_cache.device.thread import DeviceThread
from runtime_cache.device_memory import MemoryWatch, memory_or_none, taken_bytes
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.executor import Executor
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.limits import EngineLimits
from runtime_cache.engine.loop import EngineLoop, Samples
from runtime_cache.engine.recovery import Recovery
from runtime_cache.engine.request import BadLogits
from runtime_cache.engine.sampler import sample_rows
from runtime_cache.engine.state import EngineState
from runtime_cache.engine.warm_up import warm_up_batches
from runtime_cache.errors import (
    AclError,
    ConfigError,
    DeviceError,
    DeviceLost,
    InternalError,
    OutOfDeviceMemory,
)
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.salts import load_salts, state_directory
from runtime_cache.served_bundle import read_bundle, read_texts
from runtime_cache.shares import policy_for, share_out
from runtime_cache.start_stages import StartStages, Tell, tell_nobody

log = structlog.get_logger(__name__)

_MIB = 1024**2


class Runtime:
    """An opened bundle on an opened device, with its engine.

    Attributes:
        bundle: what is served.
        tokenizer: of the bundle.
        chat_template: of the bundle, or None.
        gears: compiled shapes that are used; in deterministic mode one a role.
        soc_name: of the device.
        executor: used on the device thread only; its counters may be read anywhere.
        caches: the prefix cache of each tenant, the default tenant first; changed by the engine
            only.
        engine: the running engine.
        recovery: how the device is after steps that failed.
        memory: free device memory, as last seen.
        thread: the device's; to be watched.
    """

    def __init__(self, config: Config, bundle: Bundle, stages: StartStages) -> None:
        """Use `Runtime.open`."""
        manifest = bundle.manifest
        self.config = config
        self.bundle = bundle
        self.tokenizer, self.chat_template = read_texts(bundle)
        self.gears = _gears(config, manifest)
        self.soc_name = ""
        self.executor: Executor
        self.caches: Mapping[TenantName, CacheManager] = {}
        self.engine: EngineLoop
        timeout_ms = config.device.step_timeout_ms
        hang_limit_ms = config.device.hang_limit_ms or 3 * timeout_ms
        self.recovery = Recovery(self._recover, hang_limit_ms=hang_limit_ms - timeout_ms)
        self.memory = MemoryWatch(self._read_memory, int(config.device.low_memory_mb * _MIB))
        self._watching: asyncio.Task[None] | None = None
        self._template_start: asyncio.Task[None] | None = None
        self._device: AclDevice | None = None
        self._is_closed = False
        self._stages = stages
        self.thread = DeviceThread()

    @classmethod
    async def open(cls, config: Config, tell: Tell = tell_nobody) -> Runtime:
        """Verify the bundle, open the device, load the models.

        Args:
            tell: told, on any thread, before each part that may take long.

        Raises:
            ConfigError: configuration or bundle; nothing is left open.
            DeviceError: the device or its driver; nothing is left open.
        """
        stages = StartStages(tell)
        bundle = await asyncio.to_thread(read_bundle, config, stages)
        runtime = cls(config, bundle, stages)
        try:
            await runtime.thread.run(runtime._open_device)
            runtime._make_engine()
            await runtime.memory.look()
            watching = runtime.memory.run(config.device.memory_check_s)
            runtime._watching = asyncio.ensure_future(watching)
        except BaseException:
            with suppress(DeviceError):  # the first failure is the cause
                await runtime.close()
            raise
        return runtime

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def layout(self) -> KvLayout:
        return self.executor.layout

    @property
    def cache(self) -> CacheManager:
        """The default tenant's."""
        return self.caches[DEFAULT_TENANT]

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV the pool has room for, all tenants together."""
        return sum(cache.num_usable for cache in self.caches.values()) * self.layout.block_size

    @cached_property
    def planned_bytes(self) -> int:
        """What loading the bundle was reckoned to take; its work memory is an estimate."""
        plan = memory_plan.plan_memory(self.manifest, self.manifest.model)
        return plan.needed_bytes - plan.system_bytes

    async def close(self) -> None:
        """Unload, free and finalise. To be called when no step is in flight. Idempotent.

        Raises:
            StepTimeout: a step that timed out still runs, so nothing was released.
            DeviceError: the first failure, after everything was tried.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self.thread.run(self._close_device)
        finally:
            await self.thread.close()
            await self._close_template()

    async def warm_up(self) -> None:
        """Run a step of each role that serves nobody. To be called before anything is asked.

        No counter shows it, and no cache knows of what it wrote.

        Raises:
            DeviceHung: a step did not end.
            DeviceError: a step failed twice, or the device is lost. The runtime is to be closed.
        """
        batches = tuple(warm_up_batches(self.gears, self.layout.block_size))
        self._stages.warming_up(len(batches), self.config.device.step_timeout_ms)
        begun_s = time.monotonic()
        for batch in batches:
            try:
                await self.thread.run(self._warm_up, batch)
            except AclError as error:
                log.warning("warm_up_failed", role=batch.role, error=str(error))
                await self.recovery.run(error)
                await self.thread.run(self._warm_up, batch)
        # Beside all else: what needs no template is served meanwhile.
        self._template_start = asyncio.ensure_future(self._start_template())
        log.info("warmed_up", took_ms=round(1000 * (time.monotonic() - begun_s), 1))

    async def _start_template(self) -> None:
        """A template that cannot be compiled is no reason not to serve what needs none."""
        if self.chat_template is not None:
            try:
                await asyncio.to_thread(self.chat_template.start)
            except ChatTemplateError as error:
                if not self._is_closed:
                    log.warning("template_failed", error=str(error))

    async def _close_template(self) -> None:
        if self.chat_template is not None:
            self.chat_template.close()
        if self._template_start is not None:
            await self._template_start

    def run_step(self, batch: StepBatch) -> Awaitable[Samples]:
        """Run a batch on the device thread and sample there, off the event loop.

        The batch is on its way when this returns.
        """
        return self.thread.start(self._run_and_sample, batch)

    def read_kv(self, first_slot: int, num_tokens: int) -> Awaitable[bytes]:
        """Copy KV to the host, behind a step in flight and before any later one: `Executor.read`.

        The read is on its way when this returns.
        """
        return self.thread.start(self.executor.read, first_slot, num_tokens)

    async def _recover(self, timeout_ms: int) -> None:
        await self.thread.run(self.executor.recover, timeout_ms)

    def _run_and_sample(self, batch: StepBatch) -> Samples:
        logits = self.executor.run(batch)
        states = [row.sampler for row in batch.rows if row.sampler is not None]
        return sample_rows(logits, states)

    def _warm_up(self, batch: StepBatch) -> None:
        states = [row.sampler for row in batch.rows if row.sampler is not None]
        for sampled in sample_rows(self.executor.warm_up(batch), states):
            if isinstance(sampled, BadLogits):
                log.warning("warm_up_bad_logits", role=batch.role, error=sampled.message)

    def _open_device(self) -> None:
        config = self.config
        self._stages.opening(config.device.device)
        acl, device_id = load_acl(config.device.device, _sim_options(config, self.manifest))
        log.info("device_opening", device=config.device.device)
        device = AclDevice.open(acl, device_id)
        try:
            self.soc_name = device.soc_name
            log.info("models_loading", soc=self.soc_name, oms=[om.path for om in self.manifest.oms])
            before = memory_or_none(device)
            self.executor = Executor.open(
                device,
                self.manifest,
                self.bundle.path,
                block_size=config.cache.block_size,
                step_timeout_ms=config.device.step_timeout_ms,
                promise=self.thread.promise,
                on_load=lambda om, number: self._stages.loading(self.manifest, om, number),
            )
            self.memory.loaded_bytes = taken_bytes(before, memory_or_none(device))
            log.info(
                "models_loaded",
                taken_bytes=self.memory.loaded_bytes,
                planned_bytes=self.planned_bytes,
            )
        except OutOfDeviceMemory as error:
            explained = shortage.explain(self.manifest, device, error)
            with suppress(DeviceError):  # the first failure is the cause
                device.close()
            raise explained from error
        except BaseException:
            with suppress(DeviceError):
                device.close()
            raise
        self._device = device

    def _close_device(self) -> None:
        if self._device is None:
            return
        try:
            self.executor.close(timeout_ms=1 if self.recovery.is_given_up else None)
        finally:
            # Destroying a stream waits for its work, and holds the interpreter while it does.
            if not self.executor.is_in_flight:
                self._device.close()

    async def _read_memory(self) -> MemoryInfo | None:
        """Ask the driver on the device thread: behind a step in flight, never within one.

        The thread has no second step to do meanwhile, since that comes of the first one's results.
        """
        if self._device is None:
            raise InternalError("the device is not open")
        try:
            return await self.thread.run(self._device.memory_info)
        except DeviceLost:
            await self._confirm_loss()
            raise

    async def _confirm_loss(self) -> None:
        """An idle device seems lost: if it does not work when asked, nobody need wait for it."""
        try:
            await self._recover(1)
        except DeviceLost as error:
            self.engine.lose_device(error)

    def _make_engine(self) -> None:
        config = self.config
        self.caches = self._make_caches()
        state = EngineState(
            self.caches,
            self.gears,
            EngineLimits(
                max_waiting=config.engine.max_waiting,
                interleave_chunk_tokens=config.engine.interleave_chunk_tokens,
                max_running=config.engine.max_running,
                max_overtakes=config.engine.max_overtakes,
                is_deterministic=config.cache.deterministic,
                on_failed_step=config.engine.on_failed_step,
            ),
        )
        self.engine = EngineLoop(state, self.run_step, recovery=self.recovery)

    def _make_caches(self) -> Mapping[TenantName, CacheManager]:
        config, layout = self.config.cache, self.layout
        num_blocks = _num_blocks(config, layout)
        return {
            share.tenant: CacheManager(
                blocks=share.blocks,
                block_size=layout.block_size,
                root=root_digest(
                    bundle_digest=bytes.fromhex(self.manifest.digest),
                    block_size=layout.block_size,
                    tenant_salt=share.salt,
                ),
                policy=policy_for(
                    config,
                    num_blocks=len(share.blocks),
                    num_pool_blocks=num_blocks - 1,
                    block_bytes=layout.block_bytes,
                    chunk=self.gears.chunk,
                ),
            )
            for share in share_out(self.config.tenants, num_blocks, self._salts())
        }

    def _salts(self) -> Mapping[TenantName, bytes]:
        """Of all tenants; a state directory that cannot be used is no reason not to serve."""
        directory = state_directory(self.config.daemon.state_dir, os.environ)
        names = [TenantName(tenant.name) for tenant in self.config.tenants]
        salts = load_salts(directory, names)
        for fault in salts.faults:
            log.warning("salt_not_kept", fault=fault)
        return salts.by_tenant


def _gears(config: Config, manifest: Manifest) -> GearTable:
    gears = GearTable(manifest.prefill_gears, manifest.decode_gears)
    if not config.cache.deterministic:
        return gears
    return gears.fixed(min_chunk=config.cache.block_size)


def _sim_options(config: Config, manifest: Manifest) -> Mapping[str, int | str | bool]:
    """Settings of the software device; none for a card."""
    if not config.device.device.startswith("sim:"):
        return {}
    sim = config.sim
    memory = {"memory_bytes": parse_bytes(sim.memory)} if sim.memory else {}
    return {"soc_name": sim.soc or manifest.soc_version, "threads": sim.threads or 0, **memory}


def _num_blocks(cache: CacheConfig, layout: KvLayout) -> int:
    """Blocks in use, the null block included: what was compiled in, or the operator's cap."""
    if cache.cache_capacity is None:
        return layout.num_blocks
    most_gb = (layout.num_blocks + 2) * layout.block_bytes / 10**9
    num_blocks = int(min(cache.cache_capacity, most_gb) * 10**9) // layout.block_bytes
    if num_blocks > layout.num_blocks:
        log.warning(
            "cache_capacity_capped",
            asked_gb=cache.cache_capacity,
            compiled_gb=round(layout.num_blocks * layout.block_bytes / 10**9, 3),
        )
        return layout.num_blocks
    if num_blocks < 2:
        raise ConfigError(
            f"cache.cache_capacity = {cache.cache_capacity} GB is too small: one block of "
            f"{layout.block_size} tokens takes {layout.block_bytes / _MIB:.2f} MiB, and two are "
            f"the least"
        )
    return num_blocks
