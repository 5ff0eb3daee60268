"""A block is handed out only if nobody has it. [14] of facts/peers.md (d).

Every engine test looks at that, the random ones too, since the rig does; here it is shown that what
must not happen would be found.
"""

from __future__ import annotations

import pytest

from runtime_cache.cache.policy import CachePolicy
from runtime_cache.ids import BlockId
from tests.support import handing_out
from tests.support.caching import MakeCache, admitted, free_blocks, make_manager, serve
from tests.support.engine_rig import EngineRig, limits


def never() -> bool:
    return False


def test_what_nobody_has_is_handed_out(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    handing_out.watch(cache, never)
    serve(cache, range(9))
    serve(cache, range(20, 45))  # evicts all of the first
    assert free_blocks(cache) == []
    table = admitted(cache, range(50, 60))
    assert len(table.blocks) == 3


def test_a_held_block_would_be_found() -> None:
    cache = make_manager(8)
    handing_out.watch(cache, never)
    table = admitted(cache, range(4))
    cache.pool._free.appendleft(table.blocks[0])
    with pytest.raises(AssertionError, match=r"held blocks are handed out: \{1: 1\}"):
        admitted(cache, range(10, 14))


def test_a_cached_block_would_be_found() -> None:
    cache = make_manager(8)
    handing_out.watch(cache, never)
    serve(cache, range(4))
    cache.pool._free.appendleft(BlockId(1))
    with pytest.raises(AssertionError, match="cached block 1 is handed out"):
        admitted(cache, range(10, 14))


def test_a_block_that_is_free_twice_would_be_found() -> None:
    cache = make_manager(8)
    handing_out.watch(cache, never)
    cache.pool._free.appendleft(BlockId(2))
    cache.pool._free.appendleft(BlockId(2))
    with pytest.raises(AssertionError):
        admitted(cache, range(10, 18))


def test_blocks_under_a_step_would_be_found() -> None:
    cache = make_manager(8)
    handing_out.watch(cache, lambda: True)
    with pytest.raises(AssertionError, match=r"\[1\] are handed out under a step"):
        admitted(cache, range(4))


def test_a_cancelled_requests_blocks_wait_for_its_step() -> None:
    """They may still be written: the next request gets them when the step is over."""
    policy = CachePolicy(is_enabled=False)
    rig = EngineRig(num_blocks=4, policy=policy, config=limits(max_running=2))
    first = rig.arrive(range(8), max_tokens=1)
    rig.cancel(first)
    second = rig.arrive(range(20, 28), max_tokens=1)
    assert rig.gauges() == (2, 0, 1)
    assert [batch.rows[0].request_id for batch in rig.batches] == [first]
    rig.step_done()
    assert rig.batches[-1].rows[0].request_id == second
    assert rig.gauges() == (2, 0, 1)
