"""`acl.mdl` in software: loading, unloading, and what a load takes.

Source: aclmdlLoad* and aclmdlQuerySize* of CANN 9.0; sharing of lent memory from
aclmdlLoadFromFileWithMem.
"""

from __future__ import annotations

from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import not_modelled, surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.loading import lent_memory, load, load_with, model_of, om_in_memory
from runtime_cache.aclsim.model_configs import LoadConfig
from runtime_cache.aclsim.models import memory_needs
from runtime_cache.aclsim.om import OmFile, read_om
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl.mdl")


@acl_function("s", failed=(0,))
def load_from_file(model_path: str) -> int:
    """Loads an `.om` of the software device; external weights are found beside it."""
    return load(read_om(model_path))


@acl_function("kk", failed=(0,))
def load_from_mem(model_ptr: int, model_size: int) -> int:
    """Loads from memory: the host's on a card, either on a board. It may be freed afterwards."""
    return load(om_in_memory(model_ptr, model_size))


@acl_function("skkkk", failed=(0,))
def load_from_file_with_mem(
    model_path: str, work_ptr: int, work_size: int, weight_ptr: int, weight_size: int
) -> int:
    """Loads into memory of the program, which stays its own; a null pointer: the system's.

    Weight memory may serve several loads of the same `.om`, work memory several models that never
    run at once. It must live until the model is unloaded.
    """
    lent = lent_memory(work_ptr, work_size, weight_ptr, weight_size)
    return load(read_om(model_path), lent)


@acl_function("kkkkkk", failed=(0,))
def load_from_mem_with_mem(
    model_ptr: int,
    model_size: int,
    work_ptr: int,
    work_size: int,
    weight_ptr: int,
    weight_size: int,
) -> int:
    """`load_from_mem` into memory of the program, as `load_from_file_with_mem`."""
    lent = lent_memory(work_ptr, work_size, weight_ptr, weight_size)
    return load(om_in_memory(model_ptr, model_size), lent)


@acl_function("I")
def unload(model_id: int) -> None:
    """Unloads a model; 500002 while an execution is queued."""
    model = model_of(model_id)
    if model.num_queued:
        raise AclFailure(codes.GE_FAILURE, f"model {model_id} has {model.num_queued} runs queued")
    if this_process().models.pop(model_id, None) is None:
        sentence = f"model {model_id} was unloaded by another thread meanwhile"
        raise AclFailure(codes.GE_MODEL_ID_INVALID, sentence)
    model.unload()


@acl_function("s", failed=(0, 0))
def query_size(model_path: str) -> tuple[int, int]:
    """(work bytes, weight bytes) that loading the file takes; 100000 for a model with ranges."""
    return _sizes(read_om(model_path))


@acl_function("kk", failed=(0, 0))
def query_size_from_mem(model_ptr: int, model_size: int) -> tuple[int, int]:
    """As `query_size`, of a model in memory."""
    return _sizes(om_in_memory(model_ptr, model_size))


def _sizes(om: OmFile) -> tuple[int, int]:
    if om.header.has_ranges:
        sentence = f"{om.label} has ranges: what it takes is not known before it runs"
        raise AclFailure(codes.INVALID_PARAM, sentence)
    return memory_needs(om.header)


# --- options ---


@acl_function("", plain=0)
def create_config_handle() -> int:
    """An empty set of options."""
    return this_process().load_configs.add(LoadConfig())


@acl_function("kiO")
def set_config_opt(handle: int, attr: int, value: Any) -> None:
    """Sets an option: a str for the path (2), an int for all others.

    The weight directory (14) is an address of a text that ends with NUL; it is read by
    `load_with_config`, so the bytes must live until then.
    """
    this_process().load_configs.get(handle).set(attr, value)


@acl_function("k", failed=(0,))
def load_with_config(handle: int) -> int:
    """Loads as the options say; 100000 for missing or contradicting ones."""
    return load_with(this_process().load_configs.get(handle))


@acl_function("k")
def destroy_config_handle(handle: int) -> None:
    """Forgets the options; models loaded with them stay."""
    this_process().load_configs.remove(handle)


# --- bundles: made by the graph API of C++ alone, so there is nothing to load ---

bundle_load_from_file = not_modelled("acl.mdl.bundle_load_from_file", "s", 0)
bundle_load_from_mem = not_modelled("acl.mdl.bundle_load_from_mem", "kk", 0)
bundle_get_model_num = not_modelled("acl.mdl.bundle_get_model_num", "I", 0)
bundle_get_model_id = not_modelled("acl.mdl.bundle_get_model_id", "Ik", 0)
bundle_unload = not_modelled("acl.mdl.bundle_unload", "I")
