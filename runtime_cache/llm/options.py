"""What an embedded model is opened with: the daemon's own options, under the names of ATB.

Nothing is read from files; from the environment, only the device.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from runtime_cache import options
from runtime_cache.config import (
    CacheConfig,
    Config,
    PositiveInt,
)
from runtime_cache.conflicts import conflicts
from runtime_cache.device.select import load_acl, parse_device
from runtime_cache.errors import ConfigError

DEVICE_VARIABLE = "RTCACHE_DEVICE_DEVICE"
DEFAULT_DEVICE = "npu:0"
#: Answer tokens where a program does not say: a first turn must not fill the whole context.
DEFAULT_MAX_TOKENS = 512
_NO_CARD = (
    'to run on the software device, say so: LLM(..., device="sim:0") or '
    f"{DEVICE_VARIABLE}=sim:0, with a bundle made by `rtcache-convert --target sim`"
)
#: Sections whose options are keywords of `LLM`, and those of them that it takes otherwise.
_SECTIONS = ("model", "device", "engine", "sim", "log")
_NOT_KEYWORDS = ("model.bundle", "device.device")


class PrefixCachingConfig(CacheConfig, frozen=True, kw_only=True):
    """The prefix cache of an embedded model: the daemon's section [cache], every option of it.

    Two defaults differ from the daemon's, which has no limit in either place.

    Attributes:
        max_prefix_length: longest prefix that is kept and reused [tokens]; None is no limit.
        max_cached_prefixes: how many prefixes that nothing continues are kept; None is no limit.

    Raises:
        ConfigError: a value is wrong; the message names each field at fault.
    """

    max_prefix_length: PositiveInt | None = 4096
    max_cached_prefixes: PositiveInt | None = 64

    def __post_init__(self) -> None:
        """Check what the constructor of a struct does not."""
        hints = get_type_hints(type(self), include_extras=True)
        given = {field: getattr(self, field) for field in self.__struct_fields__}
        faults = [
            fault for name, value in given.items() if (fault := _fault(name, value, hints[name]))
        ]
        _refuse("PrefixCachingConfig", faults or conflicts(Config(cache=self)))


def embedded_config(
    bundle: str | os.PathLike[str],
    device: str | None,
    prefix_caching: CacheConfig | None,
    keywords: Mapping[str, object],
) -> Config:
    """The daemon's configuration for an embedded model.

    Args:
        bundle: directory made by rtcache-convert.
        device: None for the environment's, or else the first card.
        prefix_caching: None for the defaults.
        keywords: `section_key` → value, such as `engine_max_running`.

    Raises:
        ConfigError: a value is wrong, or there is no card to be had; nothing has started.
        TypeError: there is no such keyword.
    """
    if not isinstance(prefix_caching, CacheConfig | None):
        _refuse("LLM", [f"prefix_caching: expected a PrefixCachingConfig, got {prefix_caching!r}"])
    values = _values(keywords)
    values["model"]["bundle"] = os.fspath(bundle)
    values["device"]["device"] = _device(device)
    values["log"].setdefault("level", "warning")
    values["engine"].setdefault("default_max_tokens", DEFAULT_MAX_TOKENS)
    parts: dict[str, Any] = {name: struct(**values[name]) for name, struct in _structs().items()}
    config = Config(cache=prefix_caching or PrefixCachingConfig(), **parts)
    _refuse("LLM", conflicts(config))
    return config


def _values(keywords: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Section → key → checked value."""
    known = _known()
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    faults = []
    for name, value in keywords.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"LLM() has no keyword {name!r}{hint}")
        option = known[name]
        if fault := _fault(name, value, option.type):
            faults.append(fault)
        values[option.section][option.key] = value
    _refuse("LLM", faults)
    return values


def _known() -> dict[str, options.Option]:
    """Keyword of `LLM` → option."""
    return {
        f"{option.section}_{option.key}": option
        for option in options.options()
        if option.section in _SECTIONS and option.path not in _NOT_KEYWORDS
    }


def _structs() -> dict[str, type[msgspec.Struct]]:
    return {name: struct for name, struct in options.sections() if name in _SECTIONS}


def _device(asked: str | None) -> str:
    """The device's name; its driver can be loaded.

    Raises:
        ConfigError: it is no device's name, or there is no card here, and what to do about it.
    """
    device = os.environ.get(DEVICE_VARIABLE) or DEFAULT_DEVICE if asked is None else asked
    kind, _ = parse_device(device)
    if kind == "npu":
        try:
            load_acl(device)
        except ConfigError as error:
            raise ConfigError(f"device {device!r}: {error}; {_NO_CARD}") from error
    return device


def _fault(name: str, value: object, kind: Any) -> str | None:
    """What is wrong with one value, if anything is."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return f"{name} = {value!r}: {str(error).replace('| null', 'or None')}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} = {value!r}: Expected a finite number"
    return None


def _refuse(owner: str, faults: list[str]) -> None:
    if faults:
        raise ConfigError(f"{owner}: " + "; ".join(faults))
