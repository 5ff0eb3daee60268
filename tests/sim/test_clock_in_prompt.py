"""A clock in the system prompt: the answer names the token where it is, and what moving it gives.

[23] of facts/peers.md (d), the most frequent reason of a hit rate of zero. One token a byte, and a
BOS before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ipc.client import Client
from ipc.messages import CacheReport
from om_models.bundle import Bundle
from tests.support.house import House, ask, open_house

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

RULES = "You are a help desk. Be kind, be brief, be right. "
CLOCK = "Now it is 12:30:{:02}. "
#: One more is the BOS.
SAME = 1 + len("Now it is 12:30:1")


async def computed(house: House, client: Client, prompt: str) -> tuple[int, Any]:
    """Rows that the device computes for a prompt, and the answer."""
    counters = house.runtime.executor.counters
    before = sum(role.rows_appended for role in counters.values())
    answer = await ask(client, prompt, max_tokens=1)
    return sum(role.rows_appended for role in counters.values()) - before, answer


async def test_a_clock_at_the_beginning(tiny_bundle: Bundle, tmp_path: Path) -> None:
    async with (
        open_house(tiny_bundle, tmp_path) as house,
        Client(house.server.endpoint) as client,
    ):
        prompts = [CLOCK.format(second) + RULES + "Hello" for second in (15, 16, 17)]
        num_tokens = 1 + len(prompts[0])
        num_rows, answer = await computed(house, client, prompts[0])
        assert (num_rows, answer.cache) == (num_tokens, CacheReport("cold"))
        for prompt in prompts[1:]:
            reason = CacheReport("diverged", SAME, num_tokens)
            foreseen = await client.explain(prompt)
            assert (foreseen.cached_tokens, foreseen.cache) == (SAME, reason)
            num_rows, answer = await computed(house, client, prompt)
            assert (num_rows, answer.cache) == (num_tokens - SAME, reason)
            # The very token where they part.
            assert prompt[SAME - 1] != prompts[0][SAME - 1]
        await house.check(client)


async def test_a_clock_behind_what_does_not_change(tiny_bundle: Bundle, tmp_path: Path) -> None:
    async with (
        open_house(tiny_bundle, tmp_path) as house,
        Client(house.server.endpoint) as client,
    ):
        prompts = [RULES + CLOCK.format(second) + "Hello" for second in (15, 16, 17)]
        num_tokens = 1 + len(prompts[0])
        assert (await computed(house, client, prompts[0]))[0] == num_tokens
        for prompt in prompts[1:]:
            num_rows, answer = await computed(house, client, prompt)
            assert answer.cache == CacheReport("diverged", SAME + len(RULES), num_tokens)
            assert num_rows == len("5. Hello")
        await house.check(client)
