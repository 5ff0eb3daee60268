"""Tensor descriptions (`aclTensorDesc`): a type, a shape and a format that programs hand to ACL.

Models with ranges take them for the shapes of inputs and give them for the shapes of outputs; only
the dims matter there. A description owns no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure

#: More dims than this have no description (`ACL_MAX_DIM_CNT`, acl_mdl.h of CANN 9.0).
MAX_DIMS = 128
#: What a shape of unknown rank is written as, and the number of dims it then has
#: (`ACL_UNKNOWN_RANK`, acl_base.h of CANN 9.0).
UNKNOWN_RANK_DIMS = (-2,)
UNKNOWN_RANK = 0xFFFFFFFFFFFFFFFE
MEM_TYPES = range(3)  # device, host, host with the value unknown to the compiler


@dataclass(eq=False)
class TensorDesc:
    """One description.

    Attributes:
        acl_dtype: `aclDataType`.
        dims: elements of each axis; empty for a scalar, -1 for what is not known.
        acl_format: `aclFormat`.
        name: "" until set.
        storage_dims, storage_format: how the tensor lies in memory, when said apart.
        ranges: (least, most) of each axis that is not known.
        mem_type: 0 device, 1 host, 2 host and independent of compilation.
        constant: (pointer, bytes) of a value known beforehand, or None.
    """

    acl_dtype: int
    dims: tuple[int, ...]
    acl_format: int
    name: str = ""
    storage_dims: tuple[int, ...] | None = None
    storage_format: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    mem_type: int = 0
    constant: tuple[int, int] | None = field(default=None)

    @property
    def num_dims(self) -> int:
        """Number of axes; UNKNOWN_RANK if not even that is known."""
        return UNKNOWN_RANK if self.dims == UNKNOWN_RANK_DIMS else len(self.dims)

    @property
    def element_count(self) -> int:
        """Product of the dims, 1 for a scalar; 0 while an axis is unknown."""
        return 0 if any(dim < 0 for dim in self.dims) else math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements; 0 if the type has no size in whole bytes."""
        return self.element_count * codes.DTYPE_BYTES.get(self.acl_dtype, 0)

    def dim(self, index: int) -> int:
        """Elements of one axis.

        Raises:
            AclFailure: 100000 for an index beyond the last axis.
        """
        if index >= len(self.dims):
            raise AclFailure(codes.INVALID_PARAM, f"dim {index} of {len(self.dims)}")
        return self.dims[index]

    def copied(self) -> TensorDesc:
        """A description of its own with the same contents."""
        return replace(self)


def make_tensor_desc(acl_dtype: int, dims: Sequence[int], acl_format: int) -> TensorDesc:
    """A description.

    Raises:
        AclFailure: 100000 for more dims than ACL takes.
    """
    if len(dims) > MAX_DIMS:
        raise AclFailure(codes.INVALID_PARAM, f"{len(dims)} dims, at most {MAX_DIMS}")
    return TensorDesc(acl_dtype, tuple(dims), acl_format)
