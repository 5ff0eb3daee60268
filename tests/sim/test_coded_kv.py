"""Every KV row that a step reads is the right one: layer, position and token, to the element.

The whole engine on the model of `tests.support.coded_model`, whose rows say what they are, with
every block that nobody has poisoned before every step. `test_coded_model` shows what it would find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.engine.commands import FailRequest, FinishRequest
from runtime_cache.ids import TenantName
from tests.support.coded_model import NUM_REPORTS, answer, right_report
from tests.support.served import BLOCK, random_prompt
from tests.support.watched import Watched, watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NUM_TOKENS = 6
#: Five blocks and one token.
PROMPT = random_prompt(1, 21)


async def check(
    host: Watched, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, *, tenant: str = ""
) -> int:
    """Ask; every read of every step must be right. Returns how many tokens were cached."""
    found = await host.ask(prompt, num_tokens, tenant=TenantName(tenant))
    tokens = [*prompt, *found.greedy.token_ids]
    assert tokens[len(prompt) :] == answer(prompt, num_tokens)
    assert set(found.logits) == set(range(len(prompt), len(tokens)))
    for length, several in found.logits.items():
        for logits in several:
            assert logits[:NUM_REPORTS].tolist() == right_report(tokens[:length])
    return found.greedy.cached


async def leave_cached(host: Watched, prompt: Sequence[int]) -> None:
    """Empty the cache, then compute a prompt and nothing behind it."""
    host.engine.evict(None)
    if prompt:
        await host.greedy(prompt, 1)


async def test_every_hit_length(coded_bundle: Bundle) -> None:
    async with watched(coded_bundle) as host:
        for num_cached in range(len(PROMPT)):
            await leave_cached(host, PROMPT[:num_cached])
            copied, appended = host.rows_copied(), host.rows_appended()
            assert await check(host, PROMPT) == num_cached
            assert host.rows_copied() - copied == num_cached % BLOCK
            num_computed = host.rows_appended() - appended
            assert num_computed == len(PROMPT) - num_cached + NUM_TOKENS - 1


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])
async def test_the_same_prompt_again(coded_bundle: Bundle, length: int) -> None:
    """All but its last token is reused, wherever that token lies."""
    prompt = random_prompt(2, length)
    async with watched(coded_bundle) as host:
        assert await check(host, prompt) == 0
        for _ in range(2):
            assert await check(host, prompt) == length - 1


async def test_every_place_of_divergence(coded_bundle: Bundle) -> None:
    """The copied block is the second prompt's own: the first one's stays as it is."""
    async with watched(coded_bundle) as host:
        for place in range(len(PROMPT)):
            host.engine.evict(None)
            await check(host, PROMPT)
            other = [*PROMPT[:place], (PROMPT[place] + 1) % 256, *random_prompt(place, 9)]
            assert await check(host, other) == place
            assert await check(host, PROMPT) == len(PROMPT) - 1
            assert await check(host, other) == len(other) - 1


async def test_many_continuations_of_one_block(coded_bundle: Bundle) -> None:
    """Each shares another part of it, or of another continuation, always as much as there is."""
    fed: list[list[int]] = []
    random = np.random.RandomState(3)
    async with watched(coded_bundle) as host:
        for _ in range(60):
            shared = random.randint(2 * BLOCK)
            prompt = [*PROMPT[:shared], *random.randint(0, 3, random.randint(1, 9)).tolist()]
            known = max((num_common(prompt[:-1], other) for other in fed), default=0)
            assert await check(host, prompt) == known
            fed.append([*prompt, *answer(prompt, NUM_TOKENS - 1)])


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


async def test_turns_of_a_conversation(coded_bundle: Bundle) -> None:
    """Prompt and answer are reused, but for the last token, which was never fed."""
    async with watched(coded_bundle) as host:
        for length in range(1, 2 * BLOCK + 1):
            prompt = random_prompt(length, length)
            known = 0
            for turn in range(4):
                assert await check(host, prompt, 5 + turn) == known
                known = len(prompt) + 5 + turn - 1
                prompt += [*answer(prompt, 5 + turn), *random_prompt(turn, 3)]


async def test_what_a_cancelled_answer_left_is_reused(coded_bundle: Bundle) -> None:
    async with watched(coded_bundle) as host:
        for num_answered in (1, 2, 3, 7):
            prompt = random_prompt(num_answered, 10)
            ear = host.submit(prompt, 100)
            while len(ear.emitted) < num_answered:  # noqa: ASYNC110 (each turn is a step)
                await asyncio.sleep(0)
            host.engine.cancel(host.last_id, "cancelled")
            assert isinstance(await ear.final, FinishRequest)
            tokens = [*prompt, *(token for piece in ear.emitted for token in piece.token_ids)]
            assert await check(host, [*tokens, 1, 2, 3]) >= len(tokens) - 1


async def test_requests_in_flight_together(coded_bundle: Bundle) -> None:
    """Some begin while the one they copy from is still being answered."""
    prompts = [PROMPT[: 2 * n] + random_prompt(n, 1 + 3 * n) for n in range(10)]
    async with watched(coded_bundle) as host:
        for _ in range(2):
            await asyncio.gather(*(check(host, prompt, 12) for prompt in prompts))
        assert max(len(batch.rows) for batch in host.batches) == 4
        assert host.rows_copied() > 0


async def test_blocks_that_change_owners(coded_bundle: Bundle) -> None:
    """A pool that never holds all prompts, which share beginnings of every length."""
    prompts = [PROMPT[: 3 * n] + random_prompt(n, 30 - 3 * n) for n in range(8)]
    async with watched(coded_bundle, num_blocks=22) as host:
        for turn in range(6):
            order = [prompts[(5 * turn + step * (2 * turn + 1)) % 8] for step in range(8)]
            for prompt in order:
                await check(host, prompt)
            await asyncio.gather(*(check(host, prompt) for prompt in order))
        assert host.runtime.cache.counters.evicted_blocks > 50
        assert host.rows_copied() > 0


async def test_after_eviction_of_any_part(coded_bundle: Bundle) -> None:
    async with watched(coded_bundle) as host:
        for num_evicted in range(7):
            host.engine.evict(None)
            await host.greedy(PROMPT, 1)
            host.engine.evict(None, max_blocks=num_evicted)
            await check(host, PROMPT)


async def test_preempted_answers(coded_bundle: Bundle) -> None:
    prompts = [PROMPT[: 7 * n] + random_prompt(n, 30 - 7 * n) for n in range(4)]
    async with watched(coded_bundle, num_blocks=26) as host:
        await asyncio.gather(*(check(host, prompt, 40) for prompt in prompts))
        assert host.engine.state.snapshot().engine.preemptions > 0
        for prompt in prompts:
            await check(host, prompt, 40)


async def test_two_tenants_with_the_same_prompts(coded_bundle: Bundle) -> None:
    async with watched(coded_bundle, tenants={"a": 50}) as host:
        for num_known in (0, len(PROMPT) - 1):
            for tenant in ("", "a"):
                assert await check(host, PROMPT, tenant=tenant) == num_known
        both = (check(host, PROMPT, tenant=tenant) for tenant in ("", "a"))
        assert await asyncio.gather(*both) == [len(PROMPT) - 1] * 2


@pytest.mark.parametrize("call", [1, 2, 3, 4])
async def test_a_step_that_fails_on_its_copies(coded_bundle: Bundle, call: int) -> None:
    """One of: upload, copy, append, download. What it was to write is never reused."""
    async with watched(coded_bundle, on_failed_step="fail") as host:
        await leave_cached(host, PROMPT[: 2 * BLOCK + 3])
        faults.inject("acl.rt.memcpy_async", code=507013, call=call, when="run")
        assert isinstance(await host.submit(PROMPT[:12], 1).final, FailRequest)
        await check(host, PROMPT)
        assert await check(host, PROMPT) == len(PROMPT) - 1
        inspect.clear()  # what ran behind the dropped work read what nobody had written
