"""From a path or an address to a loaded model: what `acl.mdl.load_*` have in common."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

from om_models.socs import find_soc
from runtime_cache.aclsim import codes, model_configs
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.geared_models import GearedModel
from runtime_cache.aclsim.lent_memory import NOTHING_LENT, LentMemory, Range
from runtime_cache.aclsim.memory import is_host_readable
from runtime_cache.aclsim.model_configs import LoadConfig
from runtime_cache.aclsim.models import LoadedModel
from runtime_cache.aclsim.om import OmFile, OmHeader, read_om, read_om_image
from runtime_cache.aclsim.process import current_context, this_process
from runtime_cache.aclsim.ranged_models import RangedModel


def model_of(model_id: int) -> LoadedModel:
    """A model loaded under the current context.

    Raises:
        AclFailure: 145003 for an unknown id, 107004 for another context's model.
    """
    context = current_context()
    model = this_process().models.get(model_id)
    if model is None:
        raise AclFailure(codes.GE_MODEL_ID_INVALID, f"no model {model_id}")
    if model.context != context.handle:
        raise AclFailure(codes.RT_MODEL_CONTEXT, f"model {model_id} belongs to another context")
    return model


def load(om: OmFile, lent: LentMemory = NOTHING_LENT) -> int:
    """Loads a checked model under the current context and returns its id.

    Raises:
        AclFailure: 545001 for a model that the device cannot run; as `LoadedModel`.
    """
    context, process = current_context(), this_process()
    check_fits_device(om.header, process.config.soc_name, om.label)
    if om.header.has_ranges:
        # The runtime ignores work memory that is offered for such models.
        lent = LentMemory(weights=lent.weights)
        kind: type[LoadedModel] = RangedModel
    else:
        kind = GearedModel
    model = kind(om, context.device.memory, process.config, context.handle, lent)
    return process.add_model(model)


def load_with(config: LoadConfig) -> int:
    """Loads as a config handle says.

    Raises:
        AclFailure: 100000 for options that are missing or do not go together; as `load`.
    """
    kind = config.number(model_configs.LOAD_TYPE)
    has_path = model_configs.WEIGHT_PATH in config.options
    if has_path and kind != model_configs.FROM_MEM:
        raise AclFailure(codes.INVALID_PARAM, "WEIGHT_PATH_PTR goes with loading from memory only")
    if kind in (model_configs.FROM_FILE, model_configs.FROM_FILE_WITH_MEM):
        om = read_om(config.text(model_configs.PATH))
    elif kind in (model_configs.FROM_MEM, model_configs.FROM_MEM_WITH_MEM):
        address = config.number(model_configs.MEM_ADDRESS)
        size = config.number(model_configs.MEM_SIZE)
        om = om_in_memory(address, size, _weight_directory(config) if has_path else None)
    else:
        sentence = f"load type {kind} is not modelled by the software device (1..4 are)"
        raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, sentence)
    if kind in (model_configs.FROM_FILE, model_configs.FROM_MEM):
        return load(om)
    return load(om, _lent_by(config))


def _lent_by(config: LoadConfig) -> LentMemory:
    return lent_memory(
        config.number_or_0(model_configs.WORK_ADDRESS),
        config.number_or_0(model_configs.WORK_SIZE),
        config.number_or_0(model_configs.WEIGHT_ADDRESS),
        config.number_or_0(model_configs.WEIGHT_SIZE),
    )


def lent_memory(work: int, work_bytes: int, weights: int, weights_bytes: int) -> LentMemory:
    """What a program lends; a null pointer leaves it to the system."""
    return LentMemory(_range(work, work_bytes), _range(weights, weights_bytes))


def _range(address: int, size: int) -> Range | None:
    return (address, size) if address else None


def _weight_directory(config: LoadConfig) -> Path:
    """The text behind the address in attribute 14."""
    address = config.number(model_configs.WEIGHT_PATH)
    if address == 0 or not is_host_readable(address):
        raise AclFailure(
            codes.INVALID_PARAM, "WEIGHT_PATH_PTR is the address of a text on the host"
        )
    return Path(ctypes.string_at(address).decode("utf-8", "replace"))


def om_in_memory(address: int, size: int, weight_directory: Path | None = None) -> OmFile:
    """A model that the program read into memory. Nothing of it is copied.

    On a card that memory is the host's; a device pointer crashes many programs there. On a board
    there is one memory.

    Raises:
        AclFailure: 100000 for an address or size that cannot be; as `read_om_image`.
    """
    if address == 0 or size == 0:
        raise AclFailure(codes.INVALID_PARAM, "no model at address 0 or of 0 bytes")
    process = this_process()
    if not is_host_readable(address):
        sentence = (
            f"{address:#x} is device memory: on a card, models are loaded from host memory "
            "(from device memory only on boards, where both are one)"
        )
        raise AclFailure(codes.INVALID_PARAM, sentence)
    process.host_memory.live.check_if_known(address, size, codes.INVALID_PARAM)
    for device in process.devices.values():
        device.memory.live.check_if_known(address, size, codes.INVALID_PARAM)
    image = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return read_om_image(image, f"the model at {address:#x}", weight_directory)


def check_fits_device(header: OmHeader, soc_name: str, label: str) -> None:
    """Refuses a model compiled for another SoC or host, or with what the SoC does not have.

    Raises:
        AclFailure: 545001.
    """
    if header.soc_version != soc_name:
        raise _unfit(
            label,
            f"soc version not supported: compiled for {header.soc_version}, the device is "
            f"{soc_name}",
        )
    soc = find_soc(soc_name)
    if soc is not None and header.has_ranges and not soc.has_dynamic_shape:
        raise _unfit(label, f"{soc_name} has no dynamic shape (ranges); compile it with gears")
    if soc is not None and header.has_bfloat16 and not soc.has_bfloat16:
        raise _unfit(label, f"{soc_name} has no bfloat16; convert the model to float16")
    host = f"linux_{platform.machine()}"
    if header.host not in ("", host):
        raise _unfit(label, f"holds code for {header.host}, this host is {host}")


def _unfit(label: str, why: str) -> AclFailure:
    return AclFailure(codes.GE_LOAD_MODEL, f"{label}: {why}")
