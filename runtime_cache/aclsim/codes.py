"""The numbers pyACL documents, by name. Pure.

Not part of the device's public surface: `acl` itself defines no constants, and neither does this
package's. Source: `acl_rt.h`, `acl_base.h` and `error_codes.md` of CANN 9.0.
"""

from __future__ import annotations

SUCCESS = 0
INVALID_PARAM = 100000
UNINITIALIZE = 100001
REPEAT_INITIALIZE = 100002
INVALID_FILE = 100003
PARSE_FILE = 100006
REPEAT_FINALIZE = 100037

RT_PARAM_INVALID = 107000
RT_INVALID_DEVICE_ID = 107001
RT_CONTEXT_NULL = 107002
RT_STREAM_CONTEXT = 107003
RT_MODEL_CONTEXT = 107004
RT_STREAM_SUBSCRIBE = 107011
RT_THREAD_SUBSCRIBE = 107012
RT_STREAM_NO_CB_REG = 107015
RT_WAIT_TIMEOUT = 107019
RT_STREAM_ABORT = 107023

GE_PARAM_INVALID = 145000
GE_MODEL_PATH_INVALID = 145002
GE_MODEL_ID_INVALID = 145003
GE_MODEL_DATA_SIZE_INVALID = 145006
GE_SELECTOR_ADDRESS_INVALID = 145011
GE_SELECTOR_LENGTH_INVALID = 145012
GE_NOT_A_GEAR = 145013
GE_SHAPE_INVALID = 145021

RT_FEATURE_NOT_SUPPORTED = 207000
RT_MEMORY_ALLOCATION = 207001
RT_NO_EVENT_RESOURCE = 207007
RT_NO_STREAM_RESOURCE = 207008
GE_MEMORY_ALLOCATION = 245000

GE_FAILURE = 500002
RT_INTERNAL_ERROR = 507000
RT_LOST_HEARTBEAT = 507010
RT_MODEL_EXECUTE = 507011
RT_REPORT_TIMEOUT = 507012
RT_DMA = 507013
RT_AICORE_EXCEPTION = 507015
RT_STREAM_SYNC_TIMEOUT = 507046
RT_EVENT_SYNC_TIMEOUT = 507047
RT_DEVICE_MEMORY = 507053
RT_HBM_ECC = 507054
RT_SOCKET_CLOSE = 507901
GE_LOAD_MODEL = 545001

# After one of these, every later call on the device fails with it until the process ends.
STICKY = frozenset({RT_LOST_HEARTBEAT, RT_DEVICE_MEMORY, RT_HBM_ECC, RT_SOCKET_CLOSE})

HOST_TO_HOST = 0
HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEVICE_TO_DEVICE = 3
COPY_DEFAULT = 4
HOST_TO_BUFFER_TO_DEVICE = 5

EVENT_SYNC = 1
FORMAT_NCHW = 0
FORMAT_NHWC = 1
FORMAT_ND = 2
SELECTOR_NAME = "ascend_mbatch_shape_data"

# ONNX `TensorProto.DataType` -> (ACL data type, bytes per element).
ACL_DTYPES: dict[int, tuple[int, int]] = {
    1: (0, 4),  # float32
    2: (4, 1),  # uint8
    3: (2, 1),  # int8
    4: (7, 2),  # uint16
    5: (6, 2),  # int16
    6: (3, 4),  # int32
    7: (9, 8),  # int64
    9: (12, 1),  # bool
    10: (1, 2),  # float16
    11: (11, 8),  # float64
    12: (8, 4),  # uint32
    13: (10, 8),  # uint64
    16: (27, 2),  # bfloat16
}
ONNX_INT32 = 6

# ACL data type -> bytes per element as `aclDataTypeSize` gives them; 4-bit types count as 1.
DTYPE_BYTES: dict[int, int] = dict(ACL_DTYPES.values()) | {
    16: 8,  # complex64
    17: 16,  # complex128
    29: 1,  # int4
    30: 1,  # uint1
    33: 4,  # complex32
    34: 1,  # hifloat8
    35: 1,  # float8_e5m2
    36: 1,  # float8_e4m3fn
    37: 1,  # float8_e8m0
}
