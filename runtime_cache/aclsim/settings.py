"""What kind of device is simulated. Frozen; chosen before `acl.init`.

Defaults < environment (`RTCACHE_ACLSIM_<FIELD>`) < `configure(...)`. What is left open follows from
the SoC's name (`om_models.socs`). Nothing here is part of pyACL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from om_models.socs import Soc, find_soc
from runtime_cache.aclsim.fault_script import read_script

ENV_PREFIX = "RTCACHE_ACLSIM_"
#: For a SoC whose memory no table tells.
UNKNOWN_MEMORY_BYTES = 8 << 30
RUN_MODE_DEVICE, RUN_MODE_HOST = 0, 1
MisuseAction = Literal["report", "warn", "error"]


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One simulated host with its devices.

    Attributes:
        memory_bytes: memory of one device; host memory is only used for what is written to. None:
            what the SoC has, or 8 GiB if that is not known.
        initial_use_bytes: taken on the first use of a device, for system packages (about 300 MB
            on cards, aclrtSetDevice page of CANN 9.0).
        soc_name: what `acl.get_soc_name` returns; an `.om` for another SoC is refused.
        threads: intra-op threads of one model execution; 0 means one per CPU.
        spin: ONNX Runtime threads burn CPU while waiting for work.
        weights_in_place: execute straight from the mapped `.om`, without the rearranged and widened
            copies that ONNX Runtime makes for speed; for models that would not fit otherwise.
        run_mode: 1 host (cards), 0 device (boards: one memory for host and device). None: as the
            SoC is built.
        device_count: number of devices.
        faults: path of a fault script (`faults.read_script`), read at `acl.init`; empty: none.
        misuse: what happens to what a card would not forgive: `report` it at the end, `warn` (also
            log it when it happens), `error` (make `run` exit with 1).
        gil_limit_ms: calls that keep the interpreter to themselves for longer are reported.
    """

    memory_bytes: int | None = None
    initial_use_bytes: int = 300 << 20
    soc_name: str = "Ascend310P3"
    threads: int = 0
    spin: bool = False
    weights_in_place: bool = False
    run_mode: int | None = None
    device_count: int = 1
    faults: str = ""
    misuse: MisuseAction = "report"
    gil_limit_ms: int = 100

    def __post_init__(self) -> None:
        if self.initial_use_bytes < 0 or self.capacity_bytes <= self.initial_use_bytes:
            raise ValueError(
                f"memory_bytes {self.capacity_bytes} must exceed initial_use_bytes"
                f" {self.initial_use_bytes}, which the system takes first and must not be < 0"
            )
        if self.mode not in (RUN_MODE_DEVICE, RUN_MODE_HOST):
            raise ValueError(f"run_mode must be 0 or 1, not {self.run_mode}")
        if self.threads < 0 or self.device_count < 1 or self.gil_limit_ms < 0:
            raise ValueError("threads and gil_limit_ms must be >= 0, and device_count >= 1")
        if self.misuse not in get_args(MisuseAction):
            raise ValueError(f"misuse must be report, warn or error, not {self.misuse!r}")

    @property
    def soc(self) -> Soc | None:
        """What is known of the SoC."""
        return find_soc(self.soc_name)

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device: as set, or as the SoC has it."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        known = self.soc.memory_bytes if self.soc else None
        return UNKNOWN_MEMORY_BYTES if known is None else known

    @property
    def mode(self) -> int:
        """1 on the host of a card, 0 on a board: as set, or as the SoC is built."""
        if self.run_mode is not None:
            return self.run_mode
        return RUN_MODE_DEVICE if self.soc and self.soc.form == "board" else RUN_MODE_HOST

    @property
    def has_one_memory(self) -> bool:
        """Whether host and device share one memory, as on a board."""
        return self.mode == RUN_MODE_DEVICE

    @property
    def has_hbm(self) -> bool:
        """Whether the SoC's memory is HBM (910 family) rather than DDR (310 family)."""
        return self.soc.has_hbm if self.soc else not self.soc_name.startswith("Ascend310")


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
    """One environment value as the field's type: text, `int`, or `bool` (0 or 1)."""
    kind = type_name.removesuffix(" | None")
    if kind in ("str", "MisuseAction"):
        return text
    if not text.isdecimal() or (kind == "bool" and text not in ("0", "1")):
        raise ValueError(f"{variable}: expected {kind}, got {text!r}")
    return bool(int(text)) if kind == "bool" else int(text)


_configured: SimSettings | None = None


def configure(**changes: Any) -> SimSettings:
    """Sets the settings for the next `acl.init`: environment values with `changes` applied.

    Without arguments, returns to defaults and environment.

    Raises:
        TypeError: unknown setting.
        ValueError: value out of range, or a fault script that cannot be used.
    """
    global _configured
    wanted = replace(from_environment(os.environ), **changes)
    if wanted.faults:
        read_script(wanted.faults)
    _configured = wanted
    return wanted


def current() -> SimSettings:
    """The settings in force for the next `acl.init`."""
    return _configured if _configured is not None else from_environment(os.environ)
