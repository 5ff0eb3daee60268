"""Load on a daemon: so many unfinished requests at once, over a few connections, to the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ipc.client import Client
from ipc.messages import Usage
from tools.bench.prompts import Prompts

#: The last of a thousand waiting requests is answered after all the others [seconds].
PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer.

    Attributes:
        ttft_s: from sending the request to its first token [seconds].
        usage: what the daemon says that it used.
    """

    ttft_s: float
    usage: Usage


@dataclass(frozen=True, slots=True)
class Load:
    """What to send.

    Attributes:
        prompts: token ids, one row a request.
        at_once: unfinished requests, as long as there are so many left.
        num_connections: the requests take turns on them.
        max_tokens: answer tokens of each request, chosen greedily; end tokens do not end it.
    """

    prompts: Prompts
    at_once: int
    num_connections: int
    max_tokens: int


async def send_all(endpoint: str, load: Load, note_end: Callable[[int], None]) -> list[Answered]:
    """Send every prompt, each as soon as another one is answered.

    Args:
        note_end: called after every answer, with the number of answers so far.

    Returns:
        The answers, in the order in which they ended.

    Raises:
        IpcError: a request failed, or was refused; the others are given up.
    """
    rows = iter(range(len(load.prompts)))
    answers: list[Answered] = []
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client(endpoint, timeout_s=PATIENCE_S))
            for _ in range(load.num_connections)
        ]
        senders = [
            asyncio.ensure_future(_send(clients[i % len(clients)], load, rows, answers, note_end))
            for i in range(load.at_once)
        ]
        try:
            await asyncio.gather(*senders)
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.wait(senders)
    return answers


async def _send(
    client: Client,
    load: Load,
    rows: Iterator[int],
    answers: list[Answered],
    note_end: Callable[[int], None],
) -> None:
    """One after the other, as long as there are rows that nobody has sent."""
    for row in rows:
        start_s = time.perf_counter()
        first_s: float | None = None
        answer = client.generate(
            prompt_ids=load.prompts[row].tolist(),
            max_tokens=load.max_tokens,
            temperature=0,
            ignore_eos=True,
        )
        async for _ in answer:
            first_s = first_s or time.perf_counter()
        end_s = time.perf_counter()
        answers.append(Answered((first_s or end_s) - start_s, (await answer.result()).usage))
        note_end(len(answers))
