"""The functions that pyACL has at top level: init, finalize, versions, numbers, data buffers."""

from __future__ import annotations

import logging

from runtime_cache.aclsim import codes, init_config, settings
from runtime_cache.aclsim.calling import not_modelled, surface
from runtime_cache.aclsim.datasets import DataBuffer
from runtime_cache.aclsim.failure import AclFailure, recent_messages
from runtime_cache.aclsim.half import float_to_half, half_to_float
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl")
app_logger = logging.getLogger("acl.app_log")

#: Of the surface: `acl.h` of CANN 8.1 and 9.0 calls itself 1.15.0.
_VERSION = (1, 15, 0)
_LOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_ATTRIBUTES = range(3)  # infinities and NaN in float32, bfloat16, compilation at run time
_BFLOAT16 = 1
_NO_VERSION = {
    "version": "",
    "major_version": "",
    "minor_version": "",
    "release_version": "",
    "patch_version": "",
    "reserved": "",
}


@acl_function("|s")
def init(config_path: str = "") -> None:
    """Starts ACL. The first call fixes the settings; repeats give 100002 and are harmless.

    Of a configuration file, `err_msg_mode` and `defaultDevice` have an effect; other keys leave a
    sentence that says they have none. 100003 for a file that is not there, 100006 for one that is
    no JSON object; a repeat with a file that says something else is 100000.
    """
    process = this_process()
    asked = init_config.read(config_path)
    default_device = init_config.default_device(asked)
    if process.num_inits and config_path and asked != process.init_config:
        raise AclFailure(codes.INVALID_PARAM, f"acl.init had another configuration: {config_path}")
    if process.num_inits == 0:
        process.start(settings.current())
    process.num_inits += 1
    if process.num_inits > 1:
        raise AclFailure(codes.REPEAT_INITIALIZE, "acl.init was called before")
    process.init_config, process.default_device_id = asked, default_device
    init_config.apply(asked)


@acl_function("")
def finalize() -> None:
    """Ends ACL at once, however often it was started; 100037 when it is not started."""
    process = this_process()
    if process.num_inits == 0:
        raise AclFailure(codes.REPEAT_FINALIZE, "acl.finalize without acl.init")
    process.end()


@acl_function("", failed=(0,))
def finalize_reference() -> int:
    """Ends ACL once, and really at the last time; returns how many starts are left."""
    process = this_process()
    if process.num_inits == 0:
        raise AclFailure(codes.REPEAT_FINALIZE, "acl.finalize_reference without acl.init")
    if process.num_inits == 1:
        process.end()
        return 0
    process.num_inits -= 1
    return process.num_inits


@acl_function("", failed=(0, 0, 0))
def get_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the interface, not of CANN."""
    return _VERSION


@acl_function("I", failed=(_NO_VERSION,))
def get_cann_version(pkg: int) -> dict[str, str]:
    """There is no CANN here: 207000, and a dict of empty texts."""
    sentence = f"package {pkg}: the software device has no CANN, and no version of it"
    raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, sentence)


@acl_function("i", failed=(0,))
def get_cann_attribute(attr: int) -> int:
    """1 if the SoC has bfloat16 (attribute 1), else 0. The others known (0, 2) are 207000."""
    process = this_process()
    process.require_init()
    if attr not in _ATTRIBUTES:
        raise AclFailure(codes.INVALID_PARAM, f"attribute {attr} is unknown")
    if attr != _BFLOAT16 or process.config.soc is None:
        raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, f"attribute {attr} is not modelled")
    return int(process.config.soc.has_bfloat16)


get_device_capability = not_modelled("acl.get_device_capability", "Ii", 0)


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


@acl_function("is", plain=None)
def app_log(level: int, text: str) -> None:
    """Logs as `acl.app_log`; level 0 debug to 3 error. Other levels say nothing."""
    if level in range(len(_LOG_LEVELS)):
        app_logger.log(_LOG_LEVELS[level], "%s", text)


# --- numbers ---


@acl_function("i", plain=0)
def data_type_size(dtype: int) -> int:
    """Bytes of one element; 0 for an unknown type."""
    return codes.DTYPE_BYTES.get(dtype, 0)


@acl_function("H", plain=0.0)
def float16_to_float(value: int) -> float:
    """The value of 16 bits; infinity counts on, as 65536."""
    return half_to_float(value)


@acl_function("f", plain=0)
def float_to_float16(value: float) -> int:
    """The 16 bits nearest to a value; saturates at 65504."""
    return float_to_half(value)


# --- data buffers ---


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
