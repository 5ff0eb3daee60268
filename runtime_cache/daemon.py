"""`rtcached`: reads the configuration, opens everything, serves, drains, closes.

Exit codes: 0 ended cleanly, 1 the device failed at the start, 2 wrong configuration, bundle or
endpoint, 3 the engine broke in service (a bug), 4 the device was lost in service or was not given
back, 5 the device hung in service, 6 the device has too little memory for the bundle, 130 or 143
ended at once by a second SIGINT or SIGTERM. After 3, 4 and 5 a service manager should start it
again. Beside each ipc socket lies a `.lock` file;
it stays when the daemon has ended, and is no sign that one runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import structlog
import uvloop

from ipc.codec import Limits
from ipc.endpoint import SocketClaim, claim_endpoint
from ipc.errors import EndpointError
from ipc.server import ClientRef, Role, Server
from runtime_cache import __version__, log, options
from runtime_cache.config import Config, admin_endpoint
from runtime_cache.errors import (
    ConfigError,
    DeviceError,
    DeviceHung,
    OutOfDeviceMemory,
    RuntimeCacheError,
)
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.options import Loaded
from runtime_cache.runtime import Runtime
from runtime_cache.service import Defaults, Service
from runtime_cache.tenants import new_intakes

logger = structlog.get_logger(__name__)


class Socket(NamedTuple):
    """Which of the daemon's sockets."""

    role: Role
    tenant: TenantName = DEFAULT_TENANT


EXIT_OK = 0
EXIT_DEVICE = 1
EXIT_CONFIG = 2
EXIT_BROKEN = 3
EXIT_LOST = 4
EXIT_HUNG = 5
EXIT_MEMORY = 6


_EPILOG = """\
example, on the software device:
  rtcached --model-bundle ./smollm2 --device sim:0 \\
      --ipc-endpoint ipc://./rtcached.sock

SIGTERM and SIGINT drain; a second one ends the process at once.

exit codes:
  0 ended cleanly            1 the device failed at the start
  2 wrong configuration, bundle or endpoint
  3 a bug of rtcached; its log has the details: start it again
  4 the device was lost in service: start it again; if that repeats, the device
    needs a reset, or repair
  5 the device hung in service (device.hang_limit_ms): start it again
  6 the device has too little memory for the bundle
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the exit code."""
    args = _parser().parse_args(argv)
    flags = {name: text for name, text in vars(args).items() if "." in name}
    try:
        loaded = options.load(args.config, flags=flags)
        if args.check_config:
            _print_config(loaded)
            return EXIT_OK
        log.configure(loaded.config.log)
        return _end(uvloop.run(serve(loaded.config)))
    except (ConfigError, EndpointError) as error:
        print(f"rtcached: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except DeviceError as error:
        print(f"rtcached: {error}", file=sys.stderr)
        return EXIT_MEMORY if isinstance(error, OutOfDeviceMemory) else EXIT_DEVICE


def _end(code: int) -> int:
    """The exit code; behind a hung device the process ends here.

    What the driver's libraries do at the end of a process may wait for the device.
    """
    if code == EXIT_HUNG:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def serve(config: Config) -> int:
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
            code = await _serve(runtime, claims, stop)
        finally:
            is_closed = await _close(runtime)
    finally:
        for claim in claims.values():
            if claim is not None:
                claim.release()
    code = code if is_closed else code or EXIT_LOST
    logger.info("stopped", exit_code=code)
    return code


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
) -> int:
    """From ready to drained; returns the exit code."""
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
    return _code_of(engine.fatal.result()) if engine.fatal.done() else EXIT_OK


def _code_of(fatal: RuntimeCacheError) -> int:
    """The exit code for what has ended the service."""
    if isinstance(fatal, DeviceHung):
        return EXIT_HUNG
    return EXIT_LOST if isinstance(fatal, DeviceError) else EXIT_BROKEN


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcached",
        description="Prefix-cache and inference daemon for Huawei Ascend NPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rtcached {__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file; see rtcached.toml")
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="print the effective values and where each came from, then exit",
    )
    options.add_flags(parser)
    return parser


def _print_config(loaded: Loaded) -> None:
    rows = [(path, options.toml(value), origin) for path, value, origin in options.describe(loaded)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for path, value, origin in rows:
        print(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


if __name__ == "__main__":
    sys.exit(main())
