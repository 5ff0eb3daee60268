"""The Ascend device in software: a module with the surface of `acl` (pyACL, CANN 8.x and 9.0).

Takes the place of the vendor's module under unchanged driver code, chosen by name and never as a
fallback. It is stricter than a card: own address space, poisoned memory, real asynchrony, bounds
and lifetime checks. Not a performance model: models run on the CPU through ONNX Runtime.

Beside the surface: `settings` (what device), `faults` (scripted failures), `inspect` (what is
alive, what was called), and `python -m runtime_cache.aclsim`: `run` runs a program that says
`import acl`, `atc` is the model compiler. `module.acl_modules` has the surface and nothing else.
"""

from __future__ import annotations

from runtime_cache.aclsim import mdl, rt, util
from runtime_cache.aclsim.base import (
    app_log,
    create_data_buffer,
    data_type_size,
    destroy_data_buffer,
    finalize,
    finalize_reference,
    float16_to_float,
    float_to_float16,
    get_cann_attribute,
    get_cann_version,
    get_data_buffer_addr,
    get_data_buffer_size,
    get_data_buffer_size_v2,
    get_device_capability,
    get_recent_err_msg,
    get_soc_name,
    get_version,
    init,
    update_data_buffer,
)
from runtime_cache.aclsim.families import (
    blas,
    fv,
    himpi,
    media,
    op,
    prof,
)
from runtime_cache.aclsim.tensors import (
    create_tensor_desc,
    destroy_tensor_desc,
    get_tensor_desc_address,
    get_tensor_desc_dim,
    get_tensor_desc_dim_v2,
    get_tensor_desc_element_count,
    get_tensor_desc_format,
    get_tensor_desc_name,
    get_tensor_desc_num_dims,
    get_tensor_desc_size,
    get_tensor_desc_type,
    set_tensor_const,
    set_tensor_desc_name,
    set_tensor_format,
    set_tensor_place_ment,
    set_tensor_shape,
    set_tensor_shape_range,
)

__all__ = [
    "app_log",
    "blas",
    "create_data_buffer",
    "create_tensor_desc",
    "data_type_size",
    "destroy_data_buffer",
    "destroy_tensor_desc",
    "finalize",
    "finalize_reference",
    "float16_to_float",
    "float_to_float16",
    "fv",
    "get_cann_attribute",
    "get_cann_version",
    "get_data_buffer_addr",
    "get_data_buffer_size",
    "get_data_buffer_size_v2",
    "get_device_capability",
    "get_recent_err_msg",
    "get_soc_name",
    "get_tensor_desc_address",
    "get_tensor_desc_dim",
    "get_tensor_desc_dim_v2",
    "get_tensor_desc_element_count",
    "get_tensor_desc_format",
    "get_tensor_desc_name",
    "get_tensor_desc_num_dims",
    "get_tensor_desc_size",
    "get_tensor_desc_type",
    "get_version",
    "himpi",
    "init",
    "mdl",
    "media",
    "op",
    "prof",
    "rt",
    "set_tensor_const",
    "set_tensor_desc_name",
    "set_tensor_format",
    "set_tensor_place_ment",
    "set_tensor_shape",
    "set_tensor_shape_range",
    "update_data_buffer",
    "util",
]
