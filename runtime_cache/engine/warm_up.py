"""The steps that are run before anything is served. Pure.

The first step of a process is slow on a card, and is the first that needs all of it: model, pool,
stream, buffers. So one of each role runs before the daemon is ready. They write to a block of the
pool that nothing is cached in yet, and no cache knows of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from runtime_cache.engine.batch import BatchRow, SlotRun, StepBatch
from runtime_cache.engine.gears import GearTable
from runtime_cache.engine.request import SamplingParams
from runtime_cache.engine.sampler import SamplerState
from runtime_cache.ids import RequestId, StepId

#: No step of a request has this number, nor a request.
_STEP = StepId(-1)
_REQUEST = RequestId(-1)


def warm_up_batches(gears: GearTable, block_size: int) -> Iterator[StepBatch]:
    """One token fed, then one behind it, each in the smallest gear.

    Args:
        block_size: tokens; the first slot behind the null block is written to.
    """
    first_slot = block_size
    token_ids = np.zeros(1, np.int32)
    row = BatchRow(
        request_id=_REQUEST,
        token_ids=token_ids,
        num_past=0,
        past_slots=np.empty(0, np.int32),
        appends=(SlotRun(first_slot, 1),),
        sampler=SamplerState(SamplingParams(temperature=0.0), token_ids),
    )
    yield StepBatch(_STEP, "prefill", gears.pick("prefill", past=1), (row,))
    # Its KV goes where the first token's was read from: a block may have one slot alone.
    behind = BatchRow(
        request_id=_REQUEST,
        token_ids=token_ids,
        num_past=1,
        past_slots=np.array([first_slot], np.int32),
        appends=row.appends,
        sampler=row.sampler,
    )
    yield StepBatch(_STEP, "decode", gears.pick("decode", past=1), (behind,))
