"""Finds the `acl` module that a device's name asks for. By name alone: nothing stands in for it.

The only file that imports the vendor's module, and the only one that hands out the software device;
beside it, `om_models.atc` asks the software device's compiler which SoCs it knows.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

from runtime_cache.device.acl_api import AclModule
from runtime_cache.device.acl_import import (
    explain_failure,
    explain_import,
    explain_stranger,
    is_pyacl,
)
from runtime_cache.errors import ConfigError

_DEVICE = re.compile(r"(sim|npu):(0|[1-9][0-9]{0,3})")


def load_acl(
    device: str, sim_options: Mapping[str, int | str | bool] | None = None
) -> tuple[AclModule, int]:
    """The module to drive a device with, and the device's number. Touches no device.

    Args:
        device: `sim:N` for the software device, `npu:N` for an Ascend card.
        sim_options: settings of the software device (`aclsim.settings.SimSettings`), over its
            environment variables.

    Raises:
        ConfigError: the name is unknown, the module cannot be imported (and why), or a setting of
            the software device is wrong.
    """
    kind, device_id = parse_device(device)
    if kind == "npu" and sim_options:
        raise ConfigError(f"device {device!r} is no software device; remove its settings")
    acl = _load_software(sim_options or {}) if kind == "sim" else _load_vendor()
    return acl, device_id


def parse_device(device: str) -> tuple[str, int]:
    """(`sim` or `npu`, number) of a device's name.

    Raises:
        ConfigError: it is no such name.
    """
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ConfigError(f"device {device!r} is unknown; it is sim:N or npu:N, such as npu:0")
    return match[1], int(match[2])


def _load_software(options: Mapping[str, int | str | bool]) -> AclModule:
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(
            "the software device needs ONNX Runtime: pip install 'runtime-cache[sim]'"
        )
    try:
        from runtime_cache import aclsim
        from runtime_cache.aclsim import settings
    except ImportError as error:
        raise ConfigError(f"the software device cannot be imported: {error}") from error
    try:
        settings.configure(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"settings of the software device: {error}") from error
    return aclsim


def _load_vendor() -> AclModule:
    try:
        import acl
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        raise ConfigError(
            f"pyACL cannot be imported: {explain_import(str(error), missing)}"
        ) from error
    except Exception as error:
        raise ConfigError(explain_failure(error)) from error
    if not is_pyacl(acl):
        raise ConfigError(explain_stranger(getattr(acl, "__file__", None)))
    return acl
