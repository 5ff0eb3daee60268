"""`acl.util` in software: addresses of bytes, bytes of addresses, arrays, threads.

The three functions for numpy arrays are about to be removed from pyACL, and warn at each call.
They import numpy in the call, so that `import acl` needs none.
"""

from __future__ import annotations

import ctypes
import errno
import math
import sys
import typing
import warnings
from collections.abc import Callable
from typing import Any

from runtime_cache.aclsim import codes, copies, threads
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.memory import is_host_readable
from runtime_cache.aclsim.numpy_types import dtype_of

if typing.TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

acl_function = surface("acl.util")

_CALLER = 4  # stack level of the program's line: _warn, body, call, program


def _references_of_a_call() -> int:
    """Reference count, seen in a function's body, of an object that only the call itself holds."""

    def body(data: object) -> int:
        return sys.getrefcount(data)

    def call(*args: Any) -> int:  # as the calling convention does it
        values = [*args]
        return body(*values)

    return call(bytes(bytearray(2)))


_REFERENCES_OF_A_CALL = _references_of_a_call()


@acl_function("O", plain=0)
def bytes_to_ptr(data: object) -> int:
    """The address inside an immutable bytes object; the caller keeps the object.

    Raises:
        ValueError: anything but bytes.
    """
    if not isinstance(data, bytes):
        raise ValueError("bytes_to_ptr takes bytes")
    if sys.getrefcount(data) <= _REFERENCES_OF_A_CALL:
        sentence = "got bytes that nothing else holds: they go when it returns, the pointer dangles"
        ledger.note_misuse(f"acl.util.bytes_to_ptr {sentence}", "dangling")
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return address or 0


@acl_function("kk", plain=b"")
def ptr_to_bytes(ptr: int, size: int) -> bytes:
    """A copy of host memory. A card's device address, which would crash there, gives b""."""
    return copies.read_host("acl.util.ptr_to_bytes", ptr, size, codes.INVALID_PARAM)


# --- numpy ---


def _warn(sentence: str) -> None:
    """A plain Warning at the program's own line."""
    warnings.warn(sentence, Warning, stacklevel=_CALLER)


def _array(value: object) -> npt.NDArray[Any]:
    """A numpy array as it is.

    Raises:
        ValueError: anything else.
    """
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise ValueError("needs an ndarray")
    return value


@acl_function("O", plain=0)
def numpy_to_ptr(ndarray: object) -> int:
    """The address of an array's first element; one more Warning if it is not contiguous.

    Raises:
        ValueError: no array.
    """
    _warn("acl.util.numpy_to_ptr goes away; acl.util.bytes_to_ptr takes its place")
    array = _array(ndarray)
    if not array.flags.c_contiguous:
        _warn("the array is not contiguous, so that its address does not lead to its elements")
    return array.ctypes.data


@acl_function("O", plain=(0, None))
def numpy_contiguous_to_ptr(ndarray: object) -> tuple[int, npt.NDArray[Any]]:
    """(address, array): of the array itself if it is contiguous, else of a copy. Keep the array.

    Raises:
        ValueError: no array.
    """
    _warn("acl.util.numpy_contiguous_to_ptr goes away; acl.util.bytes_to_ptr takes its place")
    import numpy as np

    array = np.ascontiguousarray(_array(ndarray))
    return array.ctypes.data, array


@acl_function("kOi", plain=None)
def ptr_to_numpy(ptr: int, shape: object, npy_type: int) -> npt.NDArray[Any]:
    """A writable view of host memory, which it does not own. `npy_type` is numpy's own number.

    Raises:
        TypeError: the shape is no tuple of ints.
        ValueError: no such type number; a null pointer, or a device address of a card, which would
            crash there.
    """
    _warn("acl.util.ptr_to_numpy goes away; acl.util.ptr_to_bytes takes its place")
    if not isinstance(shape, tuple) or not all(isinstance(dim, int) for dim in shape):
        raise TypeError("the shape is no tuple of ints")
    if ptr == 0 or not is_host_readable(ptr):
        raise ValueError(f"{ptr:#x} is not readable from the host")
    return _view(ptr, shape, dtype_of(npy_type))


def _view(ptr: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    import numpy as np

    count_bytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * count_bytes).from_address(ptr)
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, memoryview(memory))
    return array


# --- threads ---


@acl_function("OO", failed=(0,))
def start_thread(fn: Callable[..., Any], arg: object) -> int:
    """Starts a thread that calls `fn(arg)`, or `fn()` for None; returns its id.

    Resets SIGINT to the default action in the whole process, as on a card.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError("the first argument cannot be called")
    return threads.start(fn, () if arg is None else (arg,))


@acl_function("K", plain=errno.ESRCH)
def stop_thread(thread_id: int) -> int:
    """Waits for a thread; 3 (ESRCH) for one that was not started here, or stopped before.

    Raises:
        RuntimeError: the thread's function raised; the type's name is in the message.
    """
    thread = threads.stop(thread_id)
    if thread is None:
        raise AclFailure(codes.INVALID_PARAM, f"no thread {thread_id} was started")
    if thread.raised is not None:
        raise RuntimeError(f"exception={type(thread.raised).__name__},msg=thread call failed;")
    return 0
