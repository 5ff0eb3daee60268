"""The position-coded model finds whatever is wrong with the rows a step reads; batches by hand.

What it finds in the whole engine is in `test_coded_kv`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from om_models.bundle import Bundle
from om_models.manifest import Gear
from runtime_cache.engine.batch import BatchRow, RowCopy
from runtime_cache.engine.executor import Executor
from tests.support.coded_model import NUM_REPORTS, SPEC, right_report
from tests.support.devices import opened
from tests.support.sum_chat import BLOCK, Fed, step

CHUNK, ONE, FOUR = Gear(1, 8, 32), Gear(1, 1, 32), Gear(4, 1, 32)
TOKENS = [200, 3, 0, 255, 17, 64, 8, 101, 5, 5, 250, 33, 12, 77, 140, 9]


@pytest.fixture
def executor(coded_bundle: Bundle) -> Iterator[Executor]:
    manifest = coded_bundle.manifest
    with opened(soc_name=manifest.soc_version) as device:
        executor = Executor.open(device, manifest, coded_bundle.path, block_size=BLOCK)
        yield executor
        executor.close()


def report(executor: Executor, row: BatchRow) -> list[float]:
    """The first logits of one row."""
    gear = ONE if len(row.token_ids) == 1 else CHUNK
    logits: list[float] = executor.run(step(gear, row))[0, :NUM_REPORTS].tolist()
    return logits


def filled(executor: Executor, blocks: list[int], num_tokens: int = 8) -> Fed:
    """A sequence of the first tokens, computed."""
    fed = Fed(blocks)
    executor.run(step(CHUNK, fed.feed(*TOKENS[:num_tokens])))
    return fed


def test_what_is_right_is_reported_as_right(executor: Executor) -> None:
    fed = Fed([3, 1, 5, 9])
    for token in TOKENS[:2]:
        assert report(executor, fed.feed(token)) == right_report(fed.ids)
    assert report(executor, fed.feed(*TOKENS[2:9])) == right_report(fed.ids)
    assert report(executor, fed.feed(*TOKENS[9:14])) == right_report(fed.ids)
    for token in TOKENS[14:]:
        assert report(executor, fed.feed(token)) == right_report(fed.ids)


def test_a_batch_of_unequal_lengths(executor: Executor) -> None:
    chats = [filled(executor, [1, 2, 3], 8), filled(executor, [4], 1), filled(executor, [5, 6], 5)]
    logits = executor.run(step(FOUR, *(chat.feed(40 + n) for n, chat in enumerate(chats))))
    assert logits[:, :NUM_REPORTS].tolist() == [right_report(chat.ids) for chat in chats]


def wrong(row: BatchRow, place: int, slot: int) -> BatchRow:
    """The row with another slot at one place of its past."""
    slots = row.past_slots.copy()
    slots[place] = slot
    return replace(row, past_slots=slots)


def test_a_row_of_another_position_is_reported(executor: Executor) -> None:
    fed = filled(executor, [1, 2, 3])
    row = fed.feed(9)
    positions, rows, _, others = report(executor, wrong(row, 2, row.past_slots[7]))
    copies = 2 * SPEC.num_layers * executor.layout.row_elements // 4
    assert (positions, rows, others) == (-(7 - 2) * copies, 0, 0)


def test_another_token_in_the_right_place_changes_the_checksum_alone(executor: Executor) -> None:
    fed, other = filled(executor, [1, 2, 3]), Fed([4, 5])
    executor.run(step(CHUNK, other.feed(*TOKENS[:4], 99, *TOKENS[5:8])))
    row = wrong(fed.feed(9), 4, 5 * BLOCK)
    assert report(executor, row) == right_report([*TOKENS[:4], 99, *TOKENS[5:8], 9])


def test_the_null_block_and_a_row_of_another_layer_are_no_right_rows(executor: Executor) -> None:
    fed = filled(executor, [1, 2, 3])
    _, rows, _, _ = report(executor, wrong(fed.feed(9), 0, 0))
    numbers = range(1, 2 * SPEC.num_layers + 1)
    assert rows == -sum(numbers) * executor.layout.row_elements // 4


def test_what_nobody_wrote_is_no_number(executor: Executor) -> None:
    fed = filled(executor, [1, 2, 3])
    found = report(executor, wrong(fed.feed(9), 5, 30 * BLOCK))
    assert all(math.isnan(value) for value in found)


def test_a_wrong_read_taints_what_is_computed_from_it(executor: Executor) -> None:
    """So that it is found at the next logits, if its own were not asked for."""
    fed = filled(executor, [1, 2, 3])
    bad = fed.feed(9)
    executor.run(step(ONE, replace(wrong(bad, 2, bad.past_slots[3]), sampler=None)))
    positions, rows, total, others = report(executor, fed.feed(10))
    assert (positions, rows, total) == (0, 0, right_report(fed.ids)[2])
    assert others == -2 * SPEC.num_layers * executor.layout.row_elements // 4


def test_a_wrong_position_of_the_query_is_reported(executor: Executor) -> None:
    fed = filled(executor, [1, 2, 3])
    row = fed.feed(9)
    short = replace(row, num_past=7, past_slots=row.past_slots[1:])
    positions, _, _, _ = report(executor, short)
    copies = 2 * SPEC.num_layers * executor.layout.row_elements // 4
    assert positions == -7 * copies  # each of seven rows is one place off


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_copied_rows_are_whole(num_tokens: int, executor: Executor) -> None:
    first, second = filled(executor, [1, 2, 3]), Fed([6, 7, 8])
    second.adopt(first, num_tokens)
    row = second.feed(9, 10)
    assert report(executor, row) == right_report(second.ids)
    assert report(executor, first.feed(11)) == right_report(first.ids)
    assert report(executor, second.feed(12)) == right_report(second.ids)


def test_a_copy_from_the_wrong_place_is_reported(executor: Executor) -> None:
    first, second = filled(executor, [1, 2]), Fed([6, 7])
    second.adopt(first, 3)
    row = replace(second.feed(9), copies=(RowCopy(BLOCK + 1, 6 * BLOCK, 3),))
    positions, rows, _, others = report(executor, row)
    copies = 2 * SPEC.num_layers * executor.layout.row_elements // 4
    assert (positions, rows, others) == (-3 * copies, 0, 0)
