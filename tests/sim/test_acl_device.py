"""Opening and closing a device: the order, and what a failure half way leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice, MemoryInfo
from runtime_cache.device.select import load_acl
from runtime_cache.errors import AclError, DeviceLost
from tests.support.devices import opened

OPENING = (
    "acl.init",
    "acl.rt.set_device",
    "acl.rt.create_context",
    "acl.rt.create_stream",
    "acl.rt.get_run_mode",
)
CLOSING = (
    "acl.rt.destroy_stream",
    "acl.rt.destroy_context",
    "acl.rt.reset_device",
    "acl.finalize",
)


@pytest.mark.parametrize("function", OPENING)
def test_a_failure_on_the_way_up_leaves_nothing(function: str) -> None:
    inspect.reset()
    acl, device_id = load_acl("sim:0")
    faults.inject(function, code=500003)
    with pytest.raises(AclError, match=rf"{function} failed: 500003"):
        AclDevice.open(acl, device_id)
    report = inspect.report()
    assert report.num_alive == 0
    assert report.misuses == ()
    with opened():  # and the device can be had again
        pass


@pytest.mark.parametrize("function", CLOSING)
def test_a_failure_on_the_way_down_stops_no_other_release(function: str) -> None:
    with opened() as device:
        inspect.clear()
        faults.inject(function, code=500003)
        with pytest.raises(AclError, match=rf"{function} failed: 500003"):
            device.close()
        assert {name: inspect.report().calls[name] for name in CLOSING} == dict.fromkeys(CLOSING, 1)
    inspect.reset()


def test_closing_gives_everything_back_once() -> None:
    with opened() as device:
        inspect.clear()
        device.close()
        device.close()
        assert list(inspect.report().calls) == list(CLOSING)
        assert inspect.report().num_alive == 0


def test_another_users_init_is_not_finalised() -> None:
    inspect.reset()
    acl, device_id = load_acl("sim:0")
    assert acl.init() == 0
    AclDevice.open(acl, device_id).close()
    assert "acl.finalize" not in inspect.report().calls
    assert acl.finalize() == 0


def test_a_finalise_that_came_too_late_is_no_failure() -> None:
    with opened() as device:
        faults.inject("acl.finalize", code=100037)
        device.close()


def test_a_lost_device_is_told_apart() -> None:
    with opened() as device:
        faults.inject("acl.rt.malloc", code=507901)
        with pytest.raises(DeviceLost, match=r"507901 \(ACL_ERROR_RT_SOCKET_CLOSE\)"):
            device.malloc(64)
        with pytest.raises(DeviceLost):
            device.close()
    inspect.reset()


@pytest.mark.parametrize("soc_name", ["Ascend310B4", "Ascend910B3"])
def test_memory_is_asked_of_what_the_card_has(soc_name: str) -> None:
    """DDR on the small boards, HBM on the large cards."""
    with opened(soc_name=soc_name, memory_bytes=1 << 30, initial_use_bytes=1 << 20) as device:
        assert device.soc_name == soc_name
        assert device.memory_info() == MemoryInfo((1 << 30) - (1 << 20), 1 << 30)


def test_memory_that_the_driver_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as device:
        monkeypatch.setattr(device.acl.rt, "get_mem_info", lambda attr: (0, 0, 0))
        assert device.memory_info() is None


def test_the_last_of_several_devices_ends_pyacl() -> None:
    inspect.reset()
    acl, device_id = load_acl("sim:0")
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:  # a context belongs to each
        first = one.submit(AclDevice.open, acl, device_id).result()
        second = two.submit(AclDevice.open, acl, device_id).result()
        one.submit(first.close).result()
        first = one.submit(AclDevice.open, acl, device_id).result()
        two.submit(second.close).result()
        # Neither of the two that have gone has taken anything from the one that is left.
        one.submit(lambda: first.free(first.malloc(64))).result()
        assert "acl.finalize" not in inspect.report().calls
        one.submit(first.close).result()
    assert inspect.report().calls["acl.finalize"] == 1
    assert (inspect.report().num_alive, inspect.report().misuses) == (0, ())
