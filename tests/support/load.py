"""Clients that ask the same questions over and over, of a daemon that may go and come back.

The model is greedy, so every answer is known beforehand; an answer, or the part of it that came,
may never differ from it, whatever happens to the daemon meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from ipc.client import Client
from ipc.errors import IpcError, ServerError

#: Longer than any call may take, its own patience included; only a hang reaches it [seconds].
PATIENCE_S = 100.0
MAX_TOKENS = 24

#: Question → the tokens of its answer.
Answers = Mapping[str, tuple[int, ...]]


def prompts(number: int) -> list[str]:
    """Some that share a beginning, and some that do not."""
    return [f"{'a common beginning ' * (index % 3 * 4)}question {index}" for index in range(number)]


async def ask(client: Client, prompt: str, max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
    """The whole answer, greedy."""
    stream = client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return (await stream.result()).token_ids


async def answers_of(endpoint: str, number: int) -> Answers:
    """What is right: each question asked alone of a daemon that nobody disturbs."""
    async with Client(endpoint) as client:
        return {prompt: await ask(client, prompt) for prompt in prompts(number)}


class Load:
    """Several clients, each with one request after the other, until told to stop.

    Args:
        right: question → answer.
        timeout_s: the clients' patience [seconds].

    Attributes:
        num_answers: whole ones, each compared.
        num_torn: answers of which a part came and the rest did not.
        ends: how calls ended that brought no whole answer: class of the error, or its code.
    """

    def __init__(
        self,
        endpoint: str,
        right: Mapping[str, tuple[int, ...]],
        *,
        timeout_s: float,
        seed: int = 0,
    ) -> None:
        self._endpoint = endpoint
        self._right = right
        self._timeout_s = timeout_s
        self._chance = random.Random(seed)
        self._changed = asyncio.Event()
        self._num_pieces = 0
        self._is_over = False
        self.num_answers = self.num_torn = 0
        self.ends: Counter[str] = Counter()

    async def while_running(self, num_clients: int, scene: Callable[[], Awaitable[None]]) -> None:
        """Run the clients while something happens to their daemon, and to their ends.

        Raises:
            AssertionError: an answer is wrong, or a call does not end.
        """
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client(self._endpoint, timeout_s=self._timeout_s))
                for _ in range(num_clients)
            ]
            tasks = [asyncio.ensure_future(self._go_on_asking(client)) for client in clients]
            tasks.append(asyncio.ensure_future(self._until_over(scene)))
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _until_over(self, scene: Callable[[], Awaitable[None]]) -> None:
        await scene()
        self._is_over = True

    async def pieces(self, number: int) -> None:
        """Wait until so many more pieces of answers have come, to whichever client."""
        await self._until(lambda start=self._num_pieces: self._num_pieces >= start + number)

    async def answers(self, number: int) -> None:
        """Wait until so many more whole answers have come."""
        await self._until(lambda start=self.num_answers: self.num_answers >= start + number)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), PATIENCE_S)

    async def _go_on_asking(self, client: Client) -> None:
        while not self._is_over:
            prompt = self._chance.choice(list(self._right))
            try:
                await asyncio.wait_for(self._ask(client, prompt), PATIENCE_S)
            except ServerError as error:
                self.ends[error.code] += 1
            except IpcError as error:
                self.ends[type(error).__name__] += 1

    async def _ask(self, client: Client, prompt: str) -> None:
        """One answer, compared piece by piece."""
        right, found = self._right[prompt], ()
        stream = client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        try:
            async for piece in stream:
                found += piece.token_ids
                assert found == right[: len(found)], prompt
                self._num_pieces += 1
                self._changed.set()
            result = await stream.result()
        finally:
            self.num_torn += 0 < len(found) < len(right)
        if result.finish_reason == "length":
            assert found == right
            self.num_answers += 1
        else:
            self.ends[result.finish_reason] += 1
        self._changed.set()
