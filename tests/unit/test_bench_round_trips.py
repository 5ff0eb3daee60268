"""What `rtcache-bench ipc` makes of the turns in which tokens come."""

from __future__ import annotations

from itertools import count

import pytest

from tools.bench.round_trips import rate


@pytest.mark.parametrize(
    ("turns", "per_s"),
    [
        ([5, 10, 30], 20.0),  # 40 tokens in the two seconds since the first
        ([0, 5, 10, 0, 30, 0], 20.0),  # turns without a token are none
        ([240], 240.0),  # all at once: since reading began
    ],
)
def test_tokens_per_second(turns: list[int], per_s: float) -> None:
    seconds = count()
    assert rate(turns, lambda: float(next(seconds))) == per_s
