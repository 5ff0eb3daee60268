"""One device, opened: init, context, stream, memory, copies.

Everything here runs on the device thread. What this file opens it closes, in the reverse order;
what was allocated through it is freed by its owner before that.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime_cache.device.acl_api import AclModule, CopyKind, MallocPolicy, MemAttr, RunMode
from runtime_cache.device.acl_codes import (
    REPEAT_FINALIZE,
    REPEAT_INITIALIZE,
    AclClass,
    check,
    class_of,
)
from runtime_cache.device.teardown import Teardown
from runtime_cache.errors import DeviceLost

#: As pyACL wants it: a plain int. This one is passed for every row of every step.
_ON_DEVICE = int(CopyKind.DEVICE_TO_DEVICE)


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory as the driver counts it, other processes' included [bytes]."""

    free_bytes: int
    total_bytes: int


class _Inits:
    """Who of this process has pyACL started: `finalize` ends it at once, for all users.

    So the first device opened here starts it and the last one closed ends it, on whatever thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users: dict[AclModule, int] = {}

    def enter(self, acl: AclModule) -> bool:
        """Starts pyACL, or joins those who use it; False if another library has started it.

        Raises:
            AclError: it does not start.
        """
        with self._lock:
            code = acl.init()
            if code != REPEAT_INITIALIZE:
                check("acl.init", code, acl)
                self._num_users[acl] = 0
            elif not self._num_users.get(acl):
                return False  # `finalize` would end it for that library as well
            self._num_users[acl] += 1
            return True

    def leave(self, acl: AclModule) -> None:
        """Ends pyACL if nobody is left.

        Raises:
            AclError: the driver refused; it counts as ended.
        """
        with self._lock:
            self._num_users[acl] -= 1
            if self._num_users[acl]:
                return
            code = acl.finalize()
            if code != REPEAT_FINALIZE:
                check("acl.finalize", code, acl)


_inits = _Inits()


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Pinned host memory.

    Attributes:
        ptr: address, as pyACL takes it.
        view: the same bytes [uint8, num_bytes]; dead once the buffer is freed.
    """

    ptr: int
    num_bytes: int
    view: npt.NDArray[np.uint8]

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A view of part of the buffer [shape, dtype], `offset` bytes from its start."""
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=self.view.data, offset=offset)
        return array


class AclDevice:
    """An opened device with one context and one stream.

    Attributes:
        acl: the module all calls go to.
        stream: the one stream of the driver; copies and runs take effect in its order.
        run_mode: on a host with a card, or on the device's own CPU.
        soc_name: as the driver reports it, or `unknown`.
    """

    def __init__(self, acl: AclModule, device_id: int) -> None:
        """Use `AclDevice.open`."""
        self.acl = acl
        self.device_id = device_id
        self.stream = 0
        self.run_mode = RunMode.HOST
        self.soc_name = "unknown"
        self._teardown = Teardown()

    @classmethod
    def open(cls, acl: AclModule, device_id: int) -> AclDevice:
        """Initialises pyACL, takes the device, makes a context and a stream.

        The context is current in the calling thread alone: every later call belongs there.

        Raises:
            AclError: a call failed; what was opened before it is closed again.
        """
        device = cls(acl, device_id)
        with device._teardown.undo_on_error():
            device._init()
            device._take()
        return device

    def close(self) -> None:
        """Destroys stream and context, gives the device back, finalises. Idempotent.

        Raises:
            DeviceError: the first failure, after everything was tried.
        """
        self._teardown.close()

    def memory_info(self) -> MemoryInfo | None:
        """Free and total device memory, or None if the driver does not say. May be asked any time.

        Cards count HBM, the small boards DDR; the wrong question is answered with 0, 0.

        Raises:
            AclError: the driver refused.
        """
        for attr in (MemAttr.HBM, MemAttr.DDR):
            free_bytes, total_bytes, code = self.acl.rt.get_mem_info(attr)
            check("acl.rt.get_mem_info", code, self.acl)
            if total_bytes:
                return MemoryInfo(free_bytes, total_bytes)
        return None

    def check_status(self) -> None:
        """Asks the driver whether the device is in order; builds that cannot tell pass.

        Source: api_docs/aclrtQueryDeviceStatus.md of CANN 9.0 (0 normal, 1 abnormal).

        Raises:
            DeviceLost: it says that it is not, or that it is gone.
            AclError: it refused.
        """
        if not hasattr(self.acl.rt, "query_device_status"):
            return
        status, code = self.acl.rt.query_device_status(self.device_id)
        if class_of(code) is AclClass.CALLER:  # not for this device
            return
        check("acl.rt.query_device_status", code, self.acl)
        if status:
            detail = "the driver says that the device is not in order"
            raise DeviceLost("acl.rt.query_device_status", status, "abnormal", detail)

    def malloc(self, num_bytes: int) -> int:
        """Allocates device memory [uninitialised, 64-byte aligned]; the caller frees it.

        Raises:
            OutOfDeviceMemory: no room; nothing was allocated.
            AclError: the driver refused.
        """
        ptr, code = self.acl.rt.malloc(num_bytes, MallocPolicy.HUGE_FIRST)
        check("acl.rt.malloc", code, self.acl)
        return ptr

    def free(self, ptr: int) -> None:
        """Frees device memory. Nothing queued may still use it: `free` does not wait.

        Raises:
            AclError: the driver refused.
        """
        check("acl.rt.free", self.acl.rt.free(ptr), self.acl)

    def malloc_host(self, num_bytes: int) -> HostBuffer:
        """Allocates pinned host memory [uninitialised, 64-byte aligned]; the caller frees it.

        Raises:
            OutOfDeviceMemory: no room; nothing was allocated.
            AclError: the driver refused.
        """
        ptr, code = self.acl.rt.malloc_host(num_bytes)
        check("acl.rt.malloc_host", code, self.acl)
        raw = (ctypes.c_ubyte * num_bytes).from_address(ptr)
        return HostBuffer(ptr, num_bytes, np.frombuffer(memoryview(raw), np.uint8))

    def free_host(self, buffer: HostBuffer) -> None:
        """Frees pinned host memory. Nothing queued may still use it.

        Raises:
            AclError: the driver refused.
        """
        check("acl.rt.free_host", self.acl.rt.free_host(buffer.ptr), self.acl)

    def fill_zero(self, ptr: int, num_bytes: int) -> None:
        """Zeroes device memory at once, in no stream's order.

        Raises:
            AclError: the driver refused.
        """
        check("acl.rt.memset", self.acl.rt.memset(ptr, num_bytes, 0, num_bytes), self.acl)

    def copy_to_device(self, dst: int, src: int, num_bytes: int) -> None:
        """Queues a copy from pinned host to device memory; done once `synchronize` returns.

        Raises:
            AclError: the driver refused.
        """
        self._copy(dst, src, num_bytes, self._to_device)

    def copy_to_host(self, dst: int, src: int, num_bytes: int) -> None:
        """Queues a copy from device to pinned host memory; done once `synchronize` returns.

        Raises:
            AclError: the driver refused.
        """
        self._copy(dst, src, num_bytes, self._to_host)

    def copy_on_device(self, dst: int, src: int, num_bytes: int) -> None:
        """Queues a copy within device memory; done once `synchronize` returns.

        Raises:
            AclError: the driver refused.
        """
        code = self.acl.rt.memcpy_async(dst, num_bytes, src, num_bytes, _ON_DEVICE, self.stream)
        if code:  # `check` itself takes its time, and this is called for every row of a step
            check("acl.rt.memcpy_async", code, self.acl)

    def synchronize(self, timeout_ms: int) -> None:
        """Waits for all queued work (the interpreter runs other threads meanwhile).

        Raises:
            AclError: queued work failed; with a code of the class TIMEOUT it goes on, or may.
            DeviceLost: a sticky failure.
        """
        code = self.acl.rt.synchronize_stream_with_timeout(self.stream, timeout_ms)
        check("acl.rt.synchronize_stream_with_timeout", code, self.acl)

    def _copy(self, dst: int, src: int, num_bytes: int, kind: int) -> None:
        code = self.acl.rt.memcpy_async(dst, num_bytes, src, num_bytes, kind, self.stream)
        check("acl.rt.memcpy_async", code, self.acl)

    @property
    def _to_device(self) -> int:
        return _ON_DEVICE if self._shares_memory else int(CopyKind.HOST_TO_DEVICE)

    @property
    def _to_host(self) -> int:
        return _ON_DEVICE if self._shares_memory else int(CopyKind.DEVICE_TO_HOST)

    @property
    def _shares_memory(self) -> bool:
        """On the device's own CPU `malloc_host` gives device memory too, and all copies are D2D."""
        return self.run_mode is RunMode.DEVICE

    def _init(self) -> None:
        if _inits.enter(self.acl):
            self._teardown.push(lambda: _inits.leave(self.acl))

    def _take(self) -> None:
        acl, rt = self.acl, self.acl.rt
        check("acl.rt.set_device", rt.set_device(self.device_id), acl)
        self._teardown.push(self._reset)
        context, code = rt.create_context(self.device_id)
        check("acl.rt.create_context", code, acl)
        self._teardown.push(
            lambda: check("acl.rt.destroy_context", rt.destroy_context(context), acl)
        )
        self.stream, code = rt.create_stream()
        check("acl.rt.create_stream", code, acl)
        self._teardown.push(
            lambda: check("acl.rt.destroy_stream", rt.destroy_stream(self.stream), acl)
        )
        mode, code = rt.get_run_mode()
        check("acl.rt.get_run_mode", code, acl)
        self.run_mode = RunMode(mode)
        self.soc_name = acl.get_soc_name() or "unknown"

    def _reset(self) -> None:
        check("acl.rt.reset_device", self.acl.rt.reset_device(self.device_id), self.acl)
