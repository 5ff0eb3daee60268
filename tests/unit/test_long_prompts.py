"""Long prompts that share most of themselves: what the device computes is the difference.

[29] of facts/peers.md (d): a peer missed everything when only the tail was another.
"""

from __future__ import annotations

import pytest

from om_models.manifest import Gear
from runtime_cache.cache.policy import CachePolicy
from runtime_cache.engine.gears import GearTable
from tests.support.engine_rig import EngineRig, expected_answer

NUM_TOKENS = 2300
GEARS = GearTable([Gear(1, 512, 2400)], [Gear(1, 1, 2400)])


@pytest.mark.parametrize(
    ("num_shared", "grid", "num_cached"),
    [
        (2200, 1, 2200),  # 550 whole blocks
        (2199, 1, 2199),  # and three rows copied
        (2201, 1, 2201),
        (2300, 1, 2299),  # the last token is computed
        (0, 1, 0),
        (2200, 512, 2048),  # in deterministic mode rounded down to the chunk
    ],
)
def test_2200_of_2300_tokens(num_shared: int, grid: int, num_cached: int) -> None:
    rig = EngineRig(num_blocks=1300, gears=GEARS, policy=CachePolicy(grid_tokens=grid))
    one = [number * 7 % 50_000 for number in range(NUM_TOKENS)]
    other = one[:num_shared] + [50_000 + number for number in range(NUM_TOKENS - num_shared)]
    rig.arrive(one, max_tokens=1)
    rig.run()
    assert rig.pool.num_rows_written == NUM_TOKENS
    request_id = rig.arrive(other, max_tokens=1)
    rig.run()
    assert rig.pool.num_rows_written == NUM_TOKENS + NUM_TOKENS - num_cached
    assert rig.pool.num_rows_copied == num_cached % 4
    assert rig.finished(request_id).usage.cached_tokens == num_cached
    assert rig.token_ids[request_id] == expected_answer(other, 1)
