"""Between the wire and the engine: the one place that knows both.

Takes client messages, hands requests to the engine, and turns the engine's answers into replies.
Every request gets exactly one final reply, unless its client is gone. One event loop; long texts
are tokenised on a worker thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import structlog

from ipc import messages as wire
from ipc.server import ClientRef
from runtime_cache import replies
from runtime_cache.admin import AdminDesk, AdminEngine, AdminFacts
from runtime_cache.chores import Chores
from runtime_cache.engine.commands import (
    EmitTokens,
    FailRequest,
    FinishRequest,
    ReportExplained,
    end_of,
)
from runtime_cache.engine.events import CancelReason
from runtime_cache.engine.loop import Answer
from runtime_cache.engine.questions import elsewhere
from runtime_cache.engine.request import NewRequest, TokenArray
from runtime_cache.errors import (
    InternalError,
    InvalidRequest,
    RuntimeCacheError,
    UnknownPrefix,
)
from runtime_cache.ids import PrefixId, RequestId, TenantName
from runtime_cache.intake import Intake, Prompt
from runtime_cache.keys import Keyring
from runtime_cache.leases import Leases
from runtime_cache.making import Defaults as Defaults
from runtime_cache.making import RequestMaker
from runtime_cache.quota import Quotas
from runtime_cache.reading import Reader
from runtime_cache.reload import Settings
from runtime_cache.request_log import RequestLog
from runtime_cache.unfinished import Unfinished
from runtime_cache.verifying import KvSource, Verifier, VerifyEngine
from runtime_cache.work import Started, Work

log = structlog.get_logger(__name__)

#: Longer texts are tokenised off the event loop; shorter ones cost less than the hop.
_INLINE_CHARS = 4096


class Engine(AdminEngine, VerifyEngine, Protocol):
    """What the service needs of `engine.loop.EngineLoop`."""

    def submit(self, request: NewRequest, sink: Callable[[Answer], None]) -> None: ...
    def cancel(self, request_id: RequestId, reason: CancelReason) -> None: ...
    def release_prefix(self, prefix_id: PrefixId, tenant: TenantName) -> bool: ...
    def explain(self, tenant: TenantName, tokens: TokenArray) -> ReportExplained: ...


class Facts(AdminFacts, KvSource, Protocol):
    """What the daemon can tell of itself; asked for by `info`, `list` and `stats`."""

    @property
    def digest(self) -> str: ...
    @property
    def is_caching(self) -> bool: ...
    @property
    def incarnation(self) -> str: ...
    def info(self, message_id: wire.MessageId, tenant: TenantName) -> wire.Info: ...
    def pong(self, message_id: wire.MessageId) -> wire.Pong: ...


class Service:
    """Handler of the servers' messages."""

    def __init__(
        self,
        engine: Engine,
        intakes: Mapping[TenantName, Intake],
        facts: Facts,
        defaults: Defaults,
        send: Callable[[ClientRef, wire.AnyReply], object],
        clock: Callable[[], float] = time.monotonic,
        requests: RequestLog | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Args:
        intakes: one for each tenant that a server has, and for the default tenant.
        send: sends a reply at once; may call back `on_client_gone`, `on_slow_reader`.
        clock: the engine's clock.
        requests: hears how each one ended; None for one of its own.
        settings: read again when an administrator asks for it; None: there is nothing to read.
        """
        self._engine = engine
        self._intakes = intakes
        self._facts = facts
        self._making = RequestMaker(intakes, facts.digest, defaults)
        self._settings = settings
        self._quotas = Quotas(Keyring().quota) if settings is None else settings.quotas
        self._send = send
        self._clock = clock
        self._requests = RequestLog() if requests is None else requests
        self._leases = Leases(self._on_lease_expired, clock)
        self._admin = AdminDesk(engine, facts, intakes.keys(), clock)
        self._chores = Chores(
            self._admin, Verifier(engine, facts, clock), self._end_well, self._fail
        )
        self._reader = Reader(self._go_on, self._fail)
        self._unfinished = Unfinished()
        self._next_id = 1
        self._is_closed = False

    @property
    def num_unfinished(self) -> int:
        """Requests without a final reply, those of vanished clients included."""
        return len(self._unfinished)

    @property
    def defaults(self) -> Defaults:
        """What a request gets that says nothing of its own; may be replaced at any time."""
        return self._making.defaults

    @defaults.setter
    def defaults(self, defaults: Defaults) -> None:
        self._making.defaults = defaults

    @property
    def num_sessions(self) -> int:
        """Clients that have a lease."""
        return len(self._leases)

    # --- what the servers call -----------------------------------------------------------------

    def on_message(self, client: ClientRef, message: wire.AnyRequest) -> None:
        """Take one message; it is answered now or later, by exactly one final reply.

        Only `credit` is not answered.
        """
        self._leases.renew(client)
        try:
            reply = self._dispatch(client, message)
        except RuntimeCacheError as error:
            reply = replies.refusal(message.id, error)
        if reply is not None:
            self._requests.answered(client, message, reply)
            self._send(client, reply)

    def on_client_gone(self, client: ClientRef) -> None:
        """The client is there no more: end its requests, send nothing."""
        self._leases.end(client)
        for work in self._unfinished.of(client):
            work.is_mute = True
        self._end_all(client, "client_gone")

    def on_slow_reader(self, client: ClientRef) -> None:
        """The client does not read: end its requests; their last replies are kept for it."""
        self._end_all(client, "slow_reader")

    def _on_lease_expired(self, client: ClientRef) -> None:
        log.info("lease_expired", num_cancelled=self._end_all(client, "lease_expired"))

    async def close(self) -> None:
        """Refuse what is still being tokenised and what comes from now on; stop the worker thread.

        To be called when the engine has drained and the servers can still send. Idempotent.
        """
        self._is_closed = True
        self._leases.stop()
        for work in self._unfinished.all():
            if work.request_id is None:
                self._finish(work, replies.refusal(work.message.id, replies.draining()))
        await self._reader.close()

    # --- one message ---------------------------------------------------------------------------

    def _dispatch(self, client: ClientRef, message: wire.AnyRequest) -> wire.AnyReply | None:
        """The reply if it is known at once; None if it comes later."""
        if isinstance(message, Started):
            self._accept(client, message)
            return None
        match message:
            case wire.Cancel():
                self._cancel(client, message.target)
                return wire.Ok(id=message.id)
            case wire.Credit():
                self._grant(client, message)
                return None
            case wire.OpenSession():
                self._leases.open(client, message.lease_ms)
                incarnation = self._facts.incarnation
                return wire.Opened(message.id, lease_ms=message.lease_ms, incarnation=incarnation)
            case wire.CloseSession():
                self._leases.end(client)
                num_cancelled = self._end_all(client, "client")
                return wire.SessionClosed(message.id, num_cancelled=num_cancelled)
            case wire.Release():
                return self._release(client, message)
            case wire.Ping():
                return self._facts.pong(message.id)
            case wire.GetInfo():
                return self._facts.info(message.id, TenantName(client.tenant))
            case wire.Reload():
                return self._settings_in_force(message).reloaded(message.id)
            case wire.GetConfig():
                return self._settings_in_force(message).configured(message.id)
            case _:
                return self._admin.answer(message)

    def _accept(self, client: ClientRef, message: Started) -> None:
        if self._is_closed:
            raise replies.draining()
        if isinstance(message, wire.Register) and not self._facts.is_caching:
            raise InvalidRequest("the prefix cache is off (cache.enable), so nothing can be kept")
        if isinstance(message, wire.Explain):
            self._admin.tenant(message.tenant)
        if isinstance(message, wire.Verify | wire.Evict):
            self._admin.one_or_all(message.tenant)
        self._unfinished.check_new(client, message.id)
        work = Work(client, message, self._clock())
        if client.key:
            self._quotas.take(client.key, work.arrived_s)
        self._unfinished.add(work)
        try:
            if isinstance(message, wire.Verify | wire.Evict):
                self._chores.start(work, message)
            else:
                self._read(work)
        except Exception as error:
            self._fail(work, error)

    def _read(self, work: Work) -> None:
        """Tokenise the prompt and start the request: now, or when the worker thread has read it."""
        intake = self._intakes[work.tenant]
        message = work.prompted
        if work.num_chars <= _INLINE_CHARS and not intake.may_wait(message):
            self._start(work, intake.read(message))
            return
        self._reader.start(work, intake)
        if (deadline_s := self._making.deadline_s(work)) is not None:
            delay_s = max(0.0, deadline_s - self._clock())
            work.expiry = asyncio.get_running_loop().call_later(delay_s, self._expire, work)

    def _go_on(self, work: Work, prompt: Prompt) -> None:
        """The worker thread has read the prompt; the request may have ended meanwhile."""
        if self._is_unfinished(work):
            self._start(work, prompt)

    def _expire(self, work: Work) -> None:
        self._finish(work, self._never_started(work, "deadline"))

    def _start(self, work: Work, prompt: Prompt) -> None:
        """Hand the request to the engine, or answer it if only its tokens matter."""
        message = work.message
        self._spend(work, len(prompt.tokens))
        assert not isinstance(message, wire.Verify | wire.Evict)  # they have no prompt
        if isinstance(message, wire.Tokenize):
            ids = tuple(prompt.tokens.tolist())
            self._finish(work, wire.Tokenized(id=message.id, token_ids=ids))
            return
        if isinstance(message, wire.Explain):
            report = self._engine.explain(work.tenant, prompt.tokens)
            self._finish(work, replies.explained(message.id, report))
            return
        if work.expiry is not None:
            work.expiry.cancel()  # from here on the engine looks at the deadline
        work.prompt = prompt
        request = self._making.request(RequestId(self._next_id), work, message, prompt.tokens)
        self._next_id += 1
        work.request_id = request.request_id
        self._engine.submit(request, partial(self._on_answer, work))

    def _spend(self, work: Work, num_tokens: int) -> None:
        """Count tokens against the quota of the client's key, if it has one."""
        if work.client.key:
            self._quotas.spend(work.client.key, num_tokens, self._clock())

    def _settings_in_force(self, message: wire.Reload | wire.GetConfig) -> Settings:
        if self._settings is None:
            raise InvalidRequest(f"`{wire.type_name(message)}` is not served here")
        return self._settings

    def _cancel(self, client: ClientRef, target: str) -> None:
        work = self._unfinished.find(client, target)
        if work is not None:
            self._end(work, "client")

    def _grant(self, client: ClientRef, message: wire.Credit) -> None:
        work = self._unfinished.find(client, message.target)
        piece = None if work is None else work.outflow.grant(message.credit)
        if piece is not None:
            self._send(client, piece)

    def _release(self, client: ClientRef, message: wire.Release) -> wire.Released:
        prefix_id, tenant = PrefixId(message.prefix_id), TenantName(client.tenant)
        if message.tenant is not None:
            tenant = self._admin.tenant(message.tenant)
        self._intakes[tenant].prefixes.pop(prefix_id, None)
        if not self._engine.release_prefix(prefix_id, tenant):
            raise UnknownPrefix(self._not_registered(client, prefix_id, tenant))
        return wire.Released(id=message.id, prefix_id=message.prefix_id)

    def _not_registered(self, client: ClientRef, prefix_id: PrefixId, tenant: TenantName) -> str:
        """Only operators hear of other tenants."""
        sentence = f"no prefix `{prefix_id}` is registered"
        if client.role != "admin":
            return sentence
        return sentence + elsewhere(
            name
            for name, intake in self._intakes.items()
            if name != tenant and any(known.startswith(prefix_id) for known in intake.prefixes)
        )

    # --- ends ----------------------------------------------------------------------------------

    def _end_all(self, client: ClientRef, reason: CancelReason) -> int:
        """Cancel all of a client; how many there were."""
        works = self._unfinished.of(client)
        for work in works:
            self._end(work, reason)
        return len(works)

    def _end(self, work: Work, reason: CancelReason) -> None:
        """Cancel; the engine, or this call itself, sends the final reply."""
        if work.request_id is not None:
            self._engine.cancel(work.request_id, reason)
        else:
            self._finish(work, self._never_started(work, end_of(reason)))

    def _never_started(self, work: Work, reason: wire.FinishReason) -> wire.AnyReply:
        return replies.never_started(work.message, reason, self._clock() - work.arrived_s)

    def _fail(self, work: Work, error: Exception) -> None:
        """The request cannot be started."""
        if not isinstance(error, RuntimeCacheError):
            log.error(
                "request_failed",
                tenant=work.tenant,
                request=work.request_id,
                message_id=work.message.id,
                kind=wire.type_name(work.message),
                exc_info=error,
            )
            error = InternalError("the daemon failed on this request; its log has the details")
        if self._is_unfinished(work):
            self._finish(work, replies.refusal(work.message.id, error))

    def _finish(self, work: Work, reply: wire.AnyReply) -> None:
        """Send the final reply of a request and forget it."""
        self._unfinished.remove(work)
        if work.client.key:
            self._quotas.give_back(work.client.key)
        work.stop()
        self._reader.give_up(work)
        if not work.is_mute:
            self._send(work.client, reply)
        self._requests.done(work, reply, self._clock())

    def _end_well(self, work: Work, reply: wire.AnyReply) -> None:
        """The final reply of what runs beside the loop; it may have ended meanwhile."""
        if self._is_unfinished(work):
            self._finish(work, reply)

    def _is_unfinished(self, work: Work) -> bool:
        return self._unfinished.find(work.client, work.message.id) is work

    # --- what the engine answers ---------------------------------------------------------------

    def _on_answer(self, work: Work, answer: Answer) -> None:
        match answer:
            case EmitTokens():
                self._spend(work, len(answer.token_ids))
                self._on_tokens(work, answer)
            case FinishRequest():
                self._finish(work, self._final(work, answer))
                self._remember(work)
            case FailRequest():
                self._finish(work, replies.failed(work.message.id, answer))

    def _on_tokens(self, work: Work, answer: EmitTokens) -> None:
        logprobs = tuple(map(replies.logprobs, answer.logprobs))
        piece = work.outflow.take(answer.text, answer.token_ids, logprobs)
        if piece is not None and not work.is_mute:
            self._send(work.client, piece)
        elif work.is_streamed and work.outflow.num_held > self.defaults.max_unsent_tokens:
            self._end(work, "slow_reader")

    def _final(self, work: Work, answer: FinishRequest) -> wire.AnyReply:
        if isinstance(work.message, wire.Register):
            return self._registered(work, answer)
        return replies.done(work.message.id, work.outflow, answer)

    def _registered(self, work: Work, answer: FinishRequest) -> wire.AnyReply:
        if answer.prefix_id is None or work.prompt is None:
            return replies.cancelled(work.message.id)
        self._intakes[work.tenant].prefixes[answer.prefix_id] = work.prompt.tokens
        return wire.Registered(
            id=work.message.id,
            prefix_id=wire.PrefixName(answer.prefix_id),
            num_tokens=answer.usage.prompt_tokens,
            cached_tokens=answer.usage.cached_tokens,
            num_bytes=answer.num_kept_blocks * self._facts.bytes_per_block,
        )

    def _remember(self, work: Work) -> None:
        """Keep the ids behind the answer's text, for a prompt that goes on from it."""
        if isinstance(work.message, wire.AnswerRequest) and work.prompt is not None:
            self._intakes[work.tenant].remember(work.prompt, work.token_ids)
