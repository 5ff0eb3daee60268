"""The executor when calls, queued work, the device or the bundle fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from om_models.manifest import Gear
from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.select import load_acl
from runtime_cache.engine.device_counters import RoleCounters
from runtime_cache.engine.executor import Executor
from runtime_cache.errors import (
    AclError,
    BundleError,
    ConfigError,
    DeviceLost,
    InternalError,
    OutOfDeviceMemory,
)
from tests.sim.conftest import Opener
from tests.support.devices import num_leaked, opened
from tests.support.sum_chat import BLOCK, ONE, SMALL, Chat, step
from tests.support.sum_model import VARIANTS, SumModel

FALLIBLE_AT_LOAD = (
    "acl.rt.malloc",
    "acl.rt.malloc_host",
    "acl.rt.memset",
    "acl.mdl.load_from_file",
    "acl.mdl.get_desc",
    "acl.mdl.get_input_dims",
    "acl.mdl.get_output_dims",
    "acl.mdl.get_input_dynamic_gear_count",
    "acl.mdl.get_input_dynamic_dims",
    "acl.mdl.add_dataset_buffer",
    "acl.mdl.set_input_dynamic_dims",
)


@pytest.mark.parametrize(
    ("function", "call", "num_good"),
    [
        ("acl.rt.memcpy_async", 1, 0),  # the upload
        ("acl.rt.memcpy_async", 2, 0),  # the append
        ("acl.rt.memcpy_async", 3, 0),  # the download
        ("acl.mdl.execute_async", 1, 0),
        ("acl.mdl.execute_async", 2, 1),
    ],
)
@pytest.mark.parametrize("when", ["call", "run"])
def test_a_failed_step_is_reported_and_the_next_one_runs(
    function: str, call: int, num_good: int, when: faults.When, open_executor: Opener
) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    fault = faults.inject(function, code=507015, call=call, when=when)
    for _ in range(num_good):
        executor.run(step(ONE, Chat(model, [1]).feed(1)))
    with pytest.raises(AclError, match="507015"):
        executor.run(step(ONE, Chat(model, [1]).feed(1)))
    assert fault.has_fired
    assert not executor.is_in_flight
    chat = Chat(model, [2])
    assert executor.run(step(ONE, chat.feed(3))).tolist() == [chat.logits()]
    assert executor.counters["decode"].num_steps == num_good + 1
    inspect.clear()  # what ran behind dropped work read what nobody had written


def test_a_failed_step_is_not_counted(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    faults.inject("acl.mdl.execute_async", code=507011, when="run")
    with pytest.raises(AclError):
        executor.run(step(SMALL, Chat(model, [1]).feed(1, 2)))
    assert executor.counters["prefill"] == RoleCounters()


def test_a_step_that_does_not_end_is_waited_for_before_the_next(
    sum_device: AclDevice, open_executor: Opener
) -> None:
    model = VARIANTS[0]
    executor = open_executor(model, step_timeout_ms=20)
    with inspect.hold(sum_device.stream):
        for block in (1, 2):
            with pytest.raises(AclError, match="507046"):
                executor.run(step(ONE, Chat(model, [block]).feed(1)))
            assert executor.is_in_flight
    assert inspect.report().calls["acl.mdl.execute_async"] == 1
    sum_device.synchronize(30_000)
    chat = Chat(model, [3])
    assert executor.run(step(ONE, chat.feed(9))).tolist() == [chat.logits()]
    assert not executor.is_in_flight
    inspect.clear()  # an expired wait counts as a misuse


def test_closing_waits_for_a_step_that_did_not_end(
    sum_device: AclDevice, open_executor: Opener
) -> None:
    model = VARIANTS[0]
    executor = open_executor(model, step_timeout_ms=1000)
    with inspect.hold(sum_device.stream):
        executor._step_timeout_ms = 1
        with pytest.raises(AclError, match="507046"):
            executor.run(step(ONE, Chat(model, [1]).feed(1)))
    executor._step_timeout_ms = 30_000
    inspect.clear()
    executor.close()
    assert inspect.report().calls["acl.rt.synchronize_stream_with_timeout"] == 1
    assert not executor.is_in_flight


def test_closing_frees_nothing_that_a_hung_step_still_uses(
    sum_device: AclDevice, open_executor: Opener
) -> None:
    model = VARIANTS[0]
    executor = open_executor(model, step_timeout_ms=20)
    before = inspect.report().num_alive
    with inspect.hold(sum_device.stream):
        with pytest.raises(AclError, match="507046"):
            executor.run(step(ONE, Chat(model, [1]).feed(1)))
        with pytest.raises(AclError, match="507046"):
            executor.close()
        assert executor.is_in_flight
        assert inspect.report().num_alive == before
    sum_device.synchronize(30_000)
    inspect.clear()  # the expired waits; from here on nothing may be misused
    executor.close()
    assert inspect.report().misuses == ()


def test_a_lost_device_is_lost_for_every_step(sum_bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[0]
    acl, device_id = load_acl("sim:0")
    device = AclDevice.open(acl, device_id)
    executor = Executor.open(device, model.manifest(), sum_bundles[model], block_size=BLOCK)
    faults.inject("acl.mdl.execute_async", code=507054, when="run")
    for _ in range(2):
        with pytest.raises(DeviceLost, match="507054"):
            executor.run(step(ONE, Chat(model, [1]).feed(1)))
    for close in (executor.close, device.close):
        with pytest.raises(DeviceLost, match="507054"):
            close()
        close()
    inspect.reset()


def test_any_call_that_fails_at_load_leaves_nothing(
    sum_device: AclDevice, sum_bundles: dict[SumModel, Path]
) -> None:
    model = VARIANTS[2]
    manifest = model.manifest()
    inspect.clear()
    Executor.open(sum_device, manifest, sum_bundles[model], block_size=BLOCK).close()
    num_calls = inspect.report().calls
    for function in FALLIBLE_AT_LOAD:
        for call in range(1, num_calls[function] + 1):
            faults.inject(function, code=500003, call=call)
            with pytest.raises(AclError, match=rf"{function} failed: 500003"):
                Executor.open(sum_device, manifest, sum_bundles[model], block_size=BLOCK)
            assert num_leaked() == 0


@pytest.mark.parametrize(
    "function",
    [
        "acl.mdl.get_num_inputs",
        "acl.mdl.get_num_outputs",
        "acl.mdl.get_input_name_by_index",
        "acl.mdl.get_output_name_by_index",
        "acl.mdl.get_input_size_by_index",
        "acl.mdl.get_output_size_by_index",
        "acl.mdl.get_input_data_type",
        "acl.mdl.get_output_data_type",
    ],
)
def test_a_description_that_says_nothing_is_refused(
    function: str, sum_device: AclDevice, sum_bundles: dict[SumModel, Path]
) -> None:
    """These give no code: their failure is a useless value."""
    model = VARIANTS[0]
    faults.inject(function, code=500003)
    with pytest.raises(BundleError):
        Executor.open(sum_device, model.manifest(), sum_bundles[model], block_size=BLOCK)
    assert num_leaked() == 0


def test_a_failed_release_stops_no_other(sum_bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[0]
    acl, device_id = load_acl("sim:0")
    device = AclDevice.open(acl, device_id)
    executor = Executor.open(device, model.manifest(), sum_bundles[model], block_size=BLOCK)
    fault = faults.inject("acl.mdl.destroy_dataset", code=100000)
    with pytest.raises(AclError, match=r"acl\.mdl\.destroy_dataset"):
        executor.close()
    assert fault.has_fired
    executor.close()
    report = inspect.report()
    assert num_leaked() == report.datasets == 1  # the one whose destruction was refused
    device.close()
    inspect.reset()


def test_no_room_for_the_pool_leaves_nothing(sum_bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[0]
    manifest = model.manifest()
    large = msgspec.structs.replace(
        manifest, kv=msgspec.structs.replace(manifest.kv, num_slots=1 << 20)
    )
    with opened(memory_bytes=400 << 20) as device:
        with pytest.raises(OutOfDeviceMemory, match=r"acl.rt.malloc failed: 207001"):
            Executor.open(device, large, sum_bundles[model], block_size=BLOCK)
        assert num_leaked() == 0


def test_an_om_of_another_pool_is_refused(
    sum_device: AclDevice, sum_bundles: dict[SumModel, Path]
) -> None:
    other = replace(VARIANTS[0], num_slots=64)
    with pytest.raises(BundleError, match=r"model\.om: input 'kv_pool_0' has shape \[128, 32\]"):
        Executor.open(sum_device, other.manifest(), sum_bundles[VARIANTS[0]], block_size=BLOCK)


def test_a_missing_om_is_refused(sum_device: AclDevice, tmp_path: Path) -> None:
    with pytest.raises(AclError, match=r"acl\.mdl\.load_from_file failed"):
        Executor.open(sum_device, VARIANTS[0].manifest(), tmp_path, block_size=BLOCK)
    inspect.clear()


def test_an_om_without_gears_is_refused(
    sum_device: AclDevice, sum_bundles: dict[SumModel, Path]
) -> None:
    manifest = VARIANTS[0].manifest()
    empty = msgspec.structs.replace(manifest.oms[0], prefill=(), decode=())
    bare = msgspec.structs.replace(manifest, oms=(empty,))
    with pytest.raises(BundleError, match="lists no gears"):
        Executor.open(sum_device, bare, sum_bundles[VARIANTS[0]], block_size=BLOCK)


def test_a_block_size_that_does_not_suit_is_refused(sum_device: AclDevice, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        Executor.open(sum_device, VARIANTS[0].manifest(), tmp_path, block_size=32)


def test_a_gear_the_bundle_lacks_is_our_bug(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    with pytest.raises(InternalError, match="the bundle has no decode"):
        executor.run(step(Gear(2, 1, 16), Chat(model, [1]).feed(1)))


@pytest.mark.parametrize("block", [0, 8])
def test_an_append_outside_the_blocks_is_our_bug(block: int, open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    with pytest.raises(InternalError, match="not for tokens"):
        executor.run(step(ONE, Chat(model, [block]).feed(1)))
    assert not executor.is_in_flight
    chat = Chat(model, [1])
    assert executor.run(step(ONE, chat.feed(2))).tolist() == [chat.logits()]
