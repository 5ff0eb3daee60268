"""The executor on the software device, with a model whose answers can be worked out.

`SumModel`: logits are `[sum of the ids in sight, position, 7, 0, ...]`, so a wrong slot, mask,
append or gear shows as a wrong number, and memory that nobody wrote as NaN.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime_cache.aclsim import inspect
from runtime_cache.engine.device_counters import RoleCounters
from runtime_cache.engine.executor import Executor
from tests.sim.conftest import Opener
from tests.support.devices import opened
from tests.support.sum_chat import BLOCK, FOUR, LARGE, ONE, SMALL, Chat, step
from tests.support.sum_model import SPEC, VARIANTS, SumModel


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_chunked_prefill_then_decode(model: SumModel, open_executor: Opener) -> None:
    executor, chat = open_executor(model), Chat(model, [3, 1, 5])
    nothing = executor.run(step(SMALL, chat.feed(1, 2, 3, wants_logits=False)))
    assert nothing.shape == (0, SPEC.vocab_size)
    assert executor.run(step(LARGE, chat.feed(4, 5, 6, 7))).tolist() == [chat.logits()]
    for token in (8, 9, 10):
        assert executor.run(step(ONE, chat.feed(token))).tolist() == [chat.logits()]


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_batch_decode_of_unequal_lengths(model: SumModel, open_executor: Opener) -> None:
    executor = open_executor(model)
    chats = [Chat(model, [1, 2]), Chat(model, [7, 3]), Chat(model, [5])]
    for chat, prompt in zip(chats, [(1, 2, 3, 4, 5), (6,), (7, 8)], strict=True):
        executor.run(step(LARGE, chat.feed(*prompt)))
    for token in (9, 10):
        logits = executor.run(step(FOUR, *(chat.feed(token) for chat in chats)))
        assert logits.dtype == np.float32
        assert logits.tolist() == [chat.logits() for chat in chats]


def test_every_gear_and_fill_gives_the_same_answer(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    for gear in (SMALL, LARGE):
        for num_fed in range(1, gear.chunk + 1):
            chat = Chat(model, [2, 4])
            assert executor.run(step(gear, chat.feed(*range(1, num_fed + 1)))).tolist() == [
                chat.logits()
            ]


def test_a_full_past_is_seen_whole(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor, chat = open_executor(model), Chat(model, [1, 2, 3, 4, 5])
    executor.run(step(LARGE, chat.feed(*range(1, 9))))
    executor.run(step(LARGE, chat.feed(*range(9, 17))))
    assert executor.run(step(ONE, chat.feed(17))).tolist() == [chat.logits()]


def test_a_shared_prefix_is_read_in_place_and_not_computed_again(open_executor: Opener) -> None:
    model = VARIANTS[1]
    executor, first, second = open_executor(model), Chat(model, [1, 2]), Chat(model, [6])
    executor.run(step(LARGE, first.feed(1, 2, 3, 4, 5, 6)))
    second.share(first, 4)
    assert executor.run(step(SMALL, second.feed(20, 21))).tolist() == [second.logits()]
    assert executor.run(step(ONE, first.feed(7))).tolist() == [first.logits()]
    assert executor.counters["prefill"] == RoleCounters(2, rows_appended=8, rows_padded=4)
    assert executor.counters["decode"] == RoleCounters(1, rows_appended=1, rows_padded=0)


def test_only_rows_that_ask_get_logits(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor = open_executor(model)
    chats = [Chat(model, [block]) for block in (1, 2, 3)]
    wanted = [False, True, True]
    rows = [chat.feed(5 + i, wants_logits=wanted[i]) for i, chat in enumerate(chats)]
    logits = executor.run(step(FOUR, *rows))
    assert logits.tolist() == [chats[1].logits(), chats[2].logits()]


def test_logits_are_a_view_of_pinned_memory(open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor, chat = open_executor(model), Chat(model, [1])
    first = executor.run(step(ONE, chat.feed(5)))
    second = executor.run(step(ONE, chat.feed(6)))
    assert np.shares_memory(first, second)
    assert first.tolist() == second.tolist() == [chat.logits()]


def test_a_step_is_one_upload_one_run_one_download_and_one_wait(open_executor: Opener) -> None:
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
    # ids 16 -> 64, positions 16 -> 64, rows 256 -> 320, mask 136 -> 192, last 16
    assert report.copied_bytes["H2D"] == 64 + 64 + 320 + 192 + 16
    assert report.copied_bytes["D2D"] == 3 * executor.layout.token_bytes
    assert report.copied_bytes["D2H"] == 3 * SPEC.vocab_size * 4


def test_service_allocates_nothing_and_sets_no_gear(open_executor: Opener) -> None:
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
def test_runs_on_the_devices_own_cpu(model: SumModel, sum_bundles: dict[SumModel, Path]) -> None:
    with opened(run_mode=0) as device:
        executor = Executor.open(device, model.manifest(), sum_bundles[model], block_size=BLOCK)
        chat = Chat(model, [1])
        executor.run(step(SMALL, chat.feed(1, 2)))
        assert executor.run(step(ONE, chat.feed(3))).tolist() == [chat.logits()]
        executor.close()
