"""The names every option goes by, and how the configuration is read, merged and checked.

From the fields of `config` come the TOML keys (`[cache] block_size`), the environment names
(`RTCACHE_CACHE_BLOCK_SIZE`), the flags (`--cache-block-size`), the help, the reference file
`rtcached.toml` and the checks. Later places win: defaults < file < environment < flags; tenants are
in the file only. Wrong input stops the start: all faults are reported together, each with its path
and where it came from.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from runtime_cache.config import Config, TenantConfig
from runtime_cache.conflicts import conflicts
from runtime_cache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "RTCACHE_"
_TENANTS = "tenants"
#: Of the reference file.
_EXAMPLE_TENANT = {
    "name": "search",
    "endpoint": "ipc:///run/rtcached/search.sock",
    "share_percent": 25.0,
}


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
        """What it means, as one sentence or two."""
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
    """Section names and their structs, in order; the tenants are no section."""
    for name, struct in get_type_hints(Config).items():
        if name != _TENANTS:
            yield name, struct


def options() -> Iterator[Option]:
    """Every option, in order, but for those of tenants."""
    for section, struct in sections():
        yield from _fields(section, struct)


def _fields(section: str, struct: type[msgspec.Struct]) -> Iterator[Option]:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        yield Option(section, field.name, hints[field.name], field.default)


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
    data = _read_toml(path) if path else {}
    origins: dict[str, str] = {}
    tenants = _tenants(data.pop(_TENANTS, []), path or "", origins, faults)
    given = _from_file(data, path or "", faults)
    given |= _from_env(os.environ if env is None else env, faults)
    by_path = {option.path: option for option in options()}
    for name, text in (flags or {}).items():
        if name in by_path:
            given[name] = _Given(text, f"flag {by_path[name].flag}", is_text=True)
    values: dict[str, dict[str, Any]] = {name: {} for name, _ in sections()}
    for option in by_path.values():
        origins[option.path] = "default"
        if option.path in given:
            source = given[option.path]
            origins[option.path] = source.place
            _convert(option, source, values[option.section], faults)
    parts: dict[str, Any] = {name: struct(**values[name]) for name, struct in sections()}
    config = Config(**parts, tenants=tenants)
    faults += conflicts(config)
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
        for option in _fields(name, struct):
            lines += _commented(option.doc)
            lines.append(f"# {option.key} = {toml(option.default)}")
    return "\n".join(lines + _example_tenant()) + "\n"


def _example_tenant() -> list[str]:
    """A tenant as it would be written; `#` without a space marks what is no default."""
    lines = ["", *_commented(TenantConfig.__doc__ or ""), "# For example:", f"#[[{_TENANTS}]]"]
    for option in _fields(_TENANTS, TenantConfig):
        lines += _commented(option.doc)
        value = _EXAMPLE_TENANT.get(option.key, option.default)
        lines.append(f"#{option.key} = {toml(value)}")
    return lines


def _commented(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        98,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def toml(value: Any) -> str:
    """An option's value as it is written in the file; nothing, which TOML lacks, as `""`."""
    if value is None:
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def describe(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """(path, effective value, place it came from) of every option; none is a secret."""
    config = loaded.config
    owners = [(option, getattr(config, option.section)) for option in options()]
    for index, tenant in enumerate(config.tenants):
        owners += [(o, tenant) for o in _fields(f"{_TENANTS}[{index}]", TenantConfig)]
    return [(o.path, getattr(owner, o.key), loaded.origins[o.path]) for o, owner in owners]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was found; `is_text` if it has to be parsed from a string."""

    value: Any
    place: str
    is_text: bool = False


def _read_toml(path: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return data


def _from_file(data: Mapping[str, Any], path: str, faults: list[str]) -> dict[str, _Given]:
    known = {name: {o.key for o in options() if o.section == name} for name, _ in sections()}
    given = {}
    for section, table in data.items():
        if section not in known:
            names = ", ".join([*known, _TENANTS])
            faults.append(f"{path}: unknown section [{section}]; known: {names}")
        elif not isinstance(table, dict):
            faults.append(f"{path}: [{section}] must be a table")
        else:
            for key, value in table.items():
                if key in known[section]:
                    given[f"{section}.{key}"] = _Given(value, path)
                else:
                    faults.append(f"{path}: unknown key {section}.{key}{_hint(key, known)}")
    return given


def _tenants(
    tables: object, path: str, origins: dict[str, str], faults: list[str]
) -> tuple[TenantConfig, ...]:
    """The tenants without a fault of their own; where their values came from goes to `origins`."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        faults.append(f"{path}: tenants must be tables, each under [[{_TENANTS}]]")
        return ()
    found = (
        _tenant(f"{_TENANTS}[{index}]", table, path, origins, faults)
        for index, table in enumerate(tables)
    )
    return tuple(tenant for tenant in found if tenant is not None)


def _tenant(
    name: str, table: Mapping[str, Any], path: str, origins: dict[str, str], faults: list[str]
) -> TenantConfig | None:
    num_faults = len(faults)
    by_key = {option.key: option for option in _fields(name, TenantConfig)}
    for key in table.keys() - by_key.keys():
        hint = _hint(key, {name: set(by_key)})
        faults.append(f"{path}: unknown key {name}.{key}{hint}")
    values: dict[str, Any] = {}
    for key, option in by_key.items():
        origins[option.path] = path if key in table else "default"
        if key in table:
            _convert(option, _Given(table[key], path), values, faults)
        elif option.default is msgspec.NODEFAULT:
            faults.append(f"{path}: {option.path} is missing")
    return TenantConfig(**values) if len(faults) == num_faults else None


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
        elif name.startswith(f"{ENV_PREFIX}{_TENANTS}".upper()):
            faults.append(f"environment {name}: tenants are given in the file only")
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
        if choices := _choices(option.type):
            reason = f"expected one of {', '.join(choices)}"
        faults.append(f"{given.place}: {option.path} = {value!r}: {reason}")


def _choices(kind: Any) -> list[str]:
    """The words that a type allows; none for a type of other values."""
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    return [word for part in get_args(kind) for word in _choices(part)]
