"""Releases: reverse order, all of them, the first failure reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime_cache.device.teardown import Teardown
from runtime_cache.errors import DeviceError


def recorder(log: list[str], name: str, *, fails: bool = False) -> Callable[[], None]:
    def release() -> None:
        log.append(name)
        if fails:
            raise DeviceError(name)

    return release


def test_last_pushed_is_released_first_and_only_once() -> None:
    log: list[str] = []
    teardown = Teardown()
    for name in ("device", "context", "stream"):
        teardown.push(recorder(log, name))
    teardown.close()
    teardown.close()
    assert log == ["stream", "context", "device"]


def test_a_failure_stops_nothing_and_the_first_is_reported() -> None:
    log: list[str] = []
    teardown = Teardown()
    teardown.push(recorder(log, "device", fails=True))
    teardown.push(recorder(log, "context"))
    teardown.push(recorder(log, "stream", fails=True))
    with pytest.raises(DeviceError, match=r"^stream$"):
        teardown.close()
    assert log == ["stream", "context", "device"]
    teardown.close()
    assert len(log) == 3


def test_undo_on_error_releases_and_reports_the_cause() -> None:
    log: list[str] = []
    teardown = Teardown()
    teardown.push(recorder(log, "device", fails=True))
    with pytest.raises(KeyError, match="cause"), teardown.undo_on_error():
        raise KeyError("cause")
    assert log == ["device"]


def test_undo_on_error_keeps_everything_on_success() -> None:
    log: list[str] = []
    teardown = Teardown()
    with teardown.undo_on_error():
        teardown.push(recorder(log, "device"))
    assert log == []
