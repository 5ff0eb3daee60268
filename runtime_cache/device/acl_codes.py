"""pyACL return codes: their names, what each means to a daemon, and the one check of them.

Sources: names from the CANN 9.0 headers and aclError.md (page 0911). The classes are this
project's reading of what follows for a daemon: no manual says which code needs a device reset.
Codes of aclnn and of model bundles are not here: the driver calls neither.
"""

from __future__ import annotations

from enum import Enum

from runtime_cache.device.acl_api import AclModule
from runtime_cache.errors import AclError, DeviceLost, OutOfDeviceMemory

#: `acl.init`: another library of this process was first; harmless.
REPEAT_INITIALIZE = 100002
#: `acl.finalize`: another library of this process was first; harmless.
REPEAT_FINALIZE = 100037


class AclClass(Enum):
    """What a code means to a daemon."""

    BENIGN = "nothing is wrong"
    CALLER = "a wrong argument: our bug; the call had no effect"
    MODEL = "the .om does not suit this device or this driver"
    MEMORY = "no room on the device or host for an allocation"
    RESOURCE = "streams, events or model slots are used up"
    TIMEOUT = "waited too long; the work may still go on"
    TASK = "queued work failed; its results are suspect"
    DEVICE = "the device is lost to this process, whatever it calls"
    INSTALL = "the driver or its permissions are not set up"
    UNKNOWN = "not in the manuals this table was made from"


_CODES: dict[int, tuple[str, AclClass]] = {
    100000: ("ACL_ERROR_INVALID_PARAM", AclClass.CALLER),
    100001: ("ACL_ERROR_UNINITIALIZE", AclClass.CALLER),
    100002: ("ACL_ERROR_REPEAT_INITIALIZE", AclClass.BENIGN),
    100003: ("ACL_ERROR_INVALID_FILE", AclClass.CALLER),
    100011: ("ACL_ERROR_INVALID_MODEL_ID", AclClass.CALLER),
    100016: ("ACL_ERROR_MODEL_MISSING_ATTR", AclClass.MODEL),
    100017: ("ACL_ERROR_MODEL_INPUT_NOT_MATCH", AclClass.CALLER),
    100018: ("ACL_ERROR_MODEL_OUTPUT_NOT_MATCH", AclClass.CALLER),
    100019: ("ACL_ERROR_MODEL_NOT_DYNAMIC", AclClass.CALLER),
    100036: ("ACL_ERROR_WAIT_CALLBACK_TIMEOUT", AclClass.BENIGN),
    100037: ("ACL_ERROR_REPEAT_FINALIZE", AclClass.BENIGN),
    100039: ("ACL_ERROR_COMPILING_STUB_MODE", AclClass.INSTALL),
    107000: ("ACL_ERROR_RT_PARAM_INVALID", AclClass.CALLER),
    107001: ("ACL_ERROR_RT_INVALID_DEVICEID", AclClass.CALLER),
    107002: ("ACL_ERROR_RT_CONTEXT_NULL", AclClass.CALLER),
    107003: ("ACL_ERROR_RT_STREAM_CONTEXT", AclClass.CALLER),
    107004: ("ACL_ERROR_RT_MODEL_CONTEXT", AclClass.CALLER),
    107011: ("ACL_ERROR_RT_STREAM_SUBSCRIBE", AclClass.CALLER),
    107012: ("ACL_ERROR_RT_THREAD_SUBSCRIBE", AclClass.CALLER),
    107015: ("ACL_ERROR_RT_STREAM_NO_CB_REG", AclClass.CALLER),
    107017: ("ACL_ERROR_RT_INVALID_HANDLE", AclClass.CALLER),
    107019: ("ACL_ERROR_RT_WAIT_TIMEOUT", AclClass.TIMEOUT),
    107020: ("ACL_ERROR_RT_TASK_TIMEOUT", AclClass.TIMEOUT),
    107022: ("ACL_ERROR_RT_DEVICE_TASK_ABORT", AclClass.DEVICE),
    107023: ("ACL_ERROR_RT_STREAM_ABORT", AclClass.TASK),
    145000: ("ACL_ERROR_GE_PARAM_INVALID", AclClass.CALLER),
    145001: ("ACL_ERROR_GE_EXEC_NOT_INIT", AclClass.CALLER),
    145002: ("ACL_ERROR_GE_EXEC_MODEL_PATH_INVALID", AclClass.CALLER),
    145003: ("ACL_ERROR_GE_EXEC_MODEL_ID_INVALID", AclClass.CALLER),
    145006: ("ACL_ERROR_GE_EXEC_MODEL_DATA_SIZE_INVALID", AclClass.MODEL),
    145011: ("ACL_ERROR_GE_DYNAMIC_INPUT_ADDR_INVALID", AclClass.CALLER),
    145012: ("ACL_ERROR_GE_DYNAMIC_INPUT_LENGTH_INVALID", AclClass.CALLER),
    145013: ("ACL_ERROR_GE_DYNAMIC_BATCH_SIZE_INVALID", AclClass.CALLER),
    145021: ("ACL_ERROR_GE_SHAPE_INVALID", AclClass.CALLER),
    145022: ("ACL_ERROR_GE_DATATYPE_INVALID", AclClass.CALLER),
    200000: ("ACL_ERROR_BAD_ALLOC", AclClass.MEMORY),
    200001: ("ACL_ERROR_API_NOT_SUPPORT", AclClass.CALLER),
    200006: ("ACL_ERROR_FEATURE_UNSUPPORTED", AclClass.CALLER),
    207000: ("ACL_ERROR_RT_FEATURE_NOT_SUPPORT", AclClass.CALLER),
    207001: ("ACL_ERROR_RT_MEMORY_ALLOCATION", AclClass.MEMORY),
    207002: ("ACL_ERROR_RT_MEMORY_FREE", AclClass.CALLER),
    207003: ("ACL_ERROR_RT_AICORE_OVER_FLOW", AclClass.TASK),
    207004: ("ACL_ERROR_RT_NO_DEVICE", AclClass.DEVICE),
    207005: ("ACL_ERROR_RT_RESOURCE_ALLOC_FAIL", AclClass.RESOURCE),
    207006: ("ACL_ERROR_RT_NO_PERMISSION", AclClass.INSTALL),
    207007: ("ACL_ERROR_RT_NO_EVENT_RESOURCE", AclClass.RESOURCE),
    207008: ("ACL_ERROR_RT_NO_STREAM_RESOURCE", AclClass.RESOURCE),
    207010: ("ACL_ERROR_RT_NO_MODEL_RESOURCE", AclClass.RESOURCE),
    207018: ("ACL_ERROR_RT_DEVIDE_OOM", AclClass.MEMORY),
    245000: ("ACL_ERROR_GE_MEMORY_ALLOCATION", AclClass.MEMORY),
    245002: ("ACL_ERROR_GE_DEVICE_MEMORY_ALLOCATION_FAILED", AclClass.MEMORY),
    300000: ("ACL_ERROR_STORAGE_OVER_LIMIT", AclClass.CALLER),
    500000: ("ACL_ERROR_INTERNAL_ERROR", AclClass.TASK),
    500001: ("ACL_ERROR_FAILURE", AclClass.TASK),
    500002: ("ACL_ERROR_GE_FAILURE", AclClass.TASK),
    500003: ("ACL_ERROR_RT_FAILURE", AclClass.TASK),
    500004: ("ACL_ERROR_DRV_FAILURE", AclClass.DEVICE),
    507000: ("ACL_ERROR_RT_INTERNAL_ERROR", AclClass.TASK),
    507001: ("ACL_ERROR_RT_TS_ERROR", AclClass.DEVICE),
    507010: ("ACL_ERROR_RT_LOST_HEARTBEAT", AclClass.DEVICE),
    507011: ("ACL_ERROR_RT_MODEL_EXECUTE", AclClass.TASK),
    507012: ("ACL_ERROR_RT_REPORT_TIMEOUT", AclClass.BENIGN),
    507013: ("ACL_ERROR_RT_SYS_DMA", AclClass.TASK),
    507014: ("ACL_ERROR_RT_AICORE_TIMEOUT", AclClass.TASK),
    507015: ("ACL_ERROR_RT_AICORE_EXCEPTION", AclClass.TASK),
    507016: ("ACL_ERROR_RT_AICORE_TRAP_EXCEPTION", AclClass.TASK),
    507017: ("ACL_ERROR_RT_AICPU_TIMEOUT", AclClass.TASK),
    507018: ("ACL_ERROR_RT_AICPU_EXCEPTION", AclClass.TASK),
    507023: ("ACL_ERROR_RT_MODEL_ABORT_NORMAL", AclClass.TASK),
    507033: ("ACL_ERROR_RT_DEV_SETUP_ERROR", AclClass.DEVICE),
    507034: ("ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", AclClass.TASK),
    507035: ("ACL_ERROR_RT_VECTOR_CORE_EXCEPTION", AclClass.TASK),
    507046: ("ACL_ERROR_RT_STREAM_SYNC_TIMEOUT", AclClass.TIMEOUT),
    507047: ("ACL_ERROR_RT_EVENT_SYNC_TIMEOUT", AclClass.TIMEOUT),
    507053: ("ACL_ERROR_RT_DEVICE_MEM_ERROR", AclClass.DEVICE),
    507054: ("ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR", AclClass.DEVICE),
    507055: ("ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR", AclClass.DEVICE),
    507056: ("ACL_ERROR_RT_LINK_ERROR", AclClass.DEVICE),
    507057: ("ACL_ERROR_RT_SUSPECT_REMOTE_ERROR", AclClass.DEVICE),
    507899: ("ACL_ERROR_RT_DRV_INTERNAL_ERROR", AclClass.DEVICE),
    507901: ("ACL_ERROR_RT_SOCKET_CLOSE", AclClass.DEVICE),
    545000: ("ACL_ERROR_GE_INTERNAL_ERROR", AclClass.TASK),
    545001: ("ACL_ERROR_GE_LOAD_MODEL", AclClass.MODEL),
    545601: ("ACL_ERROR_GE_MODEL_EXECUTE_TIMEOUT", AclClass.TIMEOUT),
}

_ERROR_TYPES: dict[AclClass, type[AclError]] = {
    AclClass.MEMORY: OutOfDeviceMemory,
    AclClass.DEVICE: DeviceLost,
}
#: The same call will fail again, in a new process too.
_PERMANENT = frozenset({AclClass.CALLER, AclClass.MODEL, AclClass.INSTALL})


def name_of(code: int) -> str:
    """The constant's name in the manual, or `unknown`."""
    return _CODES.get(code, ("unknown", AclClass.UNKNOWN))[0]


def class_of(code: int) -> AclClass:
    """What the code means to a daemon."""
    return _CODES.get(code, ("unknown", AclClass.UNKNOWN))[1]


def check(function: str, code: int, acl: AclModule) -> None:
    """Raises unless `code` is 0.

    Must run at once, in the thread that made the call: the driver's message is kept per thread and
    is gone once read.

    Args:
        function: pyACL name of the call, such as `acl.rt.malloc`.
        code: what it returned.
        acl: asked for the driver's own words.

    Raises:
        OutOfDeviceMemory: the device or pinned host memory has no room; nothing was allocated.
        DeviceLost: a sticky failure; every later call will fail.
        AclError: any other code.
    """
    if code:
        error_type = _ERROR_TYPES.get(class_of(code), AclError)
        detail = acl.get_recent_err_msg() or ""
        error = error_type(function, code, name_of(code), detail.strip())
        if class_of(code) in _PERMANENT:
            error.retryable = False
        raise error
