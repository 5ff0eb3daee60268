"""What kind of device is simulated. Frozen; chosen before `acl.init`.

Defaults < environment (`RTCACHE_ACLSIM_<FIELD>`) < `configure(...)`. Nothing here is part of pyACL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

ENV_PREFIX = "RTCACHE_ACLSIM_"


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One simulated host with its devices.

    Attributes:
        memory_bytes: memory of one device; host memory is only used for what is written to.
        initial_use_bytes: taken on the first use of a device, for system packages (about 300 MB
            on cards, aclrtSetDevice page of CANN 9.0).
        soc_name: what `acl.get_soc_name` returns; an `.om` for another SoC is refused.
        threads: intra-op threads of one model execution; 0 means one per CPU.
        spin: ONNX Runtime threads burn CPU while waiting for work.
        weights_in_place: execute straight from the mapped `.om`, without the rearranged and widened
            copies that ONNX Runtime makes for speed; for models that would not fit otherwise.
        run_mode: 1 host (cards), 0 device (RC boards).
        device_count: number of devices.
    """

    memory_bytes: int = 8 << 30
    initial_use_bytes: int = 300 << 20
    soc_name: str = "Ascend310P3"
    threads: int = 0
    spin: bool = False
    weights_in_place: bool = False
    run_mode: int = 1
    device_count: int = 1

    def __post_init__(self) -> None:
        if self.initial_use_bytes < 0 or self.memory_bytes <= self.initial_use_bytes:
            raise ValueError(
                f"memory_bytes {self.memory_bytes} must exceed initial_use_bytes"
                f" {self.initial_use_bytes}, which the system takes first and must not be < 0"
            )
        if self.run_mode not in (0, 1):
            raise ValueError(f"run_mode must be 0 or 1, not {self.run_mode}")
        if self.threads < 0 or self.device_count < 1:
            raise ValueError("threads must be >= 0 and device_count >= 1")

    @property
    def has_hbm(self) -> bool:
        """Whether the SoC's memory is HBM (910 family) rather than DDR (310 family)."""
        return not self.soc_name.startswith("Ascend310")


def from_environment(environ: Mapping[str, str]) -> SimSettings:
    """Reads `RTCACHE_ACLSIM_*`.

    Raises:
        ValueError: an unknown variable with the prefix, or a value of the wrong type.
    """
    types = {field.name: field.type for field in fields(SimSettings)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in types:
            raise ValueError(f"{variable}: no such setting; known: {', '.join(sorted(types))}")
        values[name] = _parse(variable, str(types[name]), text)
    return SimSettings(**values)


def _parse(variable: str, type_name: str, text: str) -> Any:
    """One environment value as the field's type: `int`, `bool` (0 or 1) or `str`."""
    if type_name == "str":
        return text
    if not text.isdecimal() or (type_name == "bool" and text not in ("0", "1")):
        raise ValueError(f"{variable}: expected {type_name}, got {text!r}")
    return bool(int(text)) if type_name == "bool" else int(text)


_configured: SimSettings | None = None


def configure(**changes: Any) -> SimSettings:
    """Sets the settings for the next `acl.init`: environment values with `changes` applied.

    Without arguments, returns to defaults and environment.

    Raises:
        TypeError: unknown setting.
        ValueError: value out of range.
    """
    global _configured
    _configured = replace(from_environment(os.environ), **changes)
    return _configured


def current() -> SimSettings:
    """The settings in force for the next `acl.init`."""
    return _configured if _configured is not None else from_environment(os.environ)
