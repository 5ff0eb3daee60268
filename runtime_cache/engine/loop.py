"""The thin shell around the engine's state machine: carries out its commands, feeds back events.

Everything here runs on one event loop; steps run on the device thread, one at a time. Decisions are
made in `engine.state` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.commands import (
    Command,
    EmitTokens,
    FailRequest,
    FinishRequest,
    ReportEvicted,
    ReportReleased,
    RunStep,
)
from runtime_cache.engine.events import (
    CancelReason,
    CancelRequested,
    ClockTicked,
    DrainStarted,
    Event,
    EvictAsked,
    PrefixReleased,
    RequestArrived,
    StepDone,
    StepFailed,
)
from runtime_cache.engine.request import NewRequest, Sampled
from runtime_cache.engine.state import EngineState
from runtime_cache.errors import DeviceError, DeviceLost, InternalError, RuntimeCacheError
from runtime_cache.ids import PrefixId, RequestId

log = structlog.get_logger(__name__)

Answer = EmitTokens | FinishRequest | FailRequest
StepRunner = Callable[[StepBatch], Awaitable[tuple[Sampled, ...]]]


class AnswerSink(Protocol):
    """Takes a request's answers, in order, the final one last; must not block or raise."""

    def __call__(self, answer: Answer) -> None: ...


class EngineLoop:
    """Runs one `EngineState`.

    Attributes:
        fatal: done, with the error, once the device is lost or the engine itself is broken: the
            process should end. Every admitted request has been answered by then.
    """

    def __init__(
        self,
        state: EngineState,
        run_step: StepRunner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        run_step: runs a batch on the device and samples; raises DeviceError.
        clock: seconds; the only clock the engine knows.
        """
        self.state = state
        self.fatal: asyncio.Future[RuntimeCacheError] = asyncio.get_running_loop().create_future()
        self._run_step = run_step
        self._sinks: dict[RequestId, AnswerSink] = {}
        self._clock = clock
        self._step_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()

    def submit(self, request: NewRequest, sink: AnswerSink) -> None:
        """Hand in a request; exactly one final answer will reach the sink, perhaps at once."""
        self._sinks[request.request_id] = sink
        self._handle(RequestArrived(request, self._clock()))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """Ask for a request's end; unknown or finished requests are ignored."""
        self._handle(CancelRequested(request_id, reason, self._clock()))

    def release_prefix(self, prefix_id: PrefixId) -> bool:
        """Give up a registered prefix; False if there is no such one."""
        reports = self._handle(PrefixReleased(prefix_id))
        return any(isinstance(r, ReportReleased) and r.is_known for r in reports)

    def evict(self, max_blocks: int | None) -> ReportEvicted:
        """Evict cached blocks, least recently used first (None: all that may go)."""
        reports = self._handle(EvictAsked(max_blocks))
        return next(r for r in reports if isinstance(r, ReportEvicted))

    async def drain(self, timeout_s: float) -> int:
        """Take no new requests, let the admitted ones end, then cancel what is left.

        Returns:
            How many requests had to be cancelled. No step is in flight on return.
        """
        self._handle(DrainStarted(self._clock()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        left = self.state.request_ids()
        for request_id in left:
            self.cancel(request_id, "shutdown")
        if self._step_task is not None:
            await self._step_task
        self._set_timer(None)
        return len(left)

    def _handle(self, event: Event) -> list[Command]:
        """Feed the event, start the next step, deliver the answers; return the reports."""
        try:
            commands = self.state.handle(event)
        except InternalError as error:
            self._break(error)
            return []
        # The device is put to work before the answers are sent, so that it does not wait for them.
        for command in commands:
            if isinstance(command, RunStep):
                self._step_task = asyncio.ensure_future(self._step(command.batch))
        reports: list[Command] = []
        for command in commands:
            if isinstance(command, EmitTokens):
                self._sinks[command.request_id](command)
            elif isinstance(command, FinishRequest | FailRequest):
                self._sinks.pop(command.request_id)(command)
            elif not isinstance(command, RunStep):
                reports.append(command)
        self._set_timer(self.state.next_deadline_s)
        if self.state.is_drained:
            self._drained.set()
        return reports

    async def _step(self, batch: StepBatch) -> None:
        event: Event
        try:
            samples = await self._run_step(batch)
            event = StepDone(batch.step_id, samples, self._clock())
        except Exception as error:
            event = self._step_failed(batch, error)
        self._step_task = None
        self._handle(event)

    def _step_failed(self, batch: StepBatch, error: Exception) -> StepFailed:
        if not isinstance(error, RuntimeCacheError):
            wrapped = InternalError(f"step {batch.step_id} failed: {error}")
            wrapped.__cause__ = error
            error = wrapped
        is_device = isinstance(error, DeviceError)
        log.error(
            "step_failed",
            step=batch.step_id,
            role=batch.role,
            error=str(error),
            exc_info=not is_device,
        )
        if isinstance(error, DeviceLost):
            self._break(error)
        return StepFailed(batch.step_id, error.message, error.code, error.retryable, self._clock())

    def _break(self, error: RuntimeCacheError) -> None:
        if not self.fatal.done():
            log.error("engine_broken", error=str(error))
            self.fatal.set_result(error)

    def _set_timer(self, deadline_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            delay_s = max(0.0, deadline_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._handle(ClockTicked(self._clock()))
