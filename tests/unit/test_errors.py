"""Errors cross from one process to another whole."""

from __future__ import annotations

import pickle

import pytest

from runtime_cache.errors import (
    CapacityError,
    InvalidRequest,
    OutOfDeviceMemory,
    QueueFull,
    RuntimeCacheError,
)
from runtime_cache.llm.results import SomeFailed


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("wrong"),
        QueueFull("full", retry_after_ms=5),
        CapacityError("short", retry_after_ms=7),
        OutOfDeviceMemory("acl.rt.malloc", 207001, "ACL_ERROR_RT_MEMORY_ALLOCATION", "no room"),
    ],
)
def test_an_error_is_the_same_after_pickling(error: RuntimeCacheError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy), copy.args) == (str(error), vars(error), error.args)


def test_some_that_failed_keep_their_errors() -> None:
    copy = pickle.loads(pickle.dumps(SomeFailed([InvalidRequest("wrong")])))
    assert [str(error) for error in copy.results] == ["wrong"]
    assert not copy.retryable
