"""Serves: opens runtime and sockets, says ready, waits for the end, drains, closes.

`daemon` is around it: the command line, and the exit codes that endings have. Beside each ipc
socket lies a `.lock` file; it stays when the daemon has ended, and is no sign that one runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import structlog

from ipc.codec import Limits
from ipc.endpoint import SocketClaim, claim_endpoint
from ipc.server import ClientRef, Role, Server
from runtime_cache.config import Config, admin_endpoint
from runtime_cache.errors import DeviceError, RuntimeCacheError
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.log import socket_event
from runtime_cache.metrics.http import MetricsServer, metrics_server
from runtime_cache.metrics.source import MetricsSource
from runtime_cache.notify import Notifier
from runtime_cache.request_log import RequestLog
from runtime_cache.runtime import Runtime
from runtime_cache.service import Defaults, Service
from runtime_cache.tenants import new_intakes
from runtime_cache.watchdog import Watchdog

logger = structlog.get_logger(__name__)

#: To unload models and give the device back [seconds].
_CLOSING_S = 60.0


class Socket(NamedTuple):
    """Which of the daemon's sockets."""

    role: Role
    tenant: TenantName = DEFAULT_TENANT


class Ending(NamedTuple):
    """How the service ended.

    Attributes:
        fatal: what made it end; None for a signal.
        is_given_back: whether the device took everything back.
    """

    fatal: RuntimeCacheError | None
    is_given_back: bool = True


class Signals(NamedTuple):
    """What the process was sent.

    Attributes:
        stop: set by SIGTERM or SIGINT; a second one ends the process at once.
        reload: set by SIGHUP; to be cleared by whoever reads the configuration again.
    """

    stop: asyncio.Event
    reload: asyncio.Event


async def serve(config: Config, notifier: Notifier) -> Ending:
    """Open, say ready, serve until a signal or a fatal error, drain, close.

    Args:
        notifier: of the service manager; stays open.

    Raises:
        ConfigError, EndpointError, DeviceError: the start failed; nothing is left open.
    """
    signals = _take_signals()
    claims: dict[Socket, SocketClaim | None] = {}
    try:
        # A second daemon on these sockets fails here, before it loads a model.
        for socket, endpoint in _endpoints(config).items():
            claims[socket] = claim_endpoint(endpoint)
        async with metrics_server(config.metrics.listen) as metrics:
            runtime = await Runtime.open(config, notifier.status)
            watchdog = Watchdog(notifier, runtime.thread, partial(_status, runtime))
            try:
                # Loading cannot be interrupted: a signal that came meanwhile is followed here.
                if not signals.stop.is_set():
                    await _warm_up(runtime, signals.stop)
                fatal = None
                if not signals.stop.is_set():
                    fatal = await _serve(runtime, claims, signals, notifier, watchdog, metrics)
            finally:
                is_given_back = await _close(runtime)
                watchdog.stop()
    finally:
        for claim in claims.values():
            if claim is not None:
                claim.release()
    return Ending(fatal, is_given_back)


async def _warm_up(runtime: Runtime, stop: asyncio.Event) -> None:
    """Run the first steps; one that hangs is given up when a signal comes."""
    warming = asyncio.ensure_future(runtime.warm_up())
    await _either(asyncio.shield(warming), stop.wait())
    if not warming.done():
        runtime.recovery.give_up()
    await warming


async def _close(runtime: Runtime) -> bool:
    """Whether everything was given back; a lost device does not take it."""
    try:
        await runtime.close()
    except DeviceError as error:
        logger.error("close_failed", error=str(error))
        return False
    return True


async def _serve(
    runtime: Runtime,
    claims: Mapping[Socket, SocketClaim | None],
    signals: Signals,
    notifier: Notifier,
    watchdog: Watchdog,
    metrics: MetricsServer | None,
) -> RuntimeCacheError | None:
    """From ready to drained; returns what made it end, None for a signal."""
    config, engine = runtime.config, runtime.engine
    servers: dict[Socket, Server] = {}
    facts = DaemonFacts(runtime, servers.values())
    requests = RequestLog(runtime.tokenizer.decode if config.log.prompts else None)
    service = Service(
        engine,
        new_intakes(runtime),
        facts,
        Defaults(
            config.engine.default_max_tokens,
            config.engine.default_deadline_ms,
            config.ipc.max_unsent_tokens,
        ),
        send=lambda client, reply: servers[_socket_of(client)].send(client, reply),
        requests=requests,
    )
    async with AsyncExitStack() as stack:
        for socket, claim in claims.items():
            servers[socket] = _server(config, socket, service, claim)
            await stack.enter_async_context(servers[socket])
        if metrics is not None:
            metrics.attach(MetricsSource(runtime, facts.figures, servers.values(), requests))
        _log_ready(runtime, servers)
        notifier.ready(_status(runtime))
        watchdog.start()
        await _either(signals.stop.wait(), asyncio.shield(engine.fatal))
        logger.info("draining", unfinished=engine.num_unanswered)
        notifier.stopping(_last_words(runtime), _stopping_s(config))
        num_cancelled = await engine.drain(config.ipc.drain_timeout_s)
        logger.info("drained", cancelled=num_cancelled)
        await service.close()
    return engine.fatal.result() if engine.fatal.done() else None


def _endpoints(config: Config) -> dict[Socket, str]:
    endpoints = {
        Socket("user"): config.ipc.endpoint,
        Socket("admin"): admin_endpoint(config.ipc),
    }
    for tenant in config.tenants:
        endpoints[Socket("user", TenantName(tenant.name))] = tenant.endpoint
    return endpoints


def _socket_of(client: ClientRef) -> Socket:
    return Socket(client.role, TenantName(client.tenant))


def _server(config: Config, socket: Socket, service: Service, claim: SocketClaim | None) -> Server:
    return Server(
        _endpoints(config)[socket],
        service,
        role=socket.role,
        tenant=socket.tenant,
        limits=Limits(max_message_bytes=config.ipc.max_message_bytes),
        socket_mode=0o600 if socket.role == "admin" else int(config.ipc.socket_mode, 8),
        max_queued_replies=config.ipc.max_queued_replies,
        claim=claim,
        log=socket_event,
    )


def _log_ready(runtime: Runtime, servers: Mapping[Socket, Server]) -> None:
    logger.info(
        "ready",
        model=runtime.manifest.name,
        device=runtime.config.device.device,
        soc=runtime.soc_name,
        endpoints={s.role: server.endpoint for s, server in servers.items() if not s.tenant},
        tenants={s.tenant: server.endpoint for s, server in servers.items() if s.tenant},
        capacity_tokens=runtime.capacity_tokens,
        max_model_len=runtime.engine.state.max_sequence_tokens_of(DEFAULT_TENANT),
    )


def _take_signals() -> Signals:
    """From here on signals set events, SIGHUP included, which would end the process otherwise."""
    signals = Signals(asyncio.Event(), asyncio.Event())
    loop = asyncio.get_running_loop()

    def on_stop(number: signal.Signals) -> None:
        if signals.stop.is_set():
            os._exit(128 + number)
        signals.stop.set()
        logger.info("signal", name=number.name)

    def on_reload() -> None:
        signals.reload.set()
        logger.info("signal", name=signal.SIGHUP.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop, number)
    loop.add_signal_handler(signal.SIGHUP, on_reload)
    return signals


def _status(runtime: Runtime) -> str:
    """For the service manager, and people who ask it."""
    engine, config = runtime.engine, runtime.config
    what = f"{runtime.manifest.name} on {config.device.device} at {config.ipc.endpoint}"
    return f"{engine.condition.capitalize()}: {what}, {engine.num_unanswered} requests unanswered"


def _last_words(runtime: Runtime) -> str:
    fatal = runtime.engine.fatal
    if fatal.done():
        return f"Giving up: {fatal.result()}"
    return f"Draining: {runtime.engine.num_unanswered} requests unanswered"


def _stopping_s(config: Config) -> float:
    """The longest that draining and closing may take, a step that hangs included [seconds]."""
    return config.ipc.drain_timeout_s + 2 * config.device.step_timeout_ms / 1000 + _CLOSING_S


async def _either(*waits: Coroutine[Any, Any, object] | asyncio.Future[Any]) -> None:
    """Return as soon as one is done; the others are given up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
