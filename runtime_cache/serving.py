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
from typing import Any, NamedTuple

import structlog

from ipc.codec import Limits
from ipc.endpoint import SocketClaim, claim_endpoint
from ipc.server import ClientRef, Role, Server
from runtime_cache.config import Config, admin_endpoint
from runtime_cache.errors import DeviceError, RuntimeCacheError
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.runtime import Runtime
from runtime_cache.service import Defaults, Service
from runtime_cache.tenants import new_intakes

logger = structlog.get_logger(__name__)


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


async def serve(config: Config) -> Ending:
    """Open, say ready, serve until a signal or a fatal error, drain, close.

    Raises:
        ConfigError, EndpointError, DeviceError: the start failed; nothing is left open.
    """
    stop = _stop_on_signals()
    claims: dict[Socket, SocketClaim | None] = {}
    try:
        # A second daemon on these sockets fails here, before it loads a model.
        for socket, endpoint in _endpoints(config).items():
            claims[socket] = claim_endpoint(endpoint)
        runtime = await Runtime.open(config)
        try:
            fatal = await _serve(runtime, claims, stop)
        finally:
            is_given_back = await _close(runtime)
    finally:
        for claim in claims.values():
            if claim is not None:
                claim.release()
    return Ending(fatal, is_given_back)


async def _close(runtime: Runtime) -> bool:
    """Whether everything was given back; a lost device does not take it."""
    try:
        await runtime.close()
    except DeviceError as error:
        logger.error("close_failed", error=str(error))
        return False
    return True


async def _serve(
    runtime: Runtime, claims: Mapping[Socket, SocketClaim | None], stop: asyncio.Event
) -> RuntimeCacheError | None:
    """From ready to drained; returns what made it end, None for a signal."""
    config, engine = runtime.config, runtime.engine
    servers: dict[Socket, Server] = {}
    service = Service(
        engine,
        new_intakes(runtime),
        DaemonFacts(runtime, servers.values()),
        Defaults(config.engine.default_max_tokens, config.engine.default_deadline_ms),
        send=lambda client, reply: servers[_socket_of(client)].send(client, reply),
    )
    async with AsyncExitStack() as stack:
        for socket, claim in claims.items():
            servers[socket] = _server(config, socket, service, claim)
            await stack.enter_async_context(servers[socket])
        _log_ready(runtime, servers)
        await _either(stop.wait(), asyncio.shield(engine.fatal))
        logger.info("draining", unfinished=engine.num_unanswered)
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
        claim=claim,
        log=lambda event, fields: logger.warning(event, **fields),
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


def _stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        logger.info("signal", name=number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _either(*waits: Coroutine[Any, Any, object] | asyncio.Future[Any]) -> None:
    """Return as soon as one is done; the others are given up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
