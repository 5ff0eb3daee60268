"""The Ascend device in software: a module with the surface of `acl` (pyACL, CANN 8.x and 9.0).

Takes the place of the vendor's module under unchanged driver code, chosen by name and never as a
fallback. It is stricter than a card: own address space, poisoned memory, real asynchrony, bounds
and lifetime checks. Not a performance model: models run on the CPU through ONNX Runtime.

Beside the surface: `settings` (what device), `faults` (scripted failures), `inspect` (what is
alive, what was called), and `python -m runtime_cache.aclsim atc` (the model compiler).
"""

from __future__ import annotations

from runtime_cache.aclsim import mdl, rt, util
from runtime_cache.aclsim.base import (
    create_data_buffer,
    destroy_data_buffer,
    finalize,
    get_data_buffer_addr,
    get_data_buffer_size,
    get_data_buffer_size_v2,
    get_recent_err_msg,
    get_soc_name,
    init,
    update_data_buffer,
)

__all__ = [
    "create_data_buffer",
    "destroy_data_buffer",
    "finalize",
    "get_data_buffer_addr",
    "get_data_buffer_size",
    "get_data_buffer_size_v2",
    "get_recent_err_msg",
    "get_soc_name",
    "init",
    "mdl",
    "rt",
    "update_data_buffer",
    "util",
]
