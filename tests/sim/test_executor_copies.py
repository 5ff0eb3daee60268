"""Copies inside the pool that a step makes before its run: what is called, in which order, read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.engine.batch import RowCopy
from runtime_cache.engine.device_counters import RoleCounters
from runtime_cache.engine.executor import Executor
from runtime_cache.errors import AclError, InternalError
from tests.sim.conftest import Opener
from tests.support.devices import opened
from tests.support.sum_chat import BLOCK, FOUR, LARGE, ONE, SMALL, Chat, step
from tests.support.sum_model import SPEC, VARIANTS, SumModel

KINDS = {1: "H2D", 2: "D2H", 3: "D2D"}


class Tape:
    """Stands before `acl.rt` or `acl.mdl` and writes down what is queued and waited for."""

    def __init__(self, module: Any, calls: list[tuple[Any, ...]]) -> None:
        self._module = module
        self._calls = calls

    def memcpy_async(self, dst: int, dst_max: int, src: int, *rest: int) -> int:
        count, kind, _ = rest
        self._calls.append((KINDS[kind], src, dst, count))
        return int(self._module.memcpy_async(dst, dst_max, src, *rest))

    def execute_async(self, *args: int) -> int:
        self._calls.append(("execute",))
        return int(self._module.execute_async(*args))

    def synchronize_stream_with_timeout(self, *args: int) -> int:
        self._calls.append(("synchronize",))
        return int(self._module.synchronize_stream_with_timeout(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class TapedAcl:
    """The module `acl` with a tape in it."""

    def __init__(self, acl: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rt = Tape(acl.rt, self.calls)
        self.mdl = Tape(acl.mdl, self.calls)
        self._acl = acl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._acl, name)


@pytest.fixture
def calls(sum_device: AclDevice) -> Iterator[list[tuple[Any, ...]]]:
    """What the device of `open_executor` is told from now on; copies as (way, src, dst, bytes)."""
    acl = sum_device.acl
    taped = TapedAcl(acl)
    sum_device.acl = taped
    yield taped.calls
    sum_device.acl = acl


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_the_copies_of_every_group_are_queued_before_the_run(
    model: SumModel, calls: list[tuple[Any, ...]], open_executor: Opener
) -> None:
    executor, first, second = open_executor(model), Chat(model, [1, 2]), Chat(model, [5])
    executor.run(step(LARGE, first.feed(1, 2, 3, 4, 5, 6, 7)))
    second.adopt(first, 4 + 3)
    calls.clear()
    executor.run(step(SMALL, second.feed(9)))
    token_bytes = model.rows_per_slot * SPEC.kv_dim * (2 if model.kv_dtype == "float16" else 4)
    groups = range(model.num_groups)
    pool = [executor._pool.group_ptr(group) for group in groups]
    new_kv = [
        executor._runnables["prefill", SMALL].model.outputs.ptrs[f"new_kv_{g}"] for g in groups
    ]
    slot = [[pool[g] + s * token_bytes for s in range(32)] for g in groups]
    assert [call[0] for call in (calls[0], calls[-2])] == ["H2D", "D2H"]
    assert calls[1:-2] == [
        *(("D2D", slot[g][2 * BLOCK], slot[g][5 * BLOCK], 3 * token_bytes) for g in groups),
        ("execute",),
        *(("D2D", new_kv[g], slot[g][5 * BLOCK + 3], token_bytes) for g in groups),
    ]
    assert calls[-1] == ("synchronize",)


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_copied_rows_are_read_for_every_length_of_hit(
    model: SumModel, open_executor: Opener
) -> None:
    executor, first = open_executor(model), Chat(model, [1, 2])
    executor.run(step(LARGE, first.feed(3, 1, 4, 1, 5, 9, 2, 6)))
    for num_tokens in range(8):
        chat = Chat(model, [6, 4])
        chat.adopt(first, num_tokens)
        assert executor.run(step(SMALL, chat.feed(7, 8))).tolist() == [chat.logits()]
        assert executor.run(step(ONE, chat.feed(11))).tolist() == [chat.logits()]
    assert executor.run(step(ONE, Chat(model, [5]).feed(1))).tolist() == [
        [float(model.id_weight), 0, 7, *[0] * (SPEC.vocab_size - 3)]
    ]


@pytest.mark.parametrize("model", [VARIANTS[0], VARIANTS[3]], ids=str)
def test_what_is_written_behind_a_copy_leaves_the_source_alone(
    model: SumModel, open_executor: Opener
) -> None:
    executor, first, second = open_executor(model), Chat(model, [1, 2]), Chat(model, [3])
    executor.run(step(LARGE, first.feed(1, 2, 3, 4, 5, 6)))
    second.adopt(first, 5)
    executor.run(step(SMALL, second.feed(9, 9)))
    assert executor.run(step(ONE, first.feed(7))).tolist() == [first.logits()]
    assert executor.run(step(ONE, second.feed(8))).tolist() == [second.logits()]


def test_several_runs_of_several_rows(open_executor: Opener) -> None:
    """More than the engine asks for today: every row of a batch copies, one in two runs."""
    model = VARIANTS[1]
    executor, first = open_executor(model), Chat(model, [1, 2])
    executor.run(step(LARGE, first.feed(1, 2, 3, 4, 5, 6, 7, 8)))
    chats = [Chat(model, [block]) for block in (3, 4, 5)]
    for chat, num_tokens in zip(chats, (3, 4 + 1, 4 + 3), strict=True):
        chat.adopt(first, num_tokens)
    rows = [chat.feed(10 + place) for place, chat in enumerate(chats)]
    two_runs = (RowCopy(2 * BLOCK, 5 * BLOCK, 1), RowCopy(2 * BLOCK + 1, 5 * BLOCK + 1, 2))
    rows[2] = replace(rows[2], copies=two_runs)
    assert executor.run(step(FOUR, *rows)).tolist() == [chat.logits() for chat in chats]
    assert executor.counters["decode"] == RoleCounters(
        1, rows_appended=3, rows_padded=1, rows_copied=3 + 1 + 3
    )


def test_copies_are_counted_for_their_role_and_apart_from_appends(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor, first, second = open_executor(model), Chat(model, [1, 2]), Chat(model, [3])
    executor.run(step(LARGE, first.feed(1, 2, 3, 4, 5, 6)))
    second.adopt(first, 6)
    inspect.clear()
    executor.run(step(SMALL, second.feed(7)))
    assert executor.counters["prefill"] == RoleCounters(
        2, rows_appended=7, rows_padded=2 + 3, rows_copied=2
    )
    assert inspect.report().copied_bytes["D2D"] == 3 * executor.layout.token_bytes
    assert inspect.report().calls["acl.rt.synchronize_stream_with_timeout"] == 1


@pytest.mark.parametrize("when", ["call", "run"])
@pytest.mark.parametrize("copy", [2, 3])  # behind the upload: one for each group
def test_a_copy_that_fails_fails_the_step(
    copy: int, when: faults.When, open_executor: Opener
) -> None:
    model = VARIANTS[1]
    executor, first, second = open_executor(model), Chat(model, [1]), Chat(model, [2])
    executor.run(step(SMALL, first.feed(1, 2, 3)))
    second.adopt(first, 3)
    failing = step(SMALL, second.feed(4))
    faults.inject("acl.rt.memcpy_async", code=507013, call=copy, when=when)
    with pytest.raises(AclError, match="507013"):
        executor.run(failing)
    assert not executor.is_in_flight
    assert executor.counters["prefill"].rows_copied == 0
    assert executor.run(failing).tolist() == [second.logits()]
    assert executor.counters["prefill"].rows_copied == 3
    inspect.clear()  # what ran behind the dropped copy read what nobody had written


@pytest.mark.parametrize("source", [0, 3 * BLOCK + 32])
def test_a_copy_from_outside_the_blocks_is_our_bug(source: int, open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor, first, second = open_executor(model), Chat(model, [1]), Chat(model, [2])
    executor.run(step(SMALL, first.feed(1, 2, 3)))
    second.adopt(first, 3)
    row = second.feed(4)
    with pytest.raises(InternalError, match="not for tokens"):
        executor.run(step(SMALL, replace(row, copies=(RowCopy(source, 2 * BLOCK, 3),))))
    assert not executor.is_in_flight
    assert executor.run(step(SMALL, row)).tolist() == [second.logits()]


def test_a_copy_that_is_not_at_the_end_of_the_past_reaches_no_device(
    calls: list[tuple[Any, ...]], open_executor: Opener
) -> None:
    model = VARIANTS[0]
    executor, first, second = open_executor(model), Chat(model, [1]), Chat(model, [2])
    executor.run(step(SMALL, first.feed(1, 2, 3)))
    second.adopt(first, 3)
    calls.clear()
    bad = replace(second.feed(4), copies=(RowCopy(BLOCK, 3 * BLOCK, 3),))
    with pytest.raises(InternalError, match="do not fill the end"):
        executor.run(step(SMALL, bad))
    assert calls == []


def test_copies_on_the_devices_own_cpu(sum_bundles: dict[SumModel, Path]) -> None:
    model = VARIANTS[2]
    with opened(run_mode=0) as device:
        executor = Executor.open(device, model.manifest(), sum_bundles[model], block_size=BLOCK)
        first, second = Chat(model, [1]), Chat(model, [2])
        executor.run(step(SMALL, first.feed(1, 2, 3)))
        second.adopt(first, 2)
        assert executor.run(step(ONE, second.feed(9))).tolist() == [second.logits()]
        executor.close()
