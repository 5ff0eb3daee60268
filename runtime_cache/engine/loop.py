"""The thin shell around the engine's state machine: carries out its commands, feeds back events.

Everything here runs on one event loop; steps run on the device thread, one at a time. Decisions are
made in `engine.state` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.commands import (
    Command,
    EmitTokens,
    FailRequest,
    FinishRequest,
    RunStep,
)
from runtime_cache.engine.events import (
    CancelReason,
    CancelRequested,
    ClockTicked,
    DrainEnded,
    DrainStarted,
    Event,
    Question,
    RequestArrived,
    StepDone,
    StepFailed,
    StepHung,
)
from runtime_cache.engine.operator_questions import OperatorQuestions
from runtime_cache.engine.recovery import Recovery
from runtime_cache.engine.request import BadLogits, NewRequest, Sampled
from runtime_cache.engine.state import EngineState
from runtime_cache.errors import (
    AclError,
    DeviceError,
    DeviceLost,
    InternalError,
    InvalidRequest,
    RuntimeCacheError,
    StepTimeout,
)
from runtime_cache.ids import RequestId

log = structlog.get_logger(__name__)

Answer = EmitTokens | FinishRequest | FailRequest
Samples = tuple[Sampled | BadLogits, ...]
#: The step is on its way when the call returns; its failure comes with the awaitable.
StepRunner = Callable[[StepBatch], Awaitable[Samples]]


class AnswerSink(Protocol):
    """Takes a request's answers, in order, the final one last; must not block.

    It may call the engine; the answers that come of that follow when it has returned.
    """

    def __call__(self, answer: Answer) -> None: ...


class EngineLoop(OperatorQuestions):
    """Runs one `EngineState`.

    Attributes:
        fatal: done, with the error, once the device is lost or the engine itself is broken: the
            process should end. Every request has been answered by then, with that error, and so
            are those that come later.
        recovery: what is done with the device after a step that failed.
    """

    def __init__(
        self,
        state: EngineState,
        run_step: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        recovery: Recovery | None = None,
    ) -> None:
        """Args:
        run_step: runs a batch on the device and samples; raises DeviceError.
        clock: seconds; the only clock the engine knows.
        recovery: None for a device that is well as soon as its step has failed.
        """
        self.state = state
        self.recovery = recovery or Recovery()
        self.fatal: asyncio.Future[RuntimeCacheError] = asyncio.get_running_loop().create_future()
        self._run_step = run_step
        self._clock = clock
        #: Of the requests whose final answer is not decided yet.
        self._sinks: dict[RequestId, AnswerSink] = {}
        self._outbox: deque[tuple[AnswerSink, Answer]] = deque()
        self._is_delivering = False
        self._broken: RuntimeCacheError | None = None
        self._step_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._drained = asyncio.Event()

    @property
    def condition(self) -> str:
        """How it goes, in a word of `ipc.replies.Pong.state`."""
        if self._broken is not None:
            return "lost" if isinstance(self._broken, DeviceError) else "broken"
        if self.recovery.state != "serving":
            return self.recovery.state
        return "draining" if self.state.is_draining else "serving"

    @property
    def num_unanswered(self) -> int:
        """Requests whose final answer is not decided yet."""
        return len(self._sinks)

    def submit(self, request: NewRequest, sink: AnswerSink) -> None:
        """Hand in a request; exactly one final answer will reach the sink, perhaps at once.

        Raises:
            InternalError: the id is that of an unanswered request, which goes on, or there is no
                such tenant.
        """
        if request.tenant not in self.state.tenants:
            raise InternalError(f"there is no tenant `{request.tenant}`")
        if request.request_id in self._sinks:
            raise InternalError(f"request id {request.request_id} is in use")
        self._sinks[request.request_id] = sink
        self._handle(RequestArrived(request, self._clock()))
        if self._broken is not None:
            self._fail_all(self._broken)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """Ask for a request's end; unknown or finished requests are ignored."""
        self._handle(CancelRequested(request_id, reason, self._clock()))

    def lose_device(self, error: DeviceLost) -> None:
        """The device was found lost outside of a step: as if a step had found it."""
        self._break(error)

    def start_drain(self) -> int:
        """Take no new requests until `end_drain`; how many unanswered ones go on."""
        self._handle(DrainStarted(self._clock(), is_shutdown=False))
        return self.num_unanswered

    def end_drain(self) -> None:
        """Take new requests again, or still.

        Raises:
            InvalidRequest: the daemon is ending.
        """
        if self.state.is_ending:
            raise InvalidRequest("the daemon is shutting down: it takes no new requests any more")
        self._handle(DrainEnded(self._clock()))

    async def drain(self, timeout_s: float) -> int:
        """For the end: take no new requests, let the admitted ones end, then cancel what is left.

        A step that hangs by then is given up: the device is lost.

        Returns:
            How many requests had to be cancelled. No step is in flight on return.
        """
        self._handle(DrainStarted(self._clock()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        left = list(self._sinks)
        for request_id in left:
            self.cancel(request_id, "shutdown")
        self.recovery.give_up()
        while self._step_task is not None:
            await self._step_task
        self._set_timer(None)
        return len(left)

    def _answer(self, question: Question) -> list[Command]:
        commands = self._handle(question)
        if not commands:
            raise self._broken or InternalError(f"no answer to {question}")
        return commands

    def _handle(self, event: Event) -> list[Command]:
        """Feed the event and carry out what comes of it; nothing does once the engine is broken."""
        if self._broken is not None:
            return []
        try:
            commands = self.state.handle(event)
        except Exception as error:
            self._break(error if isinstance(error, InternalError) else _internal(event, error))
            return []
        self._carry_out(commands)
        self._set_timer(self.state.next_deadline_s)
        if self.state.is_drained:
            self._drained.set()
        self._deliver()
        return commands

    def _carry_out(self, commands: list[Command]) -> None:
        # The device is put to work before the answers are sent, so that it does not wait for them.
        for command in commands:
            if isinstance(command, RunStep):
                running = self._run_step(command.batch)
                self._step_task = asyncio.ensure_future(self._step(command.batch, running))
        sinks, post = self._sinks, self._outbox.append
        for command in commands:
            if isinstance(command, EmitTokens):
                post((sinks[command.request_id], command))
            elif isinstance(command, FinishRequest | FailRequest):
                post((sinks.pop(command.request_id), command))

    def _deliver(self) -> None:
        """Send the answers in the order they were decided, also if a sink calls the engine."""
        if self._is_delivering:
            return
        self._is_delivering = True
        while self._outbox:
            sink, answer = self._outbox.popleft()
            try:
                sink(answer)
            except Exception:  # one request's trouble is not to cost the others their answers
                log.exception("sink_failed", request=answer.request_id)
        self._is_delivering = False

    async def _step(self, batch: StepBatch, running: Awaitable[Samples]) -> None:
        event: Event
        try:
            samples = await running
            self.recovery.note_done()
            event = StepDone(batch.step_id, samples, self._clock())
        except Exception as error:
            event = await self._after_failure(batch, _known(batch, error))
        self._step_task = None
        self._handle(event)

    async def _after_failure(self, batch: StepBatch, error: RuntimeCacheError) -> StepFailed:
        """The step has failed; on return nothing of it runs, and another one can, or none ever."""
        _log_failure(batch, error)
        try:
            if isinstance(error, DeviceLost):
                raise error
            if isinstance(error, StepTimeout):
                hung = StepHung(batch.step_id, error.message, error.code, self._clock())
                self._handle(hung)
            if isinstance(error, AclError):
                await self.recovery.run(error)
            else:
                self.recovery.count(error)
        except Exception as fatal:
            self._break(_known(batch, fatal))
        return StepFailed(batch.step_id, error.message, error.code, error.retryable, self._clock())

    def _break(self, error: RuntimeCacheError) -> None:
        """Nothing can go on: the state is left as it is, every request is answered."""
        if self._broken is not None:
            return
        is_device = isinstance(error, DeviceError)
        if is_device:
            self.recovery.note_lost()
        log.error("engine_broken", error=str(error), exc_info=None if is_device else error)
        self._broken = error
        self._set_timer(None)
        self._fail_all(error)
        self._drained.set()
        self.fatal.set_result(error)

    def _fail_all(self, error: RuntimeCacheError) -> None:
        message = error.message
        if isinstance(error, InternalError):
            message = "the engine is broken; the daemon's log has the details"
        for request_id, sink in self._sinks.items():
            failure = FailRequest(request_id, error.code, message, error.retryable)
            self._outbox.append((sink, failure))
        self._sinks.clear()
        self._deliver()

    def _set_timer(self, deadline_s: float | None) -> None:
        """Have the clock tick then; a timer that is right already stays."""
        if deadline_s == self._timer_s:
            return
        self._timer_s = deadline_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            delay_s = max(0.0, deadline_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_s = None
        self._handle(ClockTicked(self._clock()))


def _known(batch: StepBatch, error: Exception) -> RuntimeCacheError:
    """The error itself, or one of ours around it."""
    if isinstance(error, RuntimeCacheError):
        return error
    wrapped = InternalError(f"step {batch.step_id} failed: {error}")
    wrapped.__cause__ = error
    return wrapped


def _log_failure(batch: StepBatch, error: RuntimeCacheError) -> None:
    log.error(
        "step_hung" if isinstance(error, StepTimeout) else "step_failed",
        step=batch.step_id,
        role=batch.role,
        requests=[row.request_id for row in batch.rows],
        error=str(error),
        exc_info=None if isinstance(error, DeviceError) else error,
    )


def _internal(event: Event, error: Exception) -> InternalError:
    """A bug that the state machine did not notice itself."""
    wrapped = InternalError(f"{type(event).__name__} failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped
