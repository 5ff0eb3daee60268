"""What is wrong with a configuration though each of its values is right. Pure."""

from __future__ import annotations

import math
from collections import Counter

from runtime_cache.config import Config, admin_endpoint, endpoints_of, parse_bytes
from runtime_cache.errors import ConfigError
from runtime_cache.metrics.address import parse_listen


def conflicts(config: Config) -> list[str]:
    """Faults that only several fields together, or a value's own grammar, can show."""
    faults = _tcp_conflicts(config)
    try:
        if config.sim.memory:
            parse_bytes(config.sim.memory)
    except ConfigError as error:
        faults.append(f"sim.memory: {error}")
    try:
        if config.metrics.listen:
            parse_listen(config.metrics.listen)
    except ConfigError as error:
        faults.append(f"metrics.listen: {error}")
    ipc, cache = config.ipc, config.cache
    if not ipc.admin_endpoint and not ipc.endpoint.startswith("ipc://"):
        faults.append("ipc.admin_endpoint: must be given when ipc.endpoint is not an ipc:// path")
    if ipc.admin_endpoint == ipc.endpoint:
        faults.append("ipc.admin_endpoint: must differ from ipc.endpoint")
    if cache.high_watermark_mb is not None and cache.high_watermark_mb < cache.low_watermark_mb:
        faults.append(
            f"cache.high_watermark_mb: {cache.high_watermark_mb} is below cache.low_watermark_mb, "
            f"{cache.low_watermark_mb}"
        )
    device = config.device
    if device.hang_limit_ms is not None and device.hang_limit_ms < device.step_timeout_ms:
        faults.append(
            f"device.hang_limit_ms: {device.hang_limit_ms} is below device.step_timeout_ms, "
            f"{device.step_timeout_ms}"
        )
    return faults + _tenant_conflicts(config)


def _tcp_conflicts(config: Config) -> list[str]:
    """TCP is either protected, or said to be not."""
    ipc = config.ipc
    faults = []
    if bool(ipc.server_key_file) != bool(ipc.keys_file):
        faults.append("ipc.server_key_file, ipc.keys_file: CURVE needs both of them, or neither")
    if ipc.tcp_endpoint and not ipc.tcp_endpoint.startswith("tcp://"):
        faults.append("ipc.tcp_endpoint: expected tcp://HOST:PORT")
    if ipc.insecure_tcp and ipc.server_key_file:
        faults.append("ipc.insecure_tcp: with ipc.server_key_file TCP is protected; give one only")
    open_tcp = [endpoint for endpoint in endpoints_of(config) if endpoint.startswith("tcp://")]
    if open_tcp and not ipc.server_key_file and not ipc.insecure_tcp:
        faults.append(
            f"{', '.join(open_tcp)}: TCP needs CURVE, so that only who may can connect and nobody "
            f"reads along: give ipc.server_key_file and ipc.keys_file (docs/security.md), or say "
            f"--insecure-tcp"
        )
    return faults


def _tenant_conflicts(config: Config) -> list[str]:
    tenants = config.tenants
    faults = [
        f"tenants: {number} of them have the name {name!r}"
        for name, number in Counter(tenant.name for tenant in tenants).items()
        if number > 1
    ]
    faults += [
        f"tenants: {tenant.name!r} has no endpoint, and without ipc.keys_file no key either"
        for tenant in tenants
        if not tenant.endpoint and not config.ipc.keys_file
    ]
    endpoints = Counter(tenant.endpoint for tenant in tenants if tenant.endpoint)
    endpoints.update({config.ipc.endpoint, admin_endpoint(config.ipc)})
    endpoints.update(filter(None, [config.ipc.tcp_endpoint]))
    faults += [
        f"tenants: the endpoint {endpoint!r} is given to more than one tenant or role"
        for endpoint, number in endpoints.items()
        if number > 1
    ]
    total = math.fsum(tenant.share_percent for tenant in tenants)
    if total >= 100:
        faults.append(
            f"tenants: their shares are {total:g} percent together; less than 100 are to be given, "
            f"the default tenant has the rest"
        )
    return faults
