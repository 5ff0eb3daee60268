"""The functions that pyACL has at top level: init, finalize, error text, data buffers."""

from __future__ import annotations

from runtime_cache.aclsim import codes, settings
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.datasets import DataBuffer
from runtime_cache.aclsim.failure import AclFailure, recent_messages
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl")


@acl_function("|s")
def init(config_path: str = "") -> None:
    """Starts ACL. The first call fixes the settings; repeats give 100002 and are harmless."""
    process = this_process()
    process.num_inits += 1
    if process.num_inits > 1:
        raise AclFailure(codes.REPEAT_INITIALIZE, "acl.init was called before")
    process.start(settings.current())


@acl_function("")
def finalize() -> None:
    """Ends ACL at once, however often it was started; 100037 when it is not started."""
    process = this_process()
    if process.num_inits == 0:
        raise AclFailure(codes.REPEAT_FINALIZE, "acl.finalize without acl.init")
    process.num_inits = 0


@acl_function("", plain=None)
def get_soc_name() -> str:
    """The SoC, such as Ascend310P3; None before init."""
    process = this_process()
    process.require_init()
    return process.config.soc_name


@acl_function("", plain=None)
def get_recent_err_msg() -> str | None:
    """What went wrong in this thread since the last call, newest first, or None."""
    return recent_messages.take()


@acl_function("kk", plain=0)
def create_data_buffer(ptr: int, size: int) -> int:
    """A (pointer, size) pair for datasets. Owns nothing."""
    return this_process().buffers.add(DataBuffer(ptr, size))


@acl_function("kkk")
def update_data_buffer(buffer: int, ptr: int, size: int) -> None:
    """Points a buffer elsewhere; work already queued keeps the old pointer."""
    found = this_process().buffers.get(buffer)
    found.address, found.size_bytes = ptr, size


@acl_function("k", plain=0)
def get_data_buffer_addr(buffer: int) -> int:
    """The pointer."""
    return this_process().buffers.get(buffer).address


@acl_function("k", plain=0)
def get_data_buffer_size(buffer: int) -> int:
    """The size, cut to 32 bits as in C."""
    return this_process().buffers.get(buffer).size_bytes & 0xFFFFFFFF


@acl_function("k", plain=0)
def get_data_buffer_size_v2(buffer: int) -> int:
    """The size."""
    return this_process().buffers.get(buffer).size_bytes


@acl_function("k")
def destroy_data_buffer(buffer: int) -> None:
    """Forgets the pair; the memory stays."""
    this_process().buffers.remove(buffer)
