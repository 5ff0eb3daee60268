"""`acl.mdl` in software: models with gears, of dims, of batch sizes or of image sizes.

Each kind has its own functions, and none serves another kind. All write the selector input with an
immediate copy (GE 9.0).
"""

from __future__ import annotations

import struct
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.atc.shapes import GearKind
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.geared_models import GearedModel
from runtime_cache.aclsim.loading import model_of
from runtime_cache.aclsim.mdl.desc import desc_of, dims_dict
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl.mdl")

_ALL_INPUTS = (1 << 64) - 1
_MAX_GEARS_ASKED = 4096
_INT64 = 1 << 63
_NO_BATCH: dict[str, Any] = {"batchCount": 0, "batch": []}
_NO_IMAGE: dict[str, Any] = {"hwCount": 0, "hw": []}


@acl_function("kk", failed=(0,))
def get_input_dynamic_gear_count(desc: int, index: int) -> int:
    """Number of gears of dims; 0 for a model without. The index is -1."""
    if index != _ALL_INPUTS:
        raise AclFailure(codes.INVALID_PARAM, "the index must be -1")
    found = desc_of(desc)
    return len(found.gears) if found.gear_kind == "dims" else 0


@acl_function("kkk", failed=(None,))
def get_input_dynamic_dims(desc: int, index: int, gear_count: int) -> list[dict[str, Any]]:
    """One dims dict for each gear, over all inputs."""
    found = desc_of(desc)
    gears = found.gears if found.gear_kind == "dims" else []
    if index != _ALL_INPUTS or gear_count > _MAX_GEARS_ASKED or gear_count < len(gears):
        sentence = f"index must be -1 and gear_count {len(gears)}..{_MAX_GEARS_ASKED}"
        raise AclFailure(codes.INVALID_PARAM, sentence)
    return [dims_dict("", gear.flat_dims) for gear in gears]


@acl_function("IkkO")
def set_input_dynamic_dims(model_id: int, dataset: int, index: int, dims: object) -> None:
    """Chooses a gear by writing the selector buffer, now.

    Stricter than a card: 100000 while an execution of the dataset is queued, where a card would
    let the two race.
    """
    flat = _flat_dims(dims)
    model = _geared(model_id, "dims")
    _select(model, dataset, index, model.find_gear(flat))


def _flat_dims(dims: object) -> list[int]:
    """The dims of a dims dict: as many of its list as `dimCount` says.

    Source: pyACL's C++ source, hicann/runtime @134e2edb, `mdl_wrap.cpp`.

    Raises:
        TypeError: not a dict, no list, a count that is no int or above the list's length, or dims
            that are no real ints.
        RuntimeError: a name that is not a str.
        ValueError: a dim beyond 64 bits.
        AclFailure: 100000 for a count of 0.
    """
    if not isinstance(dims, dict) or not isinstance(dims.get("dims"), list):
        raise TypeError("dims must be a dict with a list under 'dims'")
    if not isinstance(dims.get("name", ""), str):
        raise RuntimeError("the name of the dims must be a str")
    count, listed = dims.get("dimCount"), dims["dims"]
    if not isinstance(count, int) or not 0 <= count <= len(listed):
        raise TypeError(f"dimCount {count!r} of a list of {len(listed)} dims")
    flat: list[int] = listed[:count]
    if not all(isinstance(dim, int) for dim in flat):
        raise TypeError("dims must be Python ints")
    if any(not -_INT64 <= dim < _INT64 for dim in flat):
        raise ValueError("a dim does not fit 64 bits")
    if not flat:
        raise AclFailure(codes.INVALID_PARAM, "dimCount 0")
    return flat


@acl_function("k", failed=({},))
def get_dynamic_batch(desc: int) -> dict[str, Any]:
    """{batchCount, batch} of a model with gears of batch sizes; 0 and [] for any other."""
    found = desc_of(desc)
    if found.gear_kind != "batch":
        return dict(_NO_BATCH)
    sizes = [gear.values[0] for gear in found.gears]
    return {"batchCount": len(sizes), "batch": sizes}


@acl_function("IkkK")
def set_dynamic_batch_size(model_id: int, dataset: int, index: int, batch: int) -> None:
    """Chooses a batch size, now; 100000 for 0, 145013 for one that was not compiled.

    Stricter than a card as `set_input_dynamic_dims`.
    """
    model = _geared(model_id, "batch")
    if batch == 0:
        raise AclFailure(codes.INVALID_PARAM, "batch size 0")
    _select(model, dataset, index, model.find_values([batch]))


@acl_function("kk", failed=({},))
def get_dynamic_hw(desc: int, index: int) -> dict[str, Any]:
    """{hwCount, hw} of a model with gears of image sizes; 0 and [] for any other.

    The index is not looked at, as the page of CANN 9.0 has it (reserved, -1).
    """
    found = desc_of(desc)
    if found.gear_kind != "image":
        return dict(_NO_IMAGE)
    sizes = [list(gear.values) for gear in found.gears]
    return {"hwCount": len(sizes), "hw": sizes}


@acl_function("IkkKK")
def set_dynamic_hw_size(model_id: int, dataset: int, index: int, height: int, width: int) -> None:
    """Chooses an image size, now; 100000 for a 0, 145013 for one that was not compiled.

    Stricter than a card as `set_input_dynamic_dims`.
    """
    model = _geared(model_id, "image")
    if height == 0 or width == 0:
        raise AclFailure(codes.INVALID_PARAM, f"image size {height} x {width}")
    _select(model, dataset, index, model.find_values([height, width]))


def _geared(model_id: int, kind: GearKind) -> GearedModel:
    """A model with gears of this kind.

    Raises:
        AclFailure: 100000 for a model whose shapes are set in another way.
    """
    model = model_of(model_id)
    if not isinstance(model, GearedModel) or model.gear_kind != kind:
        sentence = f"model {model_id} has no gears of {kind}; a model has one way to set its shapes"
        raise AclFailure(codes.INVALID_PARAM, sentence)
    return model


def _select(model: GearedModel, dataset: int, index: int, gear: int) -> None:
    """Writes a gear's values to the selector buffer of a dataset.

    Raises:
        AclFailure: 100000 while an execution of the dataset is queued or for an index that is not
            the selector's, 145012 for a short buffer, 145011 for one that is no device memory.
    """
    inputs = this_process().datasets.get(dataset)
    if inputs.num_queued:
        raise AclFailure(codes.INVALID_PARAM, "an execution of this dataset is queued")
    if index != len(model.header.inputs):
        raise AclFailure(codes.INVALID_PARAM, f"input {index} is no gear selector")
    if index >= len(inputs.buffers):
        raise AclFailure(codes.INVALID_PARAM, f"the dataset has no buffer {index}")
    buffer = inputs.buffers[index]
    if buffer.size_bytes < model.selector_bytes:
        sentence = f"selector buffer of {buffer.size_bytes} bytes, {model.selector_bytes} needed"
        raise AclFailure(codes.GE_SELECTOR_LENGTH_INVALID, sentence)
    values = model.header.gears[gear].values
    data = struct.pack(f"<{len(values)}i", *values)
    model.memory.write(buffer.address, data, codes.GE_SELECTOR_ADDRESS_INVALID)
    model.selected_gear = gear
