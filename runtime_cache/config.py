"""The daemon's configuration: frozen, typed, complete; written once, read from four places.

Every option is one annotated field below. From these fields come the TOML keys (`[cache]
block_size`), the environment names (`RTCACHE_CACHE_BLOCK_SIZE`), the flags (`--cache-block-size`),
the help, the reference file `rtcached.toml` and the checks. Later places win: defaults < file <
environment < flags. Wrong input stops the start: all faults are reported together, each with its
path and where it came from.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from runtime_cache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "RTCACHE_"
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*$")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


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
        Meta(ge=1, description="A step that takes longer counts as a hung device (milliseconds)."),
    ] = 120_000


class IpcConfig(msgspec.Struct, frozen=True):
    """Where clients connect."""

    endpoint: Annotated[
        str, Meta(description="Socket for clients: ipc:///path or tcp://127.0.0.1:port.")
    ] = "ipc:///run/rtcached/rtcached.sock"
    admin_endpoint: Annotated[
        str,
        Meta(description='Socket for rtcache-admin, mode 0600. Empty: endpoint + ".admin" (ipc).'),
    ] = ""
    socket_mode: Annotated[
        str, Meta(pattern="^0?[0-7]{3}$", description="Mode of the client socket file, octal.")
    ] = "0660"
    max_message_bytes: Annotated[
        int, Meta(ge=1024, le=64 * 1024**2, description="Larger messages are answered by an error.")
    ] = 4 * 1024**2
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="After SIGTERM, running answers get this long to end (seconds)."),
    ] = 30.0


class CacheConfig(msgspec.Struct, frozen=True):
    """The prefix cache."""

    enable: Annotated[
        bool, Meta(description="Reuse the KV of prompt prefixes. Off: every prompt is computed.")
    ] = True
    block_size: Annotated[
        int, Meta(ge=1, le=4096, description="Tokens per block, the unit of reuse and eviction.")
    ] = 64
    cache_capacity: Annotated[
        PositiveFloat | None,
        Meta(description="Cap of the KV pool in GB; empty: all the bundle was compiled for."),
    ] = None
    low_watermark_mb: Annotated[
        float,
        Meta(
            ge=0,
            description="Evict ahead of need when free pool memory falls below this (MiB); "
            "never more than an eighth of the pool.",
        ),
    ] = 256.0


class EngineConfig(msgspec.Struct, frozen=True):
    """Scheduling."""

    max_waiting: Annotated[
        int, Meta(ge=1, description="Requests that may wait; more are told to retry later.")
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


class SimConfig(msgspec.Struct, frozen=True):
    """The software device (device = "sim:0" only)."""

    memory: Annotated[str, Meta(description='Device memory, such as "8GiB".')] = "8GiB"
    soc: Annotated[
        str, Meta(description="SoC to stand for; empty: the one the bundle was made for.")
    ] = ""
    threads: Annotated[
        PositiveInt | None, Meta(description="Threads of ONNX Runtime; empty: one per CPU.")
    ] = None


class LogConfig(msgspec.Struct, frozen=True):
    """Logging, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description='"auto": console on a terminal, JSON otherwise.'),
    ] = "auto"


class Config(msgspec.Struct, frozen=True):
    """All sections."""

    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    ipc: IpcConfig = IpcConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    sim: SimConfig = SimConfig()
    log: LogConfig = LogConfig()


@dataclass(frozen=True, slots=True)
class Option:
    """One field, with the names it goes by."""

    section: str
    key: str
    type: Any
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}_{self.key}".upper()

    @property
    def flag(self) -> str:
        # `--device` rather than `--device-device`.
        name = self.key if self.key == self.section else f"{self.section}_{self.key}"
        return "--" + name.replace("_", "-")

    @property
    def doc(self) -> str:
        metas = [arg for arg in get_args(self.type)[1:] if isinstance(arg, Meta)]
        text = next((meta.description for meta in metas if meta.description), "")
        base = get_args(self.type)[0] if metas else self.type
        if get_origin(base) is Literal:
            text = f"{text} One of {', '.join(get_args(base))}.".strip()
        return text


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and where each value came from (path → place)."""

    config: Config
    origins: Mapping[str, str]


def sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Section names and their structs, in order."""
    yield from get_type_hints(Config).items()


def options() -> Iterator[Option]:
    """Every option, in order."""
    for section, struct in sections():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            yield Option(section, field.name, hints[field.name], field.default)


def parse_bytes(text: str) -> int:
    """`"4GiB"`, `"512MB"`, `"1073741824"` → bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    match = _SIZE.match(text.lower())
    if match is None:
        raise ConfigError(f'"{text}" is not a size; write for example "4GiB" or "512MB"')
    return int(float(match[1]) * _UNITS[match[2] or ""])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per option, grouped by section."""
    groups = {
        name: parser.add_argument_group(f"[{name}]", struct.__doc__) for name, struct in sections()
    }
    for option in options():
        groups[option.section].add_argument(
            option.flag,
            dest=option.path,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=option.doc.replace("%", "%%"),
        )


def load(
    path: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Loaded:
    """Read, merge and check the configuration.

    Args:
        path: TOML file, or None for none.
        env: environment; None for the process's own.
        flags: option path → text, as `add_flags` leaves them.

    Raises:
        ConfigError: one message that lists every fault. Nothing has been started.
    """
    faults: list[str] = []
    given = _from_file(path, faults) if path else {}
    given |= _from_env(os.environ if env is None else env, faults)
    by_path = {option.path: option for option in options()}
    for name, text in (flags or {}).items():
        if name in by_path:
            given[name] = _Given(text, f"flag {by_path[name].flag}", is_text=True)
    values: dict[str, dict[str, Any]] = {name: {} for name, _ in sections()}
    origins = {}
    for option in by_path.values():
        origins[option.path] = "default"
        if option.path in given:
            source = given[option.path]
            origins[option.path] = source.place
            _convert(option, source, values[option.section], faults)
    config = _build(values)
    faults += _conflicts(config)
    if faults:
        raise ConfigError("configuration is wrong:\n" + "\n".join(f"  - {f}" for f in faults))
    return Loaded(config, origins)


def reference_toml() -> str:
    """The text of `rtcached.toml`: every option with its meaning and default, commented out."""
    lines = [
        "# rtcached configuration: every option with its default.",
        "# Also by environment (RTCACHE_<SECTION>_<KEY>) and by flag (--<section>-<key>).",
        "# `rtcached --check-config` prints the effective values and where each came from.",
    ]
    for name, struct in sections():
        lines += ["", f"# {struct.__doc__}", f"[{name}]"]
        for option in (o for o in options() if o.section == name):
            lines += textwrap.wrap(option.doc, 98, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"# {option.key} = {toml(option.default)}")
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """An option's value as it is written in the file; nothing, which TOML lacks, as `""`."""
    if value is None:
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def describe(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """(path, effective value, place it came from) of every option."""
    return [
        (o.path, getattr(getattr(loaded.config, o.section), o.key), loaded.origins[o.path])
        for o in options()
    ]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was found; `is_text` if it has to be parsed from a string."""

    value: Any
    place: str
    is_text: bool = False


def _from_file(path: str, faults: list[str]) -> dict[str, _Given]:
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    known = {name: {o.key for o in options() if o.section == name} for name, _ in sections()}
    given = {}
    for section, table in data.items():
        if section not in known:
            faults.append(f"{path}: unknown section [{section}]; known: {', '.join(known)}")
        elif not isinstance(table, dict):
            faults.append(f"{path}: [{section}] must be a table")
        else:
            for key, value in table.items():
                if key in known[section]:
                    given[f"{section}.{key}"] = _Given(value, path)
                else:
                    faults.append(f"{path}: unknown key {section}.{key}{_hint(key, known)}")
    return given


def _hint(key: str, known: Mapping[str, set[str]]) -> str:
    names = {f"{section}.{k}": k for section, keys in known.items() for k in keys}
    close = difflib.get_close_matches(key, names.values(), n=1)
    found = [path for path, k in names.items() if close and k == close[0]]
    return f"; did you mean {found[0]}?" if found else ""


def _from_env(env: Mapping[str, str], faults: list[str]) -> dict[str, _Given]:
    names = {option.env: option for option in options()}
    prefixes = tuple(f"{ENV_PREFIX}{name}_".upper() for name, _ in sections())
    given = {}
    for name, text in env.items():
        if name in names:
            given[names[name].path] = _Given(text, f"environment {name}", is_text=True)
        elif name.startswith(prefixes):
            faults.append(f"environment {name}: no such option")
    return given


def _convert(option: Option, given: _Given, into: dict[str, Any], faults: list[str]) -> None:
    value = given.value
    if value == "" and option.default is None:  # TOML has no null: "" leaves an option unset
        value = None
    try:
        into[option.key] = msgspec.convert(value, option.type, strict=not given.is_text)
        if isinstance(value := into[option.key], float) and not math.isfinite(value):
            raise msgspec.ValidationError("Expected a finite number")
    except msgspec.ValidationError as error:
        reason = str(error).replace("| null", "or empty")
        faults.append(f"{given.place}: {option.path} = {value!r}: {reason}")


def _build(values: Mapping[str, Mapping[str, Any]]) -> Config:
    parts: dict[str, Any] = {name: struct(**values[name]) for name, struct in sections()}
    return Config(**parts)


def _conflicts(config: Config) -> list[str]:
    """Faults that only several fields together, or a value's own grammar, can show."""
    faults = []
    try:
        parse_bytes(config.sim.memory)
    except ConfigError as error:
        faults.append(f"sim.memory: {error}")
    ipc = config.ipc
    if not ipc.admin_endpoint and not ipc.endpoint.startswith("ipc://"):
        faults.append("ipc.admin_endpoint: must be given when ipc.endpoint is not an ipc:// path")
    if ipc.admin_endpoint == ipc.endpoint:
        faults.append("ipc.admin_endpoint: must differ from ipc.endpoint")
    return faults
