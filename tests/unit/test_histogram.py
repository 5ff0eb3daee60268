"""Counts per bucket, and percentiles of what was seen last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.histogram import Histogram, Recent, Summary, Timing, summarize

BOUNDS = (0.1, 1.0, 10.0)


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 0.1, 0.11, 1.0, 10.0, 10.1):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.cumulative() == [("0.1", 2), ("1.0", 4), ("10.0", 5), ("+Inf", 6)]
    assert histogram.num_samples == 6
    assert histogram.total == pytest.approx(21.31)


def test_several_equal_samples_count_as_so_many() -> None:
    one, other = Histogram(BOUNDS), Histogram(BOUNDS)
    one.observe(0.5, 3)
    for _ in range(3):
        other.observe(0.5)
    assert (one.counts, one.total) == (other.counts, other.total)


def test_a_copy_stays_as_it_is() -> None:
    histogram = Histogram(BOUNDS)
    twin = histogram.copy()
    histogram.observe(1)
    assert (twin.num_samples, twin.total, histogram.num_samples) == (0, 0.0, 1)


def test_nothing_seen_has_no_percentiles() -> None:
    assert summarize([Recent()], 0) == Summary(0)
    assert summarize([], 0) == Summary(0)


def test_percentiles_are_samples_and_weigh_how_often() -> None:
    recent = Recent()
    recent.note(1.0, 5.0, 98)
    recent.note(2.0, 9.0)
    recent.note(3.0, 1.0)
    assert summarize([recent], 0) == Summary(100, 5.0, 5.0, 5.0, 9.0)


def test_old_samples_and_those_pushed_out_are_not_seen() -> None:
    recent = Recent(max_samples=2)
    for at_s in (1.0, 2.0, 3.0):
        recent.note(at_s, at_s)
    assert summarize([recent], 0).num_samples == 2
    assert summarize([recent], 3.0) == Summary(1, 3.0, 3.0, 3.0, 3.0)
    assert summarize([recent], 3.1) == Summary(0)


def test_a_timing_is_both() -> None:
    timing = Timing(BOUNDS)
    timing.observe(100.0, 0.5, 2)
    assert timing.histogram.counts == [0, 2, 0, 0]
    assert summarize([timing.recent], 100.0) == Summary(2, 0.5, 0.5, 0.5, 0.5)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=50))
def test_percentiles_are_those_of_the_unrolled_samples(samples: list[tuple[float, int]]) -> None:
    one, other = Recent(), Recent()
    for index, (value, times) in enumerate(samples):
        (one, other)[index % 2].note(0.0, value, times)
    values = sorted(value for value, times in samples for _ in range(times))
    ranks = [-(-len(values) * percent // 100) for percent in (50, 90, 99)]
    expected = [values[rank - 1] for rank in ranks]
    assert summarize([one, other], 0) == (len(values), *expected, values[-1])
