"""Many answers at once, for the async client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from ipc.answers import Result
from ipc.errors import Closed, IpcError
from ipc.many import Outcome, Prompt, pause_s


class Asked(Protocol):
    """What asking for an answer gives."""

    async def result(self) -> Result: ...


class Outcomes:
    """The outcomes of many requests; to be iterated over once.

    No request is made before that. Leaving the loop cancels what is unfinished, at once if the loop
    stands in `contextlib.aclosing(outcomes.__aiter__())`.

    Args:
        prompts: taken as room becomes free.
        ask: makes the request for a prompt.
        max_at_once: requests that are begun and not handed out yet.
        in_order: hand out in the order of the prompts; False: as they end.
        max_tries: of a request that may succeed later.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        ask: Callable[[Prompt], Asked],
        *,
        max_at_once: int,
        in_order: bool,
        max_tries: int,
    ) -> None:
        self._prompts = iter(enumerate(prompts))
        self._ask = ask
        self._max_at_once = max_at_once
        self._in_order = in_order
        self._max_tries = max_tries
        self._running: deque[asyncio.Task[Outcome]] = deque()
        self._ended: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Outcome]:
        """Outcomes, errors among them; raises what is wrong with a prompt in itself, and Closed."""
        try:
            while self._fill():
                yield await self._next()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _fill(self) -> bool:
        """Begin as many as there is room for; whether any is to be handed out."""
        while len(self._running) < self._max_at_once:
            numbered = next(self._prompts, None)
            if numbered is None:
                break
            task = asyncio.ensure_future(self._answer(*numbered))
            if not self._in_order:
                task.add_done_callback(self._ended.put_nowait)
            self._running.append(task)
        return bool(self._running)

    async def _next(self) -> Outcome:
        """The next one to hand out."""
        task = self._running[0] if self._in_order else await self._ended.get()
        outcome = await task
        self._running.remove(task)
        return outcome

    async def _answer(self, index: int, prompt: Prompt) -> Outcome:
        num_tries = 1
        while True:
            try:
                return Outcome(index, await self._ask(prompt).result())
            except Closed:
                raise
            except IpcError as error:
                wait_s = pause_s(error, num_tries)
                if wait_s is None or num_tries == self._max_tries:
                    return Outcome(index, None, error)
            num_tries += 1
            await asyncio.sleep(wait_s)
