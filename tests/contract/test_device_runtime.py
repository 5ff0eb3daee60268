"""What the driver relies on in init, contexts and streams; the same on software device and card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from runtime_cache.device.acl_api import RunMode
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.errors import AclError
from tests.support.devices import DEVICES, opened

T = TypeVar("T")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[AclDevice]:
    with opened(request.param) as device:
        yield device


def in_another_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_an_opened_device_says_what_it_is(device: AclDevice) -> None:
    assert device.run_mode in (RunMode.HOST, RunMode.DEVICE)
    assert device.soc_name.startswith("Ascend")
    assert device.stream != 0


def test_a_second_init_is_counted_not_refused(device: AclDevice) -> None:
    assert device.acl.init() == 100002


def test_a_device_is_opened_again_after_it_was_closed(device: AclDevice) -> None:
    device.close()
    device.close()
    again = AclDevice.open(device.acl, device.device_id)
    again.free(again.malloc(64))
    again.close()


def test_an_unknown_device_is_refused_and_nothing_stays_open(device: AclDevice) -> None:
    device.close()
    with pytest.raises(AclError, match=r"acl\.rt\.set_device failed: 107001") as caught:
        AclDevice.open(device.acl, 4096)
    assert caught.value.acl_code == 107001
    again = AclDevice.open(device.acl, device.device_id)
    again.close()


def test_a_thread_without_context_can_do_nothing(device: AclDevice) -> None:
    rt = device.acl.rt
    assert in_another_thread(lambda: rt.malloc(64, 0)) == (0, 107002)
    assert in_another_thread(rt.create_stream) == (0, 107002)


def test_an_idle_stream_is_synchronised_at_once(device: AclDevice) -> None:
    device.synchronize(1000)
    device.synchronize(-1)


def test_a_wrong_timeout_is_refused(device: AclDevice) -> None:
    assert device.acl.rt.synchronize_stream_with_timeout(device.stream, -2) == 107000


def test_the_drivers_words_are_gone_once_read(device: AclDevice) -> None:
    assert device.acl.rt.free(0) == 100000
    device.acl.get_recent_err_msg()
    assert not device.acl.get_recent_err_msg()


def test_an_error_carries_the_code_and_its_name(device: AclDevice) -> None:
    with pytest.raises(AclError) as caught:
        device.free(0)
    assert (caught.value.function, caught.value.acl_code) == ("acl.rt.free", 100000)
    assert caught.value.acl_name == "ACL_ERROR_INVALID_PARAM"
