"""The least that must be computed for a set of prompts, against counting by hand and by sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.prompts import (
    Prompts,
    exact_floor_tokens,
    floor_tokens,
    num_cached_blocks,
    shared_prompts,
)
from tools.bench.stage import percentile


def rows(*prompts: list[int]) -> Prompts:
    return np.array(prompts, dtype=np.int32)


def test_the_floor_of_the_articles():
    assert floor_tokens(10_000, num_shared=500, num_own=100) == 1_000_500


def test_shared_prompts_share_their_beginning_and_no_more():
    prompts = shared_prompts(50, num_shared=7, num_own=5, vocab_size=1000, seed=3)
    assert prompts.shape == (50, 12)
    assert (prompts[:, :7] == prompts[0, :7]).all()
    assert len(set(prompts[:, 7].tolist())) > 40
    assert (prompts == shared_prompts(50, num_shared=7, num_own=5, vocab_size=1000, seed=3)).all()
    assert prompts.min() >= 0
    assert prompts.max() < 1000


def test_what_is_alike_by_chance_is_computed_once():
    # 1 2 3 4, then 9 9 below 1 2, then 9 8 of which 1 2 9 is there.
    assert exact_floor_tokens(rows([1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 9, 8])) == 4 + 2 + 1


def test_of_a_prompt_that_comes_again_the_last_token_is_computed():
    assert exact_floor_tokens(rows([1, 2, 3])) == 3
    assert exact_floor_tokens(rows([1, 2, 3], [1, 2, 3])) == 4
    assert exact_floor_tokens(rows([1, 2, 3], [1, 2, 4], [1, 2, 3])) == 5


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 7), (2, 4), (3, 5), (4, 3), (5, 3)])
def test_blocks_that_hold_them(block_size: int, num_blocks: int):
    prompts = rows([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 9])
    assert num_cached_blocks(prompts, block_size) == num_blocks


@given(
    st.integers(1, 7).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=1, max_size=30
        )
    ),
    st.integers(1, 9),
)
def test_both_counts_are_those_of_sets(prompts: list[list[int]], block_size: int):
    array, length = rows(*prompts), len(prompts[0])
    nodes = {tuple(p[:end]) for p in prompts for end in range(1, length + 1)}
    again = len(prompts) - len({tuple(p) for p in prompts})
    assert exact_floor_tokens(array) == len(nodes) + again
    ends = [min(end, length) for end in range(block_size, length + block_size, block_size)]
    blocks = {tuple(p[:end]) for p in prompts for end in ends}
    assert num_cached_blocks(array, block_size) == len(blocks)


@pytest.mark.parametrize(
    ("num_values", "percent", "value"),
    [
        (1, 50, 0),
        (1, 99, 0),
        (2, 50, 0),
        (100, 50, 49),
        (100, 99, 98),
        (101, 99, 99),
        (300, 99, 296),
    ],
)
def test_percentiles(num_values: int, percent: int, value: int):
    assert percentile(list(reversed(range(num_values))), percent) == value
