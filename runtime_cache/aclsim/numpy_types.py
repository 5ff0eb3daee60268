"""numpy's own numbers for its types, as `acl.util.ptr_to_numpy` takes them. Imports numpy late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def dtype_of(number: int) -> np.dtype[Any]:
    """The type with a number, such as float32 for 11, float16 for 23, int64 for 7.

    Raises:
        ValueError: no such number.
    """
    import numpy as np

    for code in np.typecodes["All"]:
        if np.dtype(code).num == number:
            return np.dtype(code)
    raise ValueError(f"{number} is no type number of numpy")
