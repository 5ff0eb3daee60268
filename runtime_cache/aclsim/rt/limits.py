"""Timeouts, options and the last error of `acl.rt`."""

from __future__ import annotations

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure, last_error
from runtime_cache.aclsim.process import current_context, this_process
from runtime_cache.aclsim.timeouts import INTERVAL_US

acl_function = surface("acl.rt")

_THREAD_LEVEL = 0
_SYS_OPTIONS = range(3)  # deterministic results, debug kernels, strong consistency


@acl_function("I")
def set_op_wait_timeout(seconds: int) -> None:
    """The limit of `stream_wait_event` from now on, for the whole process; 0: none."""
    this_process().timeouts.event_wait_s = seconds


@acl_function("I")
def set_op_execute_time_out(seconds: int) -> None:
    """The limit of one operator; kept, and has no effect here. 0: the most."""
    this_process().timeouts.set_op_execute(seconds * 1_000_000)


@acl_function("K", failed=(0,))
def set_op_execute_timeout_v2(microseconds: int) -> int:
    """As `set_op_execute_time_out`; returns the limit in whole steps [us]."""
    return this_process().timeouts.set_op_execute(microseconds)


@acl_function("", failed=(0,))
def get_op_timeout_interval() -> int:
    """The step of the operator limit [us]."""
    return INTERVAL_US


@acl_function("", failed=(0,))
def get_op_execute_timeout() -> int:
    """The limit of one operator [ms]."""
    return this_process().timeouts.op_execute_us // 1000


def _check_sys_option(opt: int, value: int) -> None:
    if opt not in _SYS_OPTIONS or value not in (0, 1):
        raise AclFailure(codes.INVALID_PARAM, f"option {opt} with value {value} is unknown")


@acl_function("il")
def set_sys_param_opt(opt: int, value: int) -> None:
    """Takes an option of the process (0..2, on 1 or off 0), which has no effect here."""
    _check_sys_option(opt, value)


@acl_function("il")
def ctx_set_sys_param_opt(opt: int, value: int) -> None:
    """Takes an option of the current context, as `set_sys_param_opt`."""
    current_context()
    _check_sys_option(opt, value)


def _check_level(level: int) -> None:
    if level != _THREAD_LEVEL:
        raise AclFailure(codes.INVALID_PARAM, f"error level {level}: only 0, of the thread")


@acl_function("i", plain=codes.INVALID_PARAM)
def peek_at_last_error(level: int) -> int:
    """The last code of the runtime in this thread, or 0."""
    _check_level(level)
    return last_error.code


@acl_function("i", plain=codes.INVALID_PARAM)
def get_last_error(level: int) -> int:
    """As `peek_at_last_error`, and forgets it."""
    _check_level(level)
    return last_error.take()
