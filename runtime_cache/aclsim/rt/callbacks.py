"""Callbacks of `acl.rt`: functions launched in streams, and news of failed tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.callbacks import NO_ID, Report
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import current_stream, this_process

acl_function = surface("acl.rt")

_NO_BLOCK, _BLOCK = 0, 1
_WAIT_FOR_EVER = -1


@acl_function("Kk")
def subscribe_report(thread_id: int, stream: int) -> None:
    """Lets a thread process a stream's reports; 107011 if the stream has a thread."""
    this_process().subscriptions.subscribe(thread_id, current_stream(stream))


@acl_function("Kk")
def unsubscribe_report(thread_id: int, stream: int) -> None:
    """Ends a subscription; 107012 for an unknown thread, 107011 if the stream is not its own."""
    this_process().subscriptions.unsubscribe(thread_id, current_stream(stream))


@acl_function("OOik")
def launch_callback(
    fn: Callable[[Any], Any], user_data: object, block_type: int, stream: int
) -> None:
    """Queues `fn(user_data)` for the subscribed thread's `process_report`.

    Block type 1: the stream's later work waits until it returned; 0: it does not. 107015 if no
    thread is subscribed.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError("the first argument cannot be called")
    if block_type not in (_NO_BLOCK, _BLOCK):
        raise AclFailure(codes.INVALID_PARAM, f"block type {block_type} is not 0 or 1")
    target, subscriptions = current_stream(stream), this_process().subscriptions
    report = Report(fn, user_data, block_type == _BLOCK)
    subscriptions.launch(target, report)
    work = partial(subscriptions.hand_over, target, report)
    target.submit("acl.rt.launch_callback", work)


@acl_function("i")
def process_report(timeout_ms: int) -> None:
    """Runs what was launched for this thread: waits for one, then takes all there are.

    -1 waits for ever, 0 and less are 100000; 507012 on expiry, 107012 if not subscribed.
    """
    if timeout_ms < _WAIT_FOR_EVER or timeout_ms == 0:
        raise AclFailure(codes.INVALID_PARAM, f"timeout {timeout_ms} ms is not -1 or above 0")
    timeout_s = None if timeout_ms == _WAIT_FOR_EVER else timeout_ms / 1000
    this_process().subscriptions.process(timeout_s)


# --- failed tasks ---


@acl_function("|O")
def set_exception_info_callback(fn: Callable[[int], Any] | None = None) -> None:
    """Sets the one function that is told of failed tasks, in a thread of the runtime; None: none.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if fn is not None and not callable(fn):
        raise TypeError("acl.rt.set_exception_info_callback args parse failed")
    this_process().exceptions.set(fn)


@acl_function("k", plain=NO_ID)
def get_error_code_from_exception_info(info: int) -> int:
    """The failure's code; 0xFFFFFFFF for a wrong info."""
    return this_process().exceptions.info(info).error_code


@acl_function("k", plain=NO_ID)
def get_task_id_from_exception_info(info: int) -> int:
    """The task's number in its stream; 0xFFFFFFFF if the device failed, or for a wrong info."""
    return this_process().exceptions.info(info).task_id


@acl_function("k", plain=NO_ID)
def get_stream_id_from_exception_info(info: int) -> int:
    """The stream's number; 0xFFFFFFFF if the device failed, or for a wrong info."""
    return this_process().exceptions.info(info).stream_id


@acl_function("k", plain=NO_ID)
def get_thread_id_from_exception_info(info: int) -> int:
    """The thread that queued the task; 0xFFFFFFFF if the device failed, or for a wrong info."""
    return this_process().exceptions.info(info).thread_id


@acl_function("k", plain=NO_ID)
def get_device_id_from_exception_info(info: int) -> int:
    """The device; 0xFFFFFFFF for a wrong info."""
    return this_process().exceptions.info(info).device_id
