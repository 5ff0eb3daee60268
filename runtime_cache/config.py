"""The daemon's configuration: frozen, typed, complete. Pure data; `options` reads it.

Every option is one annotated field below and is written nowhere else.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from runtime_cache.errors import ConfigError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*$")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NotNegativeFloat = Annotated[float, Meta(ge=0)]


class ModelConfig(msgspec.Struct, frozen=True):
    """What is served."""

    bundle: Annotated[str, Meta(description="Directory made by rtcache-convert.")] = ""
    verify: Annotated[
        bool, Meta(description="Check every file's SHA-256 at the start (reads the whole bundle).")
    ] = True


class DeviceConfig(msgspec.Struct, frozen=True):
    """What it runs on."""

    device: Annotated[
        str,
        Meta(
            description='"npu:N" for Ascend device N, "sim:0" for the software device. '
            "There is no default: a daemon never runs on the software device unasked."
        ),
    ] = ""
    step_timeout_ms: Annotated[
        int,
        Meta(
            ge=1,
            description="A step that takes longer counts as hung: no other is begun, and what "
            "it used is not reused before it is over (milliseconds).",
        ),
    ] = 120_000
    hang_limit_ms: Annotated[
        PositiveInt | None,
        Meta(
            description="When a step is not over after this the daemon gives the device up and "
            "exits, to be started again (milliseconds); empty: three times step_timeout_ms."
        ),
    ] = None
    low_memory_mb: Annotated[
        float,
        Meta(
            ge=0,
            description="Warn when free device memory falls below this (MiB); 0: never. The KV "
            "pool was allocated at the start and does not change it.",
        ),
    ] = 256.0
    memory_check_s: Annotated[
        float, Meta(gt=0, description="How often free device memory is looked at (seconds).")
    ] = 10.0


class IpcConfig(msgspec.Struct, frozen=True):
    """Where clients connect."""

    endpoint: Annotated[
        str,
        Meta(description="Socket for clients: ipc:///path, or tcp://host:port with keys (below)."),
    ] = "ipc:///run/rtcached/rtcached.sock"
    tcp_endpoint: Annotated[
        str,
        Meta(
            description="A second socket for clients, besides an ipc one: tcp://host:port, with "
            "keys. Empty: there is none."
        ),
    ] = ""
    admin_endpoint: Annotated[
        str,
        Meta(description='Socket for rtcache-admin, mode 0600. Empty: endpoint + ".admin" (ipc).'),
    ] = ""
    socket_mode: Annotated[
        str, Meta(pattern="^0?[0-7]{3}$", description="Mode of the client socket file, octal.")
    ] = "0660"
    server_key_file: Annotated[
        str,
        Meta(
            description="Secret key file of the daemon (rtcache-admin keygen), mode 0600: what "
            "listens on TCP uses CURVE with it."
        ),
    ] = ""
    keys_file: Annotated[
        str,
        Meta(
            description="List of the keys that may connect by CURVE, each with a role, a tenant "
            "and a quota (docs/security.md); read again at a reload."
        ),
    ] = ""
    insecure_tcp: Annotated[
        bool,
        Meta(
            description="Let TCP be used without CURVE: whoever reaches the port may use the "
            "daemon, and read what others send."
        ),
    ] = False
    max_message_bytes: Annotated[
        int, Meta(ge=1024, le=64 * 1024**2, description="Larger messages are answered by an error.")
    ] = 4 * 1024**2
    max_queued_replies: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Messages that libzmq keeps for a client that does not read; the daemon "
            "keeps some more, and then its requests are cancelled.",
        ),
    ] = 1024
    max_unsent_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1_048_576,
            description="Tokens of one answer that are kept while its client grants no credit; "
            "then the answer ends.",
        ),
    ] = 4096
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="After SIGTERM, running answers get this long to end (seconds)."),
    ] = 30.0


class CacheConfig(msgspec.Struct, frozen=True):
    """The prefix cache. Exact semantics: docs/cache.md."""

    enable: Annotated[
        bool, Meta(description="Reuse the KV of prompt prefixes. Off: every prompt is computed.")
    ] = True
    block_size: Annotated[
        int, Meta(ge=1, le=4096, description="Tokens per block, the unit of eviction.")
    ] = 64
    cache_capacity: Annotated[
        PositiveFloat | None,
        Meta(description="Cap of the KV pool in GB; empty: all the bundle was compiled for."),
    ] = None
    auto_detect: Annotated[
        bool, Meta(description="Keep every request's prefix. Off: only registered prefixes.")
    ] = True
    max_prefix_length: Annotated[
        PositiveInt | None,
        Meta(description="Longest prefix that is kept and reused (tokens); empty: no limit."),
    ] = None
    max_cached_prefixes: Annotated[
        PositiveInt | None,
        Meta(description="How many prefixes that nothing continues are kept; empty: no limit."),
    ] = None
    eviction_policy: Annotated[
        Literal["lru", "slru"],
        Meta(
            description='"lru": least recently used first. "slru": what was never reused first, '
            "so that a stream of one-off prompts leaves a hot prefix alone."
        ),
    ] = "lru"
    low_watermark_mb: Annotated[
        float,
        Meta(
            ge=0,
            description="Evict ahead of need when free pool memory falls below this (MiB); "
            "never more than an eighth of the pool.",
        ),
    ] = 256.0
    high_watermark_mb: Annotated[
        NotNegativeFloat | None,
        Meta(
            description="Once evicting, go on until this much pool memory is free (MiB); never "
            "more than a quarter of the pool. Empty: the same as low_watermark_mb."
        ),
    ] = None
    max_kept_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description=(
                "Most of the pool that registrations, pins and leases may hold together; as many "
                "of them there may be as that is blocks."
            ),
        ),
    ] = 50
    deterministic: Annotated[
        bool,
        Meta(
            description="Make a hit bit-identical to a miss: reuse whole chunks only, and run one "
            "gear per role. Costs speed; stats say how much."
        ),
    ] = False


class EngineConfig(msgspec.Struct, frozen=True):
    """Scheduling."""

    max_waiting: Annotated[
        int, Meta(ge=1, description="Requests of a tenant that may wait; more are told to retry.")
    ] = 1024
    max_running: Annotated[
        PositiveInt | None,
        Meta(description="Requests in work at once; empty: the bundle's largest batch."),
    ] = None
    interleave_chunk_tokens: Annotated[
        int,
        Meta(
            ge=1, description="Prompt tokens fed per step while answers are being written (tokens)."
        ),
    ] = 128
    default_max_tokens: Annotated[
        PositiveInt | None,
        Meta(description="Answer length if the client sets none; empty: to the context end."),
    ] = None
    default_deadline_ms: Annotated[
        PositiveInt | None,
        Meta(description="Deadline if the client sets none; empty: no deadline."),
    ] = None
    on_failed_step: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What becomes of the requests of a step that failed on the device. "
            '"recompute": each is computed again once, and its answer goes on where it was. '
            '"fail": they are told to retry.'
        ),
    ] = "recompute"
    max_overtakes: Annotated[
        int,
        Meta(
            ge=0,
            description="How often later requests that are cached further may overtake a waiting "
            "one; 0: first come, first served.",
        ),
    ] = 32


class SimConfig(msgspec.Struct, frozen=True):
    """The software device (device = "sim:0" only)."""

    memory: Annotated[
        str, Meta(description='Device memory, such as "8GiB"; empty: what the SoC has.')
    ] = ""
    soc: Annotated[
        str, Meta(description="SoC to stand for; empty: the one the bundle was made for.")
    ] = ""
    threads: Annotated[
        PositiveInt | None, Meta(description="Threads of ONNX Runtime; empty: one per CPU.")
    ] = None


class MetricsConfig(msgspec.Struct, frozen=True):
    """Metrics and health over HTTP, for Prometheus and for load balancers."""

    listen: Annotated[
        str,
        Meta(
            description='Address and port, such as "127.0.0.1:9464"; empty: off. There is no '
            "password: whoever reaches it reads the figures, the model's name and the tenants'."
        ),
    ] = ""


class LogConfig(msgspec.Struct, frozen=True):
    """Logging, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        Meta(
            description='"auto": console on a terminal, plain lines in the journal of systemd, '
            "JSON otherwise."
        ),
    ] = "auto"
    prompts: Annotated[
        bool,
        Meta(description="Log what clients ask and what they are answered. Off: never."),
    ] = False


class DaemonConfig(msgspec.Struct, frozen=True):
    """What the daemon keeps over a restart."""

    state_dir: Annotated[
        str,
        Meta(
            description="Directory of the daemon's own, where the tenants' salts lie; empty: the "
            "first of $STATE_DIRECTORY, or none: then salts are new at each start."
        ),
    ] = ""


class TenantConfig(msgspec.Struct, frozen=True):
    """A tenant: its own socket, its own part of the cache. In this file only.

    Who connects to its endpoint sees and evicts nothing of other tenants. The main endpoint is the
    default tenant's, which has what the shares leave.
    """

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z", description="What operators call it.")
    ]
    endpoint: Annotated[
        str,
        Meta(
            description="Its socket, as ipc.endpoint; empty: it has none, and is reached by its "
            "keys only (ipc.keys_file)."
        ),
    ]
    share_percent: Annotated[
        float, Meta(gt=0, lt=100, description="Its part of the KV pool (percent).")
    ]

    def __repr__(self) -> str:
        return f"TenantConfig({self.name!r}, {self.endpoint!r}, {self.share_percent})"


class Config(msgspec.Struct, frozen=True):
    """All sections."""

    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    ipc: IpcConfig = IpcConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    sim: SimConfig = SimConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    daemon: DaemonConfig = DaemonConfig()
    tenants: tuple[TenantConfig, ...] = ()


def parse_bytes(text: str) -> int:
    """`"4GiB"`, `"512MB"`, `"1073741824"` → bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    match = _SIZE.match(text.lower())
    if match is None:
        raise ConfigError(f'"{text}" is not a size; write for example "4GiB" or "512MB"')
    return int(float(match[1]) * _UNITS[match[2] or ""])


def admin_endpoint(ipc: IpcConfig) -> str:
    """Where administrators connect."""
    return ipc.admin_endpoint or f"{ipc.endpoint}.admin"


def endpoints_of(config: Config) -> list[str]:
    """Every endpoint that clients may connect to."""
    own = [config.ipc.endpoint, admin_endpoint(config.ipc)]
    others = [config.ipc.tcp_endpoint, *(tenant.endpoint for tenant in config.tenants)]
    return own + [endpoint for endpoint in others if endpoint]
