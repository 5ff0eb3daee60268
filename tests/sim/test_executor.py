"""The executor on the software device, with a model whose answers can be worked out.

`SumModel`: logits are `[sum of the ids in sight, position, 7, 0, ...]`, so a wrong slot, mask,
append or gear shows as a wrong number, and memory that nobody wrote as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.select import load_acl
from runtime_cache.engine.batch import BatchRow, SlotRun, StepBatch
from runtime_cache.engine.executor import Executor, RoleCounters
from runtime_cache.engine.gears import Gear, Role
from runtime_cache.errors import (
    AclError,
    BundleError,
    ConfigError,
    DeviceLost,
    InternalError,
    OutOfDeviceMemory,
)
from runtime_cache.ids import RequestId, StepId
from tests.support.devices import opened
from tests.support.sum_model import SPEC, SumModel, compile_sum_model

BLOCK = 4
SMALL, LARGE = Gear(1, 4, 8), Gear(1, 8, 16)
ONE, FOUR = Gear(1, 1, 16), Gear(4, 1, 16)

VARIANTS = [
    SumModel(),
    SumModel(num_groups=2),
    SumModel(layout="split"),
    SumModel(num_groups=2, kv_dtype="float32", index_dtype="int64", layout="split"),
    SumModel(kv_dtype="float32", num_slots=35),
]
Open = Callable[..., Executor]


class Chat:
    """One sequence: its tokens, and the slots they live in, block by block."""

    def __init__(self, model: SumModel, blocks: list[int]) -> None:
        self._model = model
        self._slots = [block * BLOCK + i for block in blocks for i in range(BLOCK)]
        self.ids: list[int] = []

    def feed(self, *ids: int, wants_logits: bool = True) -> BatchRow:
        """A row that feeds these ids behind what was fed before."""
        past = len(self.ids)
        slots = self._slots[past : past + len(ids)]
        row = BatchRow(
            request_id=RequestId(0),
            token_ids=np.array(ids, np.int32),
            num_past=past,
            past_slots=np.array(self._slots[:past], np.int32),
            appends=runs(slots),
            sampler=cast("None", object()) if wants_logits else None,
        )
        self.ids += ids
        return row

    def share(self, other: Chat, num_tokens: int) -> None:
        """Starts as the first tokens of another sequence, in its slots."""
        self.ids = other.ids[:num_tokens]
        self._slots = other._slots[:num_tokens] + self._slots

    def logits(self) -> list[float]:
        """What the model must answer for the last fed token."""
        total = sum(self.ids) * self._model.id_weight
        return [total, len(self.ids) - 1, 7] + [0] * (SPEC.vocab_size - 3)


def runs(slots: list[int]) -> tuple[SlotRun, ...]:
    """Slots cut into runs that stay inside their block."""
    found: list[SlotRun] = []
    for slot in slots:
        last = found[-1] if found else SlotRun(-1, 0)
        if slot == last.first_slot + last.num_tokens and slot % BLOCK:
            found[-1] = SlotRun(last.first_slot, last.num_tokens + 1)
        else:
            found.append(SlotRun(slot, 1))
    return tuple(found)


def step(gear: Gear, *rows: BatchRow) -> StepBatch:
    role: Role = "decode" if gear.chunk == 1 else "prefill"
    return StepBatch(StepId(1), role, gear, rows)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[SumModel, Path]:
    """Every variant, compiled."""
    found = {}
    for model in VARIANTS:
        found[model] = tmp_path_factory.mktemp("bundle")
        compile_sum_model(model, found[model])
    return found


@pytest.fixture
def device() -> Iterator[AclDevice]:
    """A device that is back as it was, and was never misused, when the test ends."""
    with opened(memory_bytes=1 << 30) as device:
        inspect.clear()
        yield device
        faults.clear()
        assert num_leaked() == 0
        assert [text for text in inspect.report().misuses if "injected fault" not in text] == []


def num_leaked() -> int:
    """What is alive beside the device's own context and stream."""
    return inspect.report().num_alive - 2


@pytest.fixture
def open_executor(device: AclDevice, bundles: dict[SumModel, Path]) -> Iterator[Open]:
    """Opens a variant; closed at the end."""
    executors = []

    def open_variant(model: SumModel = VARIANTS[0], step_timeout_ms: int = 30_000) -> Executor:
        executor = Executor.open(
            device,
            model.manifest(),
            bundles[model],
            block_size=BLOCK,
            step_timeout_ms=step_timeout_ms,
        )
        executors.append(executor)
        return executor

    yield open_variant
    for executor in executors:
        executor.close()


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_chunked_prefill_then_decode(model: SumModel, open_executor: Open) -> None:
    executor, chat = open_executor(model), Chat(model, [3, 1, 5])
    nothing = executor.run(step(SMALL, chat.feed(1, 2, 3, wants_logits=False)))
    assert nothing.shape == (0, SPEC.vocab_size)
    assert executor.run(step(LARGE, chat.feed(4, 5, 6, 7))).tolist() == [chat.logits()]
    for token in (8, 9, 10):
        assert executor.run(step(ONE, chat.feed(token))).tolist() == [chat.logits()]


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_batch_decode_of_unequal_lengths(model: SumModel, open_executor: Open) -> None:
    executor = open_executor(model)
    chats = [Chat(model, [1, 2]), Chat(model, [7, 3]), Chat(model, [5])]
    for chat, prompt in zip(chats, [(1, 2, 3, 4, 5), (6,), (7, 8)], strict=True):
        executor.run(step(LARGE, chat.feed(*prompt)))
    for token in (9, 10):
        logits = executor.run(step(FOUR, *(chat.feed(token) for chat in chats)))
        assert logits.dtype == np.float32
        assert logits.tolist() == [chat.logits() for chat in chats]


def test_every_gear_and_fill_gives_the_same_answer(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    for gear in (SMALL, LARGE):
        for num_fed in range(1, gear.chunk + 1):
            chat = Chat(model, [2, 4])
            assert executor.run(step(gear, chat.feed(*range(1, num_fed + 1)))).tolist() == [
                chat.logits()
            ]


def test_a_full_past_is_seen_whole(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor, chat = open_executor(model), Chat(model, [1, 2, 3, 4, 5])
    executor.run(step(LARGE, chat.feed(*range(1, 9))))
    executor.run(step(LARGE, chat.feed(*range(9, 17))))
    assert executor.run(step(ONE, chat.feed(17))).tolist() == [chat.logits()]


def test_a_shared_prefix_is_read_in_place_and_not_computed_again(open_executor: Open) -> None:
    model = VARIANTS[1]
    executor, first, second = open_executor(model), Chat(model, [1, 2]), Chat(model, [6])
    executor.run(step(LARGE, first.feed(1, 2, 3, 4, 5, 6)))
    second.share(first, 4)
    assert executor.run(step(SMALL, second.feed(20, 21))).tolist() == [second.logits()]
    assert executor.run(step(ONE, first.feed(7))).tolist() == [first.logits()]
    assert executor.counters["prefill"] == RoleCounters(2, rows_appended=8, rows_padded=4)
    assert executor.counters["decode"] == RoleCounters(1, rows_appended=1, rows_padded=0)


def test_only_rows_that_ask_get_logits(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    chats = [Chat(model, [block]) for block in (1, 2, 3)]
    wanted = [False, True, True]
    rows = [chat.feed(5 + i, wants_logits=wanted[i]) for i, chat in enumerate(chats)]
    logits = executor.run(step(FOUR, *rows))
    assert logits.tolist() == [chats[1].logits(), chats[2].logits()]


def test_logits_are_a_view_of_pinned_memory(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor, chat = open_executor(model), Chat(model, [1])
    first = executor.run(step(ONE, chat.feed(5)))
    second = executor.run(step(ONE, chat.feed(6)))
    assert np.shares_memory(first, second)
    assert first.tolist() == second.tolist() == [chat.logits()]


def test_a_step_is_one_upload_one_run_one_download_and_one_wait(open_executor: Open) -> None:
    model = VARIANTS[1]
    executor, chats = open_executor(model), [Chat(model, [b]) for b in (1, 2, 3)]
    inspect.clear()
    executor.run(step(FOUR, *(chat.feed(1) for chat in chats)))
    report = inspect.report()
    assert report.calls == {
        "acl.rt.memcpy_async": 1 + 3 * model.num_groups + 1,
        "acl.mdl.execute_async": 1,
        "acl.rt.synchronize_stream_with_timeout": 1,
    }
    assert report.copies == {"H2D": 1, "D2D": 3 * model.num_groups, "D2H": 1}
    assert report.copied_bytes["D2D"] == 3 * executor.layout.token_bytes
    assert report.copied_bytes["D2H"] == 3 * SPEC.vocab_size * 4


def test_service_allocates_nothing_and_sets_no_gear(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    inspect.clear()
    for _ in range(3):
        chat = Chat(model, [1, 2])
        executor.run(step(SMALL, chat.feed(1, 2, 3, wants_logits=False)))
        executor.run(step(ONE, chat.feed(4)))
        executor.run(step(FOUR, chat.feed(5)))
    assert set(inspect.report().calls) == {
        "acl.rt.memcpy_async",
        "acl.mdl.execute_async",
        "acl.rt.synchronize_stream_with_timeout",
    }


@pytest.mark.parametrize("model", [VARIANTS[0], VARIANTS[2]], ids=str)
def test_runs_on_the_devices_own_cpu(model: SumModel, bundles: dict[SumModel, Path]) -> None:
    with opened(run_mode=0) as device:
        executor = Executor.open(device, model.manifest(), bundles[model], block_size=BLOCK)
        chat = Chat(model, [1])
        executor.run(step(SMALL, chat.feed(1, 2)))
        assert executor.run(step(ONE, chat.feed(3))).tolist() == [chat.logits()]
        executor.close()


# --- faults ---

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
    function: str, call: int, num_good: int, when: faults.When, open_executor: Open
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


def test_a_failed_step_is_not_counted(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    faults.inject("acl.mdl.execute_async", code=507011, when="run")
    with pytest.raises(AclError):
        executor.run(step(SMALL, Chat(model, [1]).feed(1, 2)))
    assert executor.counters["prefill"] == RoleCounters()


def test_a_step_that_does_not_end_is_waited_for_before_the_next(
    device: AclDevice, open_executor: Open
) -> None:
    model = VARIANTS[0]
    executor = open_executor(model, step_timeout_ms=20)
    with inspect.hold(device.stream):
        for block in (1, 2):
            with pytest.raises(AclError, match="507046"):
                executor.run(step(ONE, Chat(model, [block]).feed(1)))
            assert executor.is_in_flight
    assert inspect.report().calls["acl.mdl.execute_async"] == 1
    device.synchronize(30_000)
    chat = Chat(model, [3])
    assert executor.run(step(ONE, chat.feed(9))).tolist() == [chat.logits()]
    assert not executor.is_in_flight
    inspect.clear()  # an expired wait counts as a misuse


def test_a_lost_device_is_lost_for_every_step(bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[0]
    acl, device_id = load_acl("sim:0")
    device = AclDevice.open(acl, device_id)
    executor = Executor.open(device, model.manifest(), bundles[model], block_size=BLOCK)
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
    device: AclDevice, bundles: dict[SumModel, Path]
) -> None:
    model = VARIANTS[2]
    manifest = model.manifest()
    inspect.clear()
    Executor.open(device, manifest, bundles[model], block_size=BLOCK).close()
    num_calls = inspect.report().calls
    for function in FALLIBLE_AT_LOAD:
        for call in range(1, num_calls[function] + 1):
            faults.inject(function, code=500003, call=call)
            with pytest.raises(AclError, match=rf"{function} failed: 500003"):
                Executor.open(device, manifest, bundles[model], block_size=BLOCK)
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
    function: str, device: AclDevice, bundles: dict[SumModel, Path]
) -> None:
    """These give no code: their failure is a useless value."""
    model = VARIANTS[0]
    faults.inject(function, code=500003)
    with pytest.raises(BundleError):
        Executor.open(device, model.manifest(), bundles[model], block_size=BLOCK)
    assert num_leaked() == 0


def test_a_failed_release_stops_no_other(bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[0]
    acl, device_id = load_acl("sim:0")
    device = AclDevice.open(acl, device_id)
    executor = Executor.open(device, model.manifest(), bundles[model], block_size=BLOCK)
    fault = faults.inject("acl.mdl.destroy_dataset", code=100000)
    with pytest.raises(AclError, match=r"acl\.mdl\.destroy_dataset"):
        executor.close()
    assert fault.has_fired
    executor.close()
    report = inspect.report()
    assert num_leaked() == report.datasets == 1  # the one whose destruction was refused
    device.close()
    inspect.reset()


# --- bad input ---


def test_no_room_for_the_pool_says_how_much_is_missing(bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[0]
    manifest = model.manifest()
    large = msgspec.structs.replace(
        manifest, kv=msgspec.structs.replace(manifest.kv, num_slots=1 << 20)
    )
    with opened(memory_bytes=400 << 20) as device:
        with pytest.raises(OutOfDeviceMemory, match="the KV pool needs 268435456 bytes; the devi"):
            Executor.open(device, large, bundles[model], block_size=BLOCK)
        assert num_leaked() == 0


def test_an_om_of_another_pool_is_refused(device: AclDevice, bundles: dict[SumModel, Path]) -> None:
    other = replace(VARIANTS[0], num_slots=64)
    with pytest.raises(BundleError, match=r"model\.om: input 'kv_pool_0' has shape \[128, 32\]"):
        Executor.open(device, other.manifest(), bundles[VARIANTS[0]], block_size=BLOCK)


def test_a_missing_om_is_refused(device: AclDevice, tmp_path: Path) -> None:
    with pytest.raises(AclError, match=r"acl\.mdl\.load_from_file failed"):
        Executor.open(device, VARIANTS[0].manifest(), tmp_path, block_size=BLOCK)
    inspect.clear()


def test_an_om_without_gears_is_refused(device: AclDevice, bundles: dict[SumModel, Path]) -> None:
    manifest = VARIANTS[0].manifest()
    empty = msgspec.structs.replace(manifest.oms[0], prefill=(), decode=())
    bare = msgspec.structs.replace(manifest, oms=(empty,))
    with pytest.raises(BundleError, match="lists no gears"):
        Executor.open(device, bare, bundles[VARIANTS[0]], block_size=BLOCK)


def test_a_block_size_that_does_not_suit_is_refused(device: AclDevice, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        Executor.open(device, VARIANTS[0].manifest(), tmp_path, block_size=32)


def test_a_gear_the_bundle_lacks_is_our_bug(open_executor: Open) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    with pytest.raises(InternalError, match="the bundle has no decode"):
        executor.run(step(Gear(2, 1, 16), Chat(model, [1]).feed(1)))


@pytest.mark.parametrize("block", [0, 8])
def test_an_append_outside_the_blocks_is_our_bug(block: int, open_executor: Open) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    with pytest.raises(InternalError, match="not for writing"):
        executor.run(step(ONE, Chat(model, [block]).feed(1)))
    assert not executor.is_in_flight
    chat = Chat(model, [1])
    assert executor.run(step(ONE, chat.feed(2))).tolist() == [chat.logits()]
