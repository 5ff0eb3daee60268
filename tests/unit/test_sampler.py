"""The sampler: exact choices, exact filters, and the distribution it draws from."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_cache.engine import sampler
from runtime_cache.engine.request import BadLogits, Sampled, SamplingParams
from runtime_cache.engine.sampler import SamplerState, sample_rows
from runtime_cache.errors import InvalidRequest

INF = float("inf")
NAN = float("nan")
BLOCK = sampler._BLOCK_TOKENS
LAST = 1 - 2.0**-53  # the largest number of a stream
# First numbers of the stream of seed 42: Philox 4x64 with the seed as its key.
GOLDEN = [0.8201981478608876, 0.18924562408645496, 0.8676608148821462]
# What the first five give over weights 1..1000, computed with exact powers in float64.
DRAWS = {
    "plain": [905, 434, 931, 627, 606],
    "cold": [961, 716, 971, 830, 818],
    "top_k": [992, 967, 994, 975, 974],
    "top_p": [953, 770, 966, 834, 826],
}


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def logits_of(*chances: float) -> npt.NDArray[np.float32]:
    return np.log(np.array(chances, dtype=np.float64)).astype(np.float32)


def state(*prompt: int, **params: Any) -> SamplerState:
    return SamplerState(SamplingParams(**params), np.array(prompt, dtype=np.int32))


def sample(logits: npt.NDArray[np.float32], request: SamplerState) -> Sampled:
    """One row whose logits are good."""
    (sampled,) = sample_rows(logits[np.newaxis], [request])
    assert isinstance(sampled, Sampled)
    return sampled


def greedy(*prompt: int, **params: Any) -> SamplerState:
    return state(*prompt, temperature=0.0, **params)


def reachable(logits: npt.NDArray[np.float32], **params: Any) -> list[int]:
    """Every token that some draw can give, by walking the unit interval finely."""
    draws = [*np.linspace(0, 1, 4001)[:-1].tolist(), LAST]
    return sorted({draw(logits, u, **params) for u in draws})


def draw(logits: npt.NDArray[np.float32], uniform: float, **params: Any) -> int:
    return sampler._draw(logits, float(logits.max()), SamplingParams(**params), uniform)


def wide(size: int) -> npt.NDArray[np.float32]:
    """Logits of a real vocabulary's shape: a few likely tokens, a long tail, many equal ones."""
    values = np.random.default_rng(size).standard_normal(size) * 3
    return np.round(values, 2).astype(np.float32)


# --- greedy ---------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(row(1, 3, 3, 2), greedy()) == Sampled(1)


def test_greedy_with_some_logits_banned_by_the_model() -> None:
    assert sample(row(-INF, -1e30, -INF), greedy()).token_id == 1


def test_many_greedy_rows_equal_single_rows() -> None:
    rows = [row(1, 3, 3, 2), row(-INF, -1e30, -INF, -INF), row(0, NAN, 5, 0), row(*[-INF] * 4)]
    together = sample_rows(np.stack(rows), [greedy() for _ in rows])
    assert list(together) == [sample_rows(one[np.newaxis], [greedy()])[0] for one in rows]
    assert together[:2] == (Sampled(1), Sampled(1))
    assert [type(result) for result in together[2:]] == [BadLogits, BadLogits]


def test_rows_equal_single_rows() -> None:
    logits = np.random.default_rng(3).standard_normal((6, 50)).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 0.0, "logit_bias": ((9, 50.0),)},
    ]
    before = logits.copy()
    together = sample_rows(logits, [state(1, 2, **kind) for kind in kinds])
    apart = [sample(logits[i], state(1, 2, **kind)) for i, kind in enumerate(kinds)]
    assert list(together) == apart
    assert together[5].token_id == 9
    np.testing.assert_array_equal(logits, before)


def test_no_rows() -> None:
    assert sample_rows(np.empty((0, 5), dtype=np.float32), []) == ()


def test_rows_and_states_must_fit() -> None:
    with pytest.raises(ValueError, match=r"1 states for logits of shape \(2, 3\)"):
        sample_rows(np.zeros((2, 3), dtype=np.float32), [greedy()])
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        sample_rows(np.zeros(3, dtype=np.float32), [greedy()] * 3)


# --- bad logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [row(0, NAN, 9), row(NAN, 0, 9), row(0, INF), row(-INF, -INF)])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_unusable_logits_choose_nothing(
    bad: npt.NDArray[np.float32], params: dict[str, Any]
) -> None:
    (result,) = sample_rows(bad[np.newaxis], [state(**params)])
    assert isinstance(result, BadLogits)
    assert "the model's logits are not usable: the largest is" in result.message


def test_a_bad_row_costs_the_others_nothing_and_its_own_state_nothing() -> None:
    states = [state(seed=seed, presence_penalty=1.0) for seed in (1, 2)]
    good = row(0, 0, 0, 0)
    chosen, bad = sample_rows(np.stack([good, row(0, NAN, 0, 0)]), states)
    assert chosen == sample(good, state(seed=1, presence_penalty=1.0))
    assert isinstance(bad, BadLogits)
    assert sample(good, states[1]) == sample(good, state(seed=2, presence_penalty=1.0))


def test_penalties_that_leave_float32_choose_nothing() -> None:
    request = state(0, repetition_penalty=0.5, seed=42)
    assert sample_rows(row(3e38, 0)[np.newaxis], [request]) == (
        BadLogits("penalties and bias took the largest logit out of float32"),
    )
    assert request.uniform() == GOLDEN[0]


# --- penalties and bias ---------------------------------------------------------------------


def test_repetition_over_prompt_and_answer() -> None:
    request = state(0, 1, 1, repetition_penalty=2.0)
    np.testing.assert_array_equal(request.adjusted(row(4, -4, 4, -4)), row(2, -8, 4, -4))
    request.accept(2)
    np.testing.assert_array_equal(request.adjusted(row(4, -4, 4, -4)), row(2, -8, 2, -4))


def test_frequency_and_presence_over_the_answer_alone() -> None:
    request = state(0, 1, frequency_penalty=0.5, presence_penalty=0.25)
    for token in (2, 2, 1):
        request.accept(token)
    np.testing.assert_array_equal(request.adjusted(row(1, 1, 1, 1)), row(1, 0.25, -0.25, 1))


def test_repetition_goes_before_the_other_penalties() -> None:
    request = state(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((0, 10.0),))
    request.accept(0)
    np.testing.assert_array_equal(request.adjusted(row(4, 0)), row(4 / 2 - 1 + 10, 0))


def test_counts_grow_without_bound() -> None:
    request = state(7, frequency_penalty=1.0)
    for token in [*range(100), *range(50)]:
        request.accept(token)
    adjusted = request.adjusted(np.zeros(101, dtype=np.float32))
    np.testing.assert_array_equal(adjusted, row(*[-2] * 50, *[-1] * 50, 0))


def test_sampling_counts_its_own_tokens() -> None:
    request = greedy(presence_penalty=1.5)
    logits = row(3, 2, 1)
    assert [sample(logits, request).token_id for _ in range(5)] == [0, 1, 0, 0, 0]


def test_bias_moves_and_bans() -> None:
    assert sample(row(1, 2, 3), greedy(logit_bias=((0, 2.5), (2, -100.0)))).token_id == 0
    assert reachable(row(1, 2, 3) + row(0, 0, -100)) == [0, 1]


def test_a_ban_on_everything_still_gives_the_best_token() -> None:
    ban = tuple((token, -1e30) for token in range(3))
    assert sample(row(1, 3, 2), greedy(logit_bias=ban)).token_id == 0
    assert sample(row(1, 3, 2), greedy(logit_bias=tuple((t, -100.0) for t in range(3)))) == Sampled(
        1
    )


@pytest.mark.parametrize("bias", [NAN, INF, -INF, 1e39, -1e39])
def test_bias_out_of_range_is_refused(bias: float) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias of token 4 is out of range"):
        state(logit_bias=((4, bias),))


# --- filters --------------------------------------------------------------------------------


CHANCES = (0.05, 0.5, 0.1, 0.25, 0.1)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 2, 3, 4]),  # the third and the fourth are equal
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 6}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.49}, [1]),
        ({"top_p": 0.51}, [1, 3]),
        ({"top_p": 0.74}, [1, 3]),
        ({"top_p": 0.76}, [1, 2, 3]),  # of equals the lower id
        ({"top_p": 0.86}, [1, 2, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.51}, [1]),
        ({"min_p": 0.49}, [1, 3]),
        ({"min_p": 0.19}, [1, 2, 3, 4]),
        ({"min_p": 0.09}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.66}, [1]),  # 0.5 / 0.75 of what top-k left
        ({"top_k": 2, "top_p": 0.67}, [1, 3]),
        ({"min_p": 0.49, "top_p": 0.66}, [1]),
        ({"top_k": 2, "min_p": 0.19}, [1, 3]),
        ({"top_k": 4, "min_p": 0.49}, [1, 3]),
        ({"temperature": 0.5, "min_p": 0.26}, [1]),  # (0.25 / 0.5) squared is 0.25
        ({"temperature": 0.5, "min_p": 0.24}, [1, 3]),
        ({"temperature": 1e-300}, [1]),
    ],
)
def test_what_the_filters_keep(params: dict[str, Any], kept: list[int]) -> None:
    assert reachable(logits_of(*CHANCES), **params) == kept


def test_equal_logits_under_top_p_keep_the_lower_ids() -> None:
    assert reachable(row(*[0] * 10), top_p=0.35) == [0, 1, 2, 3]


@settings(deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    st.floats(0, 1, exclude_max=True),
)
def test_nucleus_equals_sorting_everything(values: list[float], top_p: float) -> None:
    weights = np.exp(row(*values))
    assert sampler._nucleus(weights, top_p).tolist() == sorted_nucleus(weights, top_p)


def sorted_nucleus(weights: npt.NDArray[np.float32], top_p: float) -> list[int]:
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order].astype(np.float64)) >= top_p * sampler._total(weights)
    # The total is summed in another order, so that no prefix may reach it.
    count = int(np.argmax(reached)) + 1 if reached.any() else len(weights)
    return sorted(order[:count].tolist())


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("size", [BLOCK, 5000])
def test_nucleus_of_a_vocabulary(size: int, top_p: float) -> None:
    weights = np.exp(wide(size))
    assert sampler._nucleus(weights, top_p).tolist() == sorted_nucleus(weights, top_p)


@pytest.mark.parametrize("top_p", [1 - 2.0**-53, 1 - 2.0**-30])
def test_a_nucleus_of_almost_everything(top_p: float) -> None:
    weights = np.full(10_007, 0.1, dtype=np.float32)
    inside = sampler._nucleus(weights, top_p)
    assert inside.tolist() == list(range(len(inside)))
    assert len(inside) >= 10_006


# Vocabularies without columns, with them, and with some tokens beyond the last whole row of them.
@pytest.mark.parametrize("size", [50, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("k", [1, 2, 40, 256, 257])
def test_top_k_equals_sorting_everything(size: int, k: int) -> None:
    logits = wide(size)
    logits[-1] = logits.max()
    k = min(k, size - 1)
    expected = np.flatnonzero(logits >= np.sort(logits)[-k])
    np.testing.assert_array_equal(sampler._top_k(logits, k), expected)


def test_top_k_with_fewer_tokens_than_k_left() -> None:
    logits = np.full(5000, -INF, dtype=np.float32)
    logits[[7, 4999]] = 1
    for params in ({"top_k": 40}, {"top_k": 300}, {"top_k": 40, "top_p": 0.6, "min_p": 0.5}):
        drawn = [draw(logits, u, **params) for u in (0.0, 0.49, 0.51, LAST)]
        assert drawn == [7, 7, 4999, 4999]


def test_extreme_logits_at_an_extreme_temperature() -> None:
    assert reachable(row(3e38, -3e38, -INF), temperature=5e-324) == [0]


def test_a_token_without_chance_is_never_drawn() -> None:
    logits = row(-INF, 0, -INF, 0, -INF)
    assert reachable(logits) == [1, 3]


# --- the draw -------------------------------------------------------------------------------


def test_the_draw_walks_the_tokens_in_order_of_id() -> None:
    logits = logits_of(0.25, 0.25, 0.5)
    drawn = [draw(logits, u) for u in (0.0, 0.24, 0.26, 0.49, 0.51, 0.999)]
    assert drawn == [0, 0, 1, 1, 2, 2]


SIZES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 77]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_token_has_the_stretch_of_its_chance(size: int, temperature: float) -> None:
    logits = wide(size) / np.float32(4)
    ends = np.cumsum(np.exp(logits.astype(np.float64) / temperature))
    ends /= ends[-1]
    starts = np.concatenate([[0.0], ends[:-1]])
    margin = 2e-6  # of float32
    assert (ends - starts).min() > 3 * margin
    for token in range(size):
        edges = (starts[token] + margin, ends[token] - margin)
        assert [draw(logits, u, temperature=temperature) for u in edges] == [token, token]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LAST])
def test_one_token_that_is_not_banned(size: int, uniform: float) -> None:
    for token in {0, size // 2, size - 1}:
        logits = np.full(size, -INF, dtype=np.float32)
        logits[token] = -7
        for params in ({}, {"temperature": 0.1}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
            assert draw(logits, uniform, **params) == token


@pytest.mark.parametrize("size", SIZES)
def test_one_dominant_token(size: int) -> None:
    for token in {0, size // 2, size - 1}:
        logits = np.zeros(size, dtype=np.float32)
        logits[token] = 60  # the others have e**-60 of its chance, less than any draw resolves
        assert [draw(logits, u) for u in (2.0**-53, 0.5, LAST)] == [token] * 3


@pytest.mark.parametrize("size", SIZES)
def test_all_chances_in_the_last_block(size: int) -> None:
    logits = np.full(size, -INF, dtype=np.float32)
    first = (size - 1) // BLOCK * BLOCK
    logits[first:] = 0
    assert (draw(logits, 0.0), draw(logits, LAST)) == (first, size - 1)


@pytest.mark.parametrize("num_banned", [1, BLOCK, 3 * BLOCK + 1])
def test_the_last_draw_stops_before_tokens_without_a_chance(num_banned: int) -> None:
    logits = np.concatenate([wide(1000), row(*[-INF] * num_banned)])
    logits[999] = -90
    assert draw(logits, LAST) < 999


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1 / 3, 1.0]), min_size=1, max_size=3 * BLOCK),
    st.one_of(st.sampled_from([0.0, 2.0**-53, LAST]), st.floats(0, LAST)),
)
def test_no_draw_falls_on_a_weight_of_0(values: list[float], uniform: float) -> None:
    weights = row(*values, 1.0, *[0.0] * BLOCK)
    assert weights[sampler._place(weights, uniform)] > 0


def test_a_target_beyond_the_last_sum_is_on_the_last_weight_above_0() -> None:
    cumulative = np.array([0.0, 1.0, 3.0, 3.0])
    drawn = [sampler._first_above(cumulative, target) for target in (0, 0.5, 1, 2.9, 3, 4)]
    assert drawn == [1, 1, 2, 2, 2, 2]


def test_weights_at_a_temperature() -> None:
    logits = row(0, math.log(2), -INF)
    expected = [0.25, 1, 0]
    np.testing.assert_allclose(sampler._weights(logits, math.log(2), 0.5), expected, rtol=1e-6)


def test_no_weight_is_subnormal() -> None:
    weights = sampler._weights(row(0, -83.9, -84.1, -100, -3e38, -INF), 0.0, 1.0)
    assert weights[1] == pytest.approx(math.exp(-83.9), rel=1e-5)
    assert weights.tolist() == [1, weights[1], 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("params", "chances"),
    [
        ({}, CHANCES),
        ({"top_k": 2}, (0, 2 / 3, 0, 1 / 3, 0)),
        ({"temperature": 2.0}, tuple(math.sqrt(c) for c in CHANCES)),
        ({"top_p": 0.76}, (0, 0.5, 0.1, 0.25, 0)),
        ({"min_p": 0.19}, (0, 0.5, 0.1, 0.25, 0.1)),
    ],
)
def test_distribution(params: dict[str, Any], chances: tuple[float, ...]) -> None:
    num_draws = 20_000
    request, logits = state(seed=11, **params), logits_of(*CHANCES)
    counts = Counter(sample(logits, request).token_id for _ in range(num_draws))
    expected = np.array(chances) / sum(chances) * num_draws
    seen = np.array([counts[token] for token in range(5)])
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = float((((seen - expected) ** 2)[possible] / expected[possible]).sum())
    # 18.5 is the 0.1 % point at 4 degrees of freedom; the seed is fixed, so this cannot flicker.
    assert chi_square < 18.5


def test_the_stream_is_the_same_on_every_machine() -> None:
    request = state(seed=42)
    assert [request.uniform() for _ in range(3)] == GOLDEN
    assert state(seed=42 + 2**64).uniform() == GOLDEN[0]
    assert state(seed=43).uniform() != GOLDEN[0]


def test_draws_of_a_seed() -> None:
    """None of these is near the border of two tokens, so that they are the same everywhere."""
    logits = np.log1p(np.arange(1000, dtype=np.float32))
    drawn = {
        name: [sample(logits, request).token_id for _ in range(5)]
        for name, request in {
            "plain": state(seed=42),
            "cold": state(seed=42, temperature=0.25),
            "top_k": state(seed=42, top_k=40),
            "top_p": state(seed=42, top_p=0.5),
        }.items()
    }
    assert drawn == DRAWS


def test_equal_seeds_give_equal_answers_and_the_stream_goes_on() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    first, second = state(seed=9), state(seed=9)
    tokens = [sample(logits, first).token_id for _ in range(20)]
    assert [sample(logits, second).token_id for _ in range(20)] == tokens
    assert len(set(tokens)) > 15


def test_greedy_uses_nothing_of_the_stream() -> None:
    request = greedy(seed=42)
    sample(row(1, 2), request)
    assert request.uniform() == GOLDEN[0]


# --- log-probabilities ----------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    request = greedy(logprobs=2, logit_bias=((0, 100.0),), repetition_penalty=1.5)
    result = sample(logits_of(*CHANCES), request)
    assert result.logprobs is not None
    assert (result.token_id, result.logprobs.token_id) == (0, 0)
    assert result.logprobs.logprob == pytest.approx(math.log(0.05), abs=1e-6)
    assert [token for token, _ in result.logprobs.top] == [1, 3]
    values = [value for _, value in result.logprobs.top]
    assert values == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


@pytest.mark.parametrize(
    ("num_top", "ids"), [(0, []), (3, [1, 3, 2]), (4, [1, 3, 2, 4]), (9, [1, 3, 2, 4, 0])]
)
def test_top_logprobs_best_first_lower_id_first(num_top: int, ids: list[int]) -> None:
    result = sample(logits_of(*CHANCES), greedy(logprobs=num_top))
    assert result.logprobs is not None
    assert [token for token, _ in result.logprobs.top] == ids


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}, {"seed": 3, "min_p": 0.01}])
def test_logprobs_of_a_vocabulary(size: int, params: dict[str, Any]) -> None:
    logits = wide(size) + np.float32(20)
    exact = logits.astype(np.float64)
    exact -= exact.max() + math.log(np.exp(exact - exact.max()).sum())
    result = sample(logits, state(logprobs=5, **params))
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(exact[result.token_id], abs=1e-5)
    ids = np.argsort(-exact, kind="stable")[:5].tolist()
    assert [token for token, _ in result.logprobs.top] == ids
    values = [value for _, value in result.logprobs.top]
    assert values == pytest.approx(exact[ids].tolist(), abs=1e-5)


def test_logprobs_of_large_logits_do_not_overflow() -> None:
    result = sample(row(2.0**127, -(2.0**127), -INF), greedy(logprobs=3))
    assert result.logprobs is not None
    assert result.logprobs.logprob == 0
    assert [value for _, value in result.logprobs.top] == [0, -(2.0**128), -INF]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-7, 1e-6])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
def test_the_smallest_repetition_penalties_stay_finite(penalty: float, temperature: float):
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature, seed=1, logprobs=1)
    state = SamplerState(params, np.array([0, 1, 2]))
    (sampled,) = sample_rows(np.array([[0.0, 3.0, -4.0, 5.0]], np.float32), [state])
    assert sampled.token_id == 1
