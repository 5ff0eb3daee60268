"""Opens the device under test: the software device always, a card where there is one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime_cache.aclsim import inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.select import load_acl

#: The software device with one memory for host and device, as on a board.
BOARD = "sim:0 as a board"
#: For `pytest.mark.parametrize`: every device the contract holds on.
DEVICES = ["sim:0", BOARD, pytest.param("npu:0", marks=pytest.mark.npu)]


@contextmanager
def opened(name: str = "sim:0", **sim_options: int | str | bool) -> Iterator[AclDevice]:
    """The device, closed again at the end; its failures to close are the test's failures.

    The software device starts as in a fresh process, with these settings.
    """
    if name == BOARD:
        name, sim_options = "sim:0", {"run_mode": 0, **sim_options}
    if name.startswith("sim"):
        inspect.reset()
    if name.startswith("npu") and importlib.util.find_spec("acl") is None:
        pytest.skip("pyACL is not installed here")
    acl, device_id = load_acl(name, sim_options)
    device = AclDevice.open(acl, device_id)
    try:
        yield device
    finally:
        device.close()


def num_leaked() -> int:
    """What is alive on the software device beside an open device's own context and stream."""
    return inspect.report().num_alive - 2
