"""The smallest gear that fits, at each limit, and how prompts are cut."""

from __future__ import annotations

from itertools import product

import pytest

from om_models.manifest import Gear
from runtime_cache.engine.gears import GearTable, Role
from runtime_cache.errors import ConfigError, InternalError

PREFILL = [Gear(1, chunk, past) for chunk, past in product((16, 64, 256), (128, 512))]
DECODE = [Gear(batch, 1, past) for batch, past in product((1, 4), (64, 512))]
TABLE = GearTable(reversed(PREFILL), reversed(DECODE))


def test_limits() -> None:
    assert (TABLE.max_batch, TABLE.max_model_len) == (4, 512)


@pytest.mark.parametrize(
    ("role", "batch", "chunk", "past", "gear"),
    [
        ("prefill", 1, 1, 0, Gear(1, 16, 128)),
        ("prefill", 1, 16, 128, Gear(1, 16, 128)),
        ("prefill", 1, 17, 128, Gear(1, 64, 128)),
        ("prefill", 1, 16, 129, Gear(1, 16, 512)),
        ("prefill", 1, 256, 512, Gear(1, 256, 512)),
        ("decode", 1, 1, 63, Gear(1, 1, 64)),
        ("decode", 1, 1, 64, Gear(1, 1, 64)),
        ("decode", 1, 1, 65, Gear(1, 1, 512)),
        ("decode", 2, 1, 64, Gear(4, 1, 64)),
        ("decode", 4, 1, 512, Gear(4, 1, 512)),
    ],
)
def test_the_smallest_gear_that_fits(
    role: Role, batch: int, chunk: int, past: int, gear: Gear
) -> None:
    assert TABLE.pick(role, batch=batch, chunk=chunk, past=past) == gear


@pytest.mark.parametrize(
    ("role", "batch", "chunk", "past"),
    [
        ("prefill", 1, 257, 0),
        ("prefill", 1, 1, 513),
        ("prefill", 2, 1, 0),
        ("decode", 5, 1, 0),
        ("decode", 1, 1, 513),
        ("decode", 1, 2, 0),
    ],
)
def test_what_fits_no_gear_is_our_bug(role: Role, batch: int, chunk: int, past: int) -> None:
    with pytest.raises(InternalError, match=f"no {role} gear holds"):
        TABLE.pick(role, batch=batch, chunk=chunk, past=past)


@pytest.mark.parametrize(
    ("num_tokens", "chunk"),
    [
        (1, 1),
        (15, 15),
        (16, 16),
        (17, 16),  # 16 + 16 rows are just half of 64
        (32, 16),
        (33, 33),  # 16 + 64 rows
        (63, 63),
        (64, 64),
        (65, 64),  # 64 + 16 rows instead of 256
        (80, 64),
        (81, 64),  # 64 + 64 rows are just half
        (128, 64),
        (129, 129),  # 64 + 256 rows
        (255, 255),
        (256, 256),
        (257, 256),
        (9999, 256),
    ],
)
def test_a_prompt_is_cut_with_little_padding(num_tokens: int, chunk: int) -> None:
    assert TABLE.chunk_for(num_tokens, past=0) == chunk


@pytest.mark.parametrize(
    ("max_tokens", "chunk"),
    [(1, 16), (15, 16), (16, 16), (63, 16), (64, 64), (255, 64), (256, 256)],
)
def test_a_cap_takes_the_largest_gear_below_it(max_tokens: int, chunk: int) -> None:
    assert TABLE.chunk_for(9999, past=0, max_tokens=max_tokens) == chunk


def test_a_short_rest_below_the_cap_is_fed_whole() -> None:
    assert TABLE.chunk_for(40, past=0, max_tokens=64) == 40


def test_gears_need_not_be_a_full_grid() -> None:
    table = GearTable(
        [Gear(1, 64, 128), Gear(1, 16, 512)], [Gear(8, 1, 128), Gear(2, 1, 256), Gear(1, 1, 600)]
    )
    assert table.max_model_len == 512
    assert table.chunk_for(100, past=128) == 64
    assert table.chunk_for(100, past=129) == 16
    assert [table.max_batch_at(past) for past in (128, 129, 256, 257, 600, 601)] == [
        8,
        2,
        2,
        1,
        1,
        0,
    ]
    assert table.pick("decode", batch=1, past=128) == Gear(1, 1, 600)


def test_the_families_may_differ_in_past() -> None:
    table = GearTable([Gear(1, 16, 100)], [Gear(1, 1, 60)])
    assert table.max_model_len == 60


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([], DECODE),
        (PREFILL, []),
        ([Gear(2, 16, 128)], DECODE),
        (PREFILL, [Gear(1, 2, 128)]),
        ([Gear(1, 16, 0)], DECODE),
        (PREFILL, [Gear(0, 1, 64)]),
    ],
)
def test_gears_of_the_wrong_role_stop_the_start(prefill: list[Gear], decode: list[Gear]) -> None:
    with pytest.raises(ConfigError):
        GearTable(prefill, decode)


# -- one gear a role ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_chunk", "chunk"),
    [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256), (257, 256)],
)
def test_a_fixed_table_has_the_smallest_chunk_of_at_least(min_chunk: int, chunk: int) -> None:
    table = TABLE.fixed(min_chunk)
    assert table.is_fixed
    assert (table.chunk, table.max_batch, table.max_model_len) == (chunk, 1, 512)
    for past in (0, 128, 512):
        assert table.pick("prefill", chunk=1, past=past) == Gear(1, chunk, 512)
        assert table.pick("decode", past=past) == Gear(1, 1, 512)
        assert table.max_batch_at(past) == 1
        assert table.chunk_for(chunk + 1, past=past) == chunk
        assert table.chunk_for(chunk - 1, past=past, max_tokens=1) == chunk - 1
    assert not TABLE.is_fixed


def test_a_fixed_table_keeps_the_longest_past() -> None:
    table = GearTable(
        [Gear(1, 16, 128), Gear(1, 64, 512), Gear(1, 256, 512)],
        [Gear(1, 1, 128), Gear(8, 1, 512), Gear(4, 1, 512)],
    ).fixed(1)
    assert table.pick("prefill", past=0) == Gear(1, 64, 512)
    assert table.pick("decode", past=0) == Gear(4, 1, 512)
    assert (table.max_batch, table.max_batch_at(0), table.max_model_len) == (1, 1, 512)


def test_a_table_of_one_gear_a_role_is_fixed_if_it_feeds_one_row() -> None:
    assert GearTable([Gear(1, 16, 64)], [Gear(1, 1, 64)]).is_fixed
    assert not GearTable([Gear(1, 16, 64)], [Gear(2, 1, 64)]).is_fixed
    assert not GearTable([Gear(1, 16, 64), Gear(1, 32, 64)], [Gear(1, 1, 64)]).is_fixed
