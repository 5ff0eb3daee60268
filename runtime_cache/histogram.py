"""A histogram as Prometheus counts, and the latest samples for percentiles. Pure.

Both are written on the serving path, so a sample costs one bisection and one append, whatever the
number of buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

#: Durations from a step to a request that waits for minutes [seconds].
SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
#: How old or how long unused a cached block is [seconds]: from a scan that passes to days.
AGE_SECONDS = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0, 172_800.0)
#: Tokens of one request.
TOKENS = tuple(float(4**power) for power in range(9))
#: How many of the latest samples percentiles are taken from.
MAX_RECENT = 1024


class Histogram:
    """Counts per bucket, and the sum of the samples.

    Attributes:
        bounds: upper bounds, inclusive, ascending; a last bucket without a bound follows.
        counts: samples of each bucket, not cumulative; one more than bounds.
        total: the samples added up.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a sample, or several that are equal."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_samples(self) -> int:
        """All samples so far."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """The counts now."""
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.total = self.total
        return twin

    def cumulative(self) -> list[tuple[str, int]]:
        """(`le`, samples up to it) of every bucket, the last one `+Inf`."""
        names = [*map(repr, self.bounds), "+Inf"]
        num_samples, found = 0, []
        for name, count in zip(names, self.counts, strict=True):
            num_samples += count
            found.append((name, num_samples))
        return found


class Summary(NamedTuple):
    """Percentiles of the latest samples, by nearest rank; None if there is none.

    Attributes:
        num_samples: that it rests on.
    """

    num_samples: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Recent:
    """The latest samples with their times."""

    __slots__ = ("_samples",)

    def __init__(self, max_samples: int = MAX_RECENT) -> None:
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=max_samples)

    def note(self, now_s: float, value: float, times: int = 1) -> None:
        """Remember a sample, or several that are equal."""
        self._samples.append((now_s, value, times))

    def since(self, begin_s: float) -> list[tuple[float, int]]:
        """(value, how often) of what was noted at that time or later."""
        return [(value, times) for at_s, value, times in self._samples if at_s >= begin_s]


class Timing:
    """A histogram of durations together with the latest of them.

    Attributes:
        histogram: of all [seconds].
        recent: the latest [seconds].
    """

    __slots__ = ("histogram", "recent")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.histogram = Histogram(bounds)
        self.recent = Recent()

    def observe(self, now_s: float, duration_s: float, times: int = 1) -> None:
        """Count a duration that ends now, or several that are equal."""
        self.histogram.observe(duration_s, times)
        self.recent.note(now_s, duration_s, times)


def summarize(recent: Iterable[Recent], begin_s: float) -> Summary:
    """Percentiles of what several have noted since that time."""
    samples = sorted(sample for one in recent for sample in one.since(begin_s))
    num_samples = sum(times for _, times in samples)
    if not num_samples:
        return Summary(0)
    ranks = [-(-num_samples * percent // 100) for percent in (50, 90, 99, 100)]
    return Summary(num_samples, *_at_ranks(samples, ranks))


def _at_ranks(samples: list[tuple[float, int]], ranks: list[int]) -> list[float]:
    """The values at ascending ranks, counted from 1, of samples in ascending order."""
    found: list[float] = []
    num_passed = 0
    for value, times in samples:
        num_passed += times
        while len(found) < len(ranks) and ranks[len(found)] <= num_passed:
            found.append(value)
    return found
