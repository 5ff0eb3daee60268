"""Serves: opens runtime and sockets, says ready, waits for the end, drains, closes.

`daemon` is around it: the command line, and the exit codes that endings have. Beside each ipc
socket lies a `.lock` file; it stays when the daemon has ended, and is no sign that one runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import structlog

from ipc.auth import Curve
from ipc.codec import Limits
from ipc.endpoint import SocketClaim, claim_endpoint
from ipc.server import Role, Server
from runtime_cache import collector, log
from runtime_cache.config import Config, admin_endpoint
from runtime_cache.errors import DeviceError, InvalidConfig, RuntimeCacheError
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.log import LineLimit, SocketLog
from runtime_cache.metrics.http import MetricsServer, metrics_server
from runtime_cache.metrics.source import MetricsSource
from runtime_cache.notify import Notifier
from runtime_cache.reload import Settings
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
    name: str = ""


class Access(NamedTuple):
    """Where clients connect, and who may.

    Attributes:
        claims: the right to each socket's path; None for TCP.
        curve: of the TCP ports; None without keys.
        settings: read again on SIGHUP.
    """

    claims: Mapping[Socket, SocketClaim | None]
    curve: Curve | None
    settings: Settings


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


async def serve(settings: Settings, notifier: Notifier) -> Ending:
    """Open, say ready, serve until a signal or a fatal error, drain, close.

    Args:
        settings: read again on SIGHUP.
        notifier: of the service manager; stays open.

    Raises:
        ConfigError, EndpointError, DeviceError: the start failed; nothing is left open.
    """
    signals = _take_signals()
    config, curve = settings.config, settings.open_keys()
    claims: dict[Socket, SocketClaim | None] = {}
    try:
        # A second daemon on these sockets fails here, before it loads a model.
        for socket, endpoint in _endpoints(config).items():
            claims[socket] = claim_endpoint(endpoint, _option_of(socket))
        async with metrics_server(config.metrics.listen) as metrics:
            runtime = await Runtime.open(config, notifier.status)
            watchdog = Watchdog(notifier, runtime.thread, partial(_status, runtime))
            try:
                # Loading cannot be interrupted: a signal that came meanwhile is followed here.
                if not signals.stop.is_set():
                    await _warm_up(runtime, signals.stop)
                fatal = None
                if not signals.stop.is_set():
                    access = Access(claims, curve, settings)
                    fatal = await _serve(runtime, access, signals, notifier, watchdog, metrics)
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
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((warming, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
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
    access: Access,
    signals: Signals,
    notifier: Notifier,
    watchdog: Watchdog,
    metrics: MetricsServer | None,
) -> RuntimeCacheError | None:
    """From ready to drained; returns what made it end, None for a signal."""
    config, engine, settings = runtime.config, runtime.engine, access.settings
    servers: dict[str, Server] = {}
    limit = LineLimit()  # of all sockets together: more of them are no more lines
    facts = DaemonFacts(runtime, servers.values(), settings)
    decode = runtime.tokenizer.decode if config.log.prompts else None
    requests = RequestLog(decode, limit.allows)
    service = Service(
        engine,
        new_intakes(runtime),
        facts,
        _defaults(config),
        send=lambda client, reply: servers[client.socket].send(client, reply),
        requests=requests,
        settings=settings,
    )
    async with AsyncExitStack() as stack:
        stack.callback(limit.end)
        for socket in access.claims:
            server = _server(config, socket, service, access, SocketLog(limit))
            servers[server.name] = server
            await stack.enter_async_context(server)
        if metrics is not None:
            metrics.attach(MetricsSource(runtime, facts.figures, servers.values(), requests))
        collector.settle()
        _log_ready(runtime, servers.values())
        settings.follow(lambda: _follow(settings, service, servers.values()))
        reloading = asyncio.ensure_future(_reload_on_signal(settings, signals.reload))
        stack.callback(reloading.cancel)
        notifier.ready(_status(runtime))
        watchdog.start()
        await _either(signals.stop.wait(), asyncio.shield(engine.fatal))
        logger.info("draining", unfinished=engine.num_unanswered)
        notifier.stopping(_last_words(runtime), _stopping_s(settings.config))
        num_cancelled = await engine.drain(settings.config.ipc.drain_timeout_s)
        logger.info("drained", cancelled=num_cancelled)
        await service.close()
    return engine.fatal.result() if engine.fatal.done() else None


def _endpoints(config: Config) -> dict[Socket, str]:
    endpoints = {
        Socket("user"): config.ipc.endpoint,
        Socket("admin"): admin_endpoint(config.ipc),
    }
    if config.ipc.tcp_endpoint:
        endpoints[Socket("user", name="tcp")] = config.ipc.tcp_endpoint
    for tenant in config.tenants:
        if tenant.endpoint:
            endpoints[Socket("user", TenantName(tenant.name))] = tenant.endpoint
    return endpoints


def _option_of(socket: Socket) -> str:
    """What an operator changes to have a socket elsewhere."""
    if socket.tenant:
        return f"tenants: {socket.tenant!r}: endpoint"
    if socket.role == "admin":
        return "ipc.admin_endpoint"
    return "ipc.tcp_endpoint" if socket.name else "ipc.endpoint"


async def _reload_on_signal(settings: Settings, signalled: asyncio.Event) -> None:
    """Reload at each SIGHUP; what is wrong is in the log, and nothing has changed then."""
    while True:
        await signalled.wait()
        signalled.clear()
        try:
            settings.reload()
        except InvalidConfig:
            pass  # `reload_failed` has said it
        except Exception:  # a bug is no reason to be deaf to the next signal
            logger.exception("reload_broken")


def _follow(settings: Settings, service: Service, servers: Iterable[Server]) -> None:
    """Put what a reload has changed in force."""
    log.configure(settings.config.log)
    service.defaults = _defaults(settings.config)
    num_expelled = sum([server.expel() for server in servers])
    if num_expelled:
        logger.info("clients_expelled", num_clients=num_expelled)


def _defaults(config: Config) -> Defaults:
    return Defaults(
        config.engine.default_max_tokens,
        config.engine.default_deadline_ms,
        config.ipc.max_unsent_tokens,
    )


def _server(
    config: Config, socket: Socket, service: Service, access: Access, hook: SocketLog
) -> Server:
    return Server(
        _endpoints(config)[socket],
        service,
        role=socket.role,
        tenant=socket.tenant,
        name=socket.name,
        limits=Limits(max_message_bytes=config.ipc.max_message_bytes),
        socket_mode=0o600 if socket.role == "admin" else int(config.ipc.socket_mode, 8),
        max_queued_replies=config.ipc.max_queued_replies,
        claim=access.claims[socket],
        curve=access.curve,
        insecure_tcp=config.ipc.insecure_tcp,
        log=hook,
    )


def _log_ready(runtime: Runtime, servers: Collection[Server]) -> None:
    logger.info(
        "ready",
        model=runtime.manifest.name,
        device=runtime.config.device.device,
        soc=runtime.soc_name,
        endpoints={server.name: server.endpoint for server in servers if not server.tenant},
        tenants={server.tenant: server.endpoint for server in servers if server.tenant},
        capacity_tokens=runtime.capacity_tokens,
        max_model_len=runtime.engine.state.max_sequence_tokens_of(DEFAULT_TENANT),
    )
    for server in servers:
        if server.is_insecure:
            logger.warning("insecure_tcp", endpoint=server.endpoint, role=server.role)


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
