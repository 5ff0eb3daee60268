"""The functions of `acl` for tensor descriptions; `tensor_descs` says what one is."""

from __future__ import annotations

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.arguments import int_list, pair_list
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import this_process
from runtime_cache.aclsim.tensor_descs import MAX_DIMS, MEM_TYPES, TensorDesc, make_tensor_desc

acl_function = surface("acl")

_UNDEFINED = -1


def _desc(handle: int) -> TensorDesc:
    return this_process().tensor_descs.get(handle)


@acl_function("iOi", plain=0)
def create_tensor_desc(dtype: int, dims: object, format: int) -> int:
    """A description; 0 for more than 128 dims. Dims are a list of ints, [] for a scalar."""
    desc = make_tensor_desc(dtype, int_list(dims, 2), format)
    return this_process().tensor_descs.add(desc)


@acl_function("k", plain=None)
def destroy_tensor_desc(desc: int) -> None:
    """Forgets a description. Returns nothing, whatever the handle."""
    this_process().tensor_descs.remove(desc)


@acl_function("k", plain=_UNDEFINED)
def get_tensor_desc_type(desc: int) -> int:
    """ACL data type; -1 for a bad handle."""
    return _desc(desc).acl_dtype


@acl_function("k", plain=_UNDEFINED)
def get_tensor_desc_format(desc: int) -> int:
    """ACL format, as created; -1 for a bad handle."""
    return _desc(desc).acl_format


@acl_function("k", plain=0)
def get_tensor_desc_size(desc: int) -> int:
    """Bytes; 0 while an axis is unknown, and for a bad handle."""
    return _desc(desc).size_bytes


@acl_function("k", plain=0)
def get_tensor_desc_element_count(desc: int) -> int:
    """Elements; 0 while an axis is unknown, and for a bad handle."""
    return _desc(desc).element_count


@acl_function("k", plain=0)
def get_tensor_desc_num_dims(desc: int) -> int:
    """Axes; 0xFFFFFFFFFFFFFFFE for unknown rank, 0 for a bad handle."""
    return _desc(desc).num_dims


@acl_function("kk", plain=_UNDEFINED)
def get_tensor_desc_dim(desc: int, index: int) -> int:
    """Elements of an axis; -1 for a bad handle or index."""
    return _desc(desc).dim(index)


@acl_function("kk", failed=(0,))
def get_tensor_desc_dim_v2(desc: int, index: int) -> int:
    """Elements of an axis."""
    return _desc(desc).dim(index)


@acl_function("k", plain="")
def get_tensor_desc_name(desc: int) -> str:
    """The name, "" until it is set and for a bad handle."""
    return _desc(desc).name


@acl_function("ks", plain=None)
def set_tensor_desc_name(desc: int, name: str) -> None:
    """Names the tensor. Returns nothing, whatever the handle."""
    _desc(desc).name = name


@acl_function("k", plain=0)
def get_tensor_desc_address(desc: int) -> int:
    """0: no tensor here carries an address."""
    _desc(desc)
    return 0


@acl_function("kO")
def set_tensor_shape(desc: int, dims: object) -> None:
    """Says how the tensor lies in memory; `get_tensor_desc_dim` goes on with the shape created."""
    shape = tuple(int_list(dims, 2))
    if len(shape) > MAX_DIMS:
        raise AclFailure(codes.INVALID_PARAM, f"{len(shape)} dims, at most {MAX_DIMS}")
    _desc(desc).storage_dims = shape


@acl_function("ki")
def set_tensor_format(desc: int, format: int) -> None:
    """Says the format in memory; `get_tensor_desc_format` goes on with the one created.

    Stricter than a card, which takes any handle here and returns 0.
    """
    _desc(desc).storage_format = format


@acl_function("kO")
def set_tensor_shape_range(desc: int, ranges: object) -> None:
    """Says [least, most] of each axis."""
    _desc(desc).ranges = tuple(pair_list(ranges, 2))


@acl_function("ki")
def set_tensor_place_ment(desc: int, mem_type: int) -> None:
    """Says where the tensor lies: 0 device, 1 host, 2 host and independent of compilation."""
    found = _desc(desc)
    if mem_type not in MEM_TYPES:
        raise AclFailure(codes.INVALID_PARAM, f"memory type {mem_type} is not 0..2")
    found.mem_type = mem_type


@acl_function("kkk")
def set_tensor_const(desc: int, ptr: int, size: int) -> None:
    """Says that the value is known beforehand."""
    found = _desc(desc)
    if ptr == 0 or size == 0:
        raise AclFailure(codes.INVALID_PARAM, "null pointer or size 0")
    found.constant = (ptr, size)
