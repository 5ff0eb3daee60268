"""`acl.mdl` in software: descriptions of models, their inputs and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.descs import Desc, DescEntry
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ABSENT
from runtime_cache.aclsim.loading import model_of, om_in_memory
from runtime_cache.aclsim.om import read_om
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl.mdl")


def desc_of(handle: int) -> Desc:
    """The description behind a handle; 100000 if there is none."""
    return this_process().descs.get(handle)


@acl_function("", plain=0)
def create_desc() -> int:
    """An empty description."""
    return this_process().descs.add(Desc())


@acl_function("kI")
def get_desc(desc: int, model_id: int) -> None:
    """Fills a description from a loaded model."""
    target, model = desc_of(desc), model_of(model_id)
    target.describe(model.header, model_id, model)


@acl_function("ks")
def get_desc_from_file(desc: int, path: str) -> None:
    """Fills a description from a file, without a device; it has no current output dims."""
    desc_of(desc).describe(read_om(path).header)


@acl_function("kkk")
def get_desc_from_mem(desc: int, ptr: int, size: int) -> None:
    """As `get_desc_from_file`, of a model in memory."""
    desc_of(desc).describe(om_in_memory(ptr, size).header)


@acl_function("k")
def destroy_desc(desc: int) -> None:
    """Forgets a description."""
    this_process().descs.remove(desc)


@acl_function("k", plain=0)
def get_num_inputs(desc: int) -> int:
    """Inputs, the gear selector included."""
    return len(desc_of(desc).inputs)


@acl_function("k", plain=0)
def get_num_outputs(desc: int) -> int:
    """Outputs."""
    return len(desc_of(desc).outputs)


@acl_function("kk", plain=0)
def get_input_size_by_index(desc: int, index: int) -> int:
    """Bytes of an input in its largest gear; 0 for a bad index, or if nothing bounds it."""
    return _entry(desc_of(desc).inputs, index).size_bytes


@acl_function("kk", plain=0)
def get_output_size_by_index(desc: int, index: int) -> int:
    """Bytes of an output in its largest gear; 0 for a bad index, or if runs decide its shape."""
    return _entry(desc_of(desc).outputs, index).size_bytes


@acl_function("kk", plain="")
def get_input_name_by_index(desc: int, index: int) -> str:
    """Name of an input; "" for a bad index."""
    return _entry(desc_of(desc).inputs, index).name


@acl_function("kk", plain="")
def get_output_name_by_index(desc: int, index: int) -> str:
    """Name of an output; "" for a bad index."""
    return _entry(desc_of(desc).outputs, index).name


@acl_function("ks", failed=(0,))
def get_input_index_by_name(desc: int, name: str) -> int:
    """Index of an input; 100000 for an unknown name."""
    return _index(desc_of(desc).inputs, name)


@acl_function("ks", failed=(0,))
def get_output_index_by_name(desc: int, name: str) -> int:
    """Index of an output; 100000 for an unknown name."""
    return _index(desc_of(desc).outputs, name)


@acl_function("kk", failed=({},))
def get_input_dims(desc: int, index: int) -> dict[str, Any]:
    """{name, dimCount, dims} of an input; -1 where gears or the run decide."""
    return _dims_of(_entry(desc_of(desc).inputs, index))


@acl_function("kk", failed=({},))
def get_input_dims_v2(desc: int, index: int) -> dict[str, Any]:
    """As `get_input_dims`: they differ for AIPP inputs only, which no model here has."""
    return _dims_of(_entry(desc_of(desc).inputs, index))


@acl_function("kk", failed=({},))
def get_output_dims(desc: int, index: int) -> dict[str, Any]:
    """{name, dimCount, dims} of an output in the largest gear; -1 where runs decide."""
    return _dims_of(_entry(desc_of(desc).outputs, index))


@acl_function("kk", failed=({},))
def get_cur_output_dims(desc: int, index: int) -> dict[str, Any]:
    """{name, dimCount, dims} of an output in the gear set last, else in the largest.

    100000 for a model with ranges (`get_dataset_tensor_desc` is for them) and for a description of
    a file.
    """
    found = desc_of(desc)
    entry = _entry(found.outputs, index)
    return dims_dict(entry.dims_name, found.current_output_dims(index))


@acl_function("kk", failed=({"rangeCount": 0, "range": []},))
def get_input_dims_range(desc: int, index: int) -> dict[str, Any]:
    """{rangeCount, range} of an input: [least, most] of each dim, most -1 if nothing bounds it.

    Both ends are the size for a static model; no ranges for one with gears.
    """
    ranges = _entry(desc_of(desc).inputs, index).ranges
    return {"rangeCount": len(ranges), "range": [list(bounds) for bounds in ranges]}


@acl_function("ks", plain=None)
def get_tensor_real_name(desc: int, name: str) -> str | None:
    """The name behind one that dims carry; None for an unknown one."""
    return desc_of(desc).real_name(name)


@acl_function("kk", plain=-1)
def get_input_data_type(desc: int, index: int) -> int:
    """ACL data type of an input; -1 for a bad index."""
    return _entry(desc_of(desc).inputs, index).acl_dtype


@acl_function("kk", plain=-1)
def get_output_data_type(desc: int, index: int) -> int:
    """ACL data type of an output; -1 for a bad index."""
    return _entry(desc_of(desc).outputs, index).acl_dtype


@acl_function("kk", plain=-1)
def get_input_format(desc: int, index: int) -> int:
    """ND, or NCHW or NHWC for 4 dims of a model compiled so; -1 for a bad index."""
    return _entry(desc_of(desc).inputs, index).acl_format


@acl_function("kk", plain=-1)
def get_output_format(desc: int, index: int) -> int:
    """As `get_input_format`, of an output."""
    return _entry(desc_of(desc).outputs, index).acl_format


@acl_function("kss", plain=None)
def get_op_attr(desc: int, op: str, attr: str) -> str:
    """An attribute of a compiled operator: not modelled, nothing is compiled to operators.

    Raises:
        NotImplementedError: always; the function returns no code that could say so.
    """
    raise NotImplementedError("acl.mdl.get_op_attr is not modelled by the software device")


def _entry(entries: Sequence[DescEntry], index: int) -> DescEntry:
    if index >= len(entries):
        raise AclFailure(codes.INVALID_PARAM, f"index {index} of {len(entries)}")
    return entries[index]


def _index(entries: Sequence[DescEntry], name: str) -> int:
    for index, entry in enumerate(entries):
        if entry.name == name:
            return index
    raise AclFailure(codes.INVALID_PARAM, f"{ABSENT} {name!r}")


def _dims_of(entry: DescEntry) -> dict[str, Any]:
    return dims_dict(entry.dims_name, entry.dims)


def dims_dict(name: str, dims: Sequence[int]) -> dict[str, Any]:
    """`aclmdlIODims` as pyACL has it."""
    return {"name": name, "dimCount": len(dims), "dims": list(dims)}
