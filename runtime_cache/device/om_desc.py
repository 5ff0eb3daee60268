"""Reads what a loaded `.om` says of itself."""

from __future__ import annotations

from runtime_cache.device.acl_api import ALL_INPUTS, AclModule, Dims
from runtime_cache.device.acl_codes import check
from runtime_cache.device.om_contract import OmDesc, TensorDesc


def read_desc(acl: AclModule, model_id: int) -> OmDesc:
    """Describes a loaded model.

    Raises:
        AclError: the driver refused; nothing is left.
    """
    desc = acl.mdl.create_desc()
    try:
        check("acl.mdl.get_desc", acl.mdl.get_desc(desc, model_id), acl)
        num_inputs, num_outputs = acl.mdl.get_num_inputs(desc), acl.mdl.get_num_outputs(desc)
        return OmDesc(
            inputs=tuple(_read_input(acl, desc, index) for index in range(num_inputs)),
            outputs=tuple(_read_output(acl, desc, index) for index in range(num_outputs)),
            gears=_read_gears(acl, desc),
        )
    finally:
        check("acl.mdl.destroy_desc", acl.mdl.destroy_desc(desc), acl)


def _read_input(acl: AclModule, desc: int, index: int) -> TensorDesc:
    dims, code = acl.mdl.get_input_dims(desc, index)
    check("acl.mdl.get_input_dims", code, acl)
    return TensorDesc(
        name=acl.mdl.get_input_name_by_index(desc, index),
        data_type=acl.mdl.get_input_data_type(desc, index),
        dims=_dims(dims),
        num_bytes=acl.mdl.get_input_size_by_index(desc, index),
    )


def _read_output(acl: AclModule, desc: int, index: int) -> TensorDesc:
    dims, code = acl.mdl.get_output_dims(desc, index)
    check("acl.mdl.get_output_dims", code, acl)
    return TensorDesc(
        name=acl.mdl.get_output_name_by_index(desc, index),
        data_type=acl.mdl.get_output_data_type(desc, index),
        dims=_dims(dims),
        num_bytes=acl.mdl.get_output_size_by_index(desc, index),
    )


def _read_gears(acl: AclModule, desc: int) -> tuple[tuple[int, ...], ...]:
    count, code = acl.mdl.get_input_dynamic_gear_count(desc, ALL_INPUTS)
    check("acl.mdl.get_input_dynamic_gear_count", code, acl)
    if count == 0:
        return ()
    gears, code = acl.mdl.get_input_dynamic_dims(desc, ALL_INPUTS, count)
    check("acl.mdl.get_input_dynamic_dims", code, acl)
    return tuple(_dims(gear) for gear in gears)


def _dims(dims: Dims) -> tuple[int, ...]:
    return tuple(dims["dims"][: dims["dimCount"]])
