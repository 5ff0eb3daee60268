"""Where metrics and health are served, and what a daemon that runs says there."""

from __future__ import annotations

import http.client
import socket

from runtime_cache.config import Config
from runtime_cache.metrics.address import Address, parse_listen
from runtime_cache.metrics.snapshot import STATES
from tools.doctor.findings import Finding, ok, problem, warning

_PATIENCE_S = 5.0


def check_metrics(config: Config) -> list[Finding]:
    """One finding; none where metrics are off."""
    if not config.metrics.listen:
        return []
    address = parse_listen(config.metrics.listen)
    if address.port and _is_listening(address):
        return [_check_running(address)]
    try:
        socket.create_server((address.host, address.port), family=_family(address)).close()
    except OSError as error:
        text = f"The daemon cannot listen on metrics.listen = {address}: {error.strerror}."
        return [problem("metrics", text, "Choose an address of this host and a free port.")]
    if address.is_loopback:
        return [ok("metrics", f"Metrics and health can be served at {address}, on this host only.")]
    return [
        warning(
            "metrics",
            f"Whoever reaches {address} reads the daemon's metrics: there is no password.",
            "Take 127.0.0.1 unless Prometheus is on another host; a firewall can do the rest.",
        )
    ]


def _check_running(address: Address) -> Finding:
    """Somebody listens there: what he says."""
    lines = _health(address)
    if not lines or lines[0] not in (*STATES, "unresponsive"):
        return problem(
            "metrics",
            f"Another program listens at metrics.listen = {address}: the daemon does not start.",
            "Choose another port.",
        )
    text = f"The daemon at {address} says that it is {'; '.join(lines)}."
    return ok("metrics", text) if lines == ["serving"] else warning("metrics", text)


def _health(address: Address) -> list[str]:
    """The lines of /health; nothing if that is no such page."""
    connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().read(4096).decode("utf-8", "replace").splitlines()
    except (OSError, http.client.HTTPException):
        return []
    finally:
        connection.close()


def _is_listening(address: Address) -> bool:
    try:
        socket.create_connection(address, _PATIENCE_S).close()
    except OSError:
        return False
    return True


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
