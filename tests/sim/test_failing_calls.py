"""Every call of a request fails once, wherever it is: what it was to write is a miss afterwards.

[8, 10, 39, 65] of facts/peers.md (d): a peer's store that had failed stayed visible. The request of
that step fails and may be sent again; nothing else notices; the blocks are back in the pool; the
lookup says exactly what earlier steps had done; the answer is then right.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.engine.commands import EmitTokens, FailRequest, FinishRequest
from runtime_cache.engine.request import NewRequest, SamplingParams
from runtime_cache.ids import DEFAULT_TENANT, RequestId
from tests.support.served import BLOCK, Comparison, Ear, Served, check_idle, random_prompt, served

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

EXECUTE, COPY = "acl.mdl.execute_async", "acl.rt.memcpy_async"
#: A block and a half are cached before: the first step copies two rows.
NUM_CACHED = 6
#: Two chunks, of 32 tokens and of 3, then two decode steps.
PROMPT = random_prompt(1, 41)
NUM_TOKENS = 3


async def prepare(host: Served) -> None:
    host.engine.evict(None)
    await host.greedy(PROMPT[:NUM_CACHED], 1)
    host.batches.clear()
    inspect.clear()


def cached_tokens(host: Served) -> int:
    """What the lookup says of the prompt."""
    tokens = np.array(PROMPT, dtype=np.int32)
    return host.engine.explain(DEFAULT_TENANT, tokens).report.cached_tokens


@pytest.mark.parametrize("when", ["call", "run"])
@pytest.mark.parametrize("function", [COPY, EXECUTE])
async def test_each_call(
    tiny_bundle: Bundle, function: str, when: Literal["call", "run"], record_property: Any
) -> None:
    comparison = Comparison()
    async with served(tiny_bundle, on_failed_step="fail") as host:
        await prepare(host)
        right = await host.greedy(PROMPT, NUM_TOKENS)
        assert right.cached == NUM_CACHED
        assert len(host.batches) == 4
        num_calls = inspect.report().calls[function]
        num_failed = host.engine.state.snapshot().engine.failed_steps
        for call in range(1, num_calls + 1):
            await prepare(host)
            fault = faults.inject(function, code=507015, call=call, when=when)
            final = await host.submit(PROMPT, NUM_TOKENS).final
            assert fault.has_fired
            assert isinstance(final, FailRequest)
            assert (final.code, final.retryable) == ("acl", True)
            check_idle(host.runtime)
            # Whole blocks of the steps before the failed one, and what was there at first.
            num_done = host.batches[-1].rows[0].num_past
            num_left = max(NUM_CACHED, min(num_done // BLOCK * BLOCK, 40))
            assert cached_tokens(host) == num_left
            before = host.rows_appended()
            again = await host.greedy(PROMPT, NUM_TOKENS)
            assert again.cached == num_left
            assert host.rows_appended() - before == 41 - num_left + NUM_TOKENS - 1
            comparison.check_runs(again, right)
        assert host.engine.state.snapshot().engine.failed_steps == num_failed + num_calls
        assert host.runtime.cache.counters.dropped_blocks >= num_calls
        inspect.clear()  # what ran behind dropped work read what nobody had written
    comparison.report(record_property)


SAMPLED = SamplingParams(
    max_tokens=8,
    temperature=1.0,
    seed=5,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    logprobs=2,
    stop=("no such text",),
    ignore_eos=True,
)


async def sampled(host: Served) -> list[EmitTokens]:
    """The pieces of a sampled answer, computed from nothing."""
    host.engine.evict(None)
    ear = Ear()
    tokens = np.array(PROMPT, dtype=np.int32)
    detokenizer = host.runtime.tokenizer.detokenizer(is_continuation=True)
    request = NewRequest(host._new_id(), tokens, SAMPLED, detokenizer=detokenizer)
    host.engine.submit(request, ear)
    assert isinstance(await ear.final, FinishRequest)
    return [replace(piece, request_id=RequestId(0)) for piece in ear.emitted]


@pytest.mark.parametrize("when", ["call", "run"])
async def test_a_sampled_answer_goes_on_with_its_random_stream(
    coded_bundle: Bundle, when: Literal["call", "run"]
) -> None:
    """Tokens, text and log-probabilities are those of a run in which nothing failed.

    The model's logits are integers, so they are the same whichever way a token is computed.
    """
    async with served(coded_bundle) as host:
        right = await sampled(host)
        assert len({piece.token_ids for piece in right}) > 4
        for call in range(1, 10):
            fault = faults.inject(EXECUTE, code=507015, call=call, when=when)
            assert await sampled(host) == right
            assert fault.has_fired
        assert host.engine.state.snapshot().engine.recomputed == 9
        inspect.clear()  # what ran behind dropped work read what nobody had written
