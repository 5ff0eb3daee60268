"""Tokenises long texts and conversations on a worker thread, beside the event loop, one after the
other.

Short texts are read by the service itself: they cost less than the hop. Tenants take turns, each
with the text of it that came first: so a text waits for those before it of its own tenant, and each
time for at most one text of every other tenant. How much may wait is each tenant's own limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from runtime_cache.errors import QueueFull
from runtime_cache.ids import TenantName
from runtime_cache.intake import Intake, Prompt
from runtime_cache.work import Work

#: Characters of one tenant that may wait to be tokenised: about ten seconds' work.
_MAX_CHARS = 32 * 1024**2
#: Prompts of one tenant that may wait.
_MAX_PROMPTS = 4096
_RETRY_MS = 5000


class Reader:
    """Reads the prompts of works; all but the reading itself happens in the event loop."""

    def __init__(
        self,
        go_on: Callable[[Work, Prompt], None],
        fail: Callable[[Work, Exception], None],
    ) -> None:
        """Args:
        go_on: called with the prompt, also if the work has ended while it was read.
        fail: called if the prompt cannot be read, or if `go_on` fails.
        """
        self._go_on = go_on
        self._fail = fail
        #: What waits, by tenant, in order of arrival.
        self._lines: dict[TenantName, dict[Work, Intake]] = {}
        #: The tenants with something that waits or is being read, whose turn it is first.
        self._turns: deque[TenantName] = deque()
        #: What waits or is being read.
        self._num_chars: Counter[TenantName] = Counter()
        self._reading: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def start(self, work: Work, intake: Intake) -> None:
        """Take a prompt that is to be read.

        Raises:
            QueueFull: too much of its tenant waits already. Nothing was taken.
        """
        tenant, num_chars = work.tenant, work.num_chars
        line = self._lines.setdefault(tenant, {})
        if self._num_chars[tenant] + num_chars > _MAX_CHARS or len(line) >= _MAX_PROMPTS:
            raise QueueFull(
                "too much text of other prompts waits to be tokenised", retry_after_ms=_RETRY_MS
            )
        self._num_chars[tenant] += num_chars
        line[work] = intake
        if tenant not in self._turns:
            self._turns.append(tenant)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_all())

    def give_up(self, work: Work) -> None:
        """Nobody wants this prompt any more; it is not read if that has not begun."""
        if self._lines.get(work.tenant, {}).pop(work, None) is not None:
            self._num_chars[work.tenant] -= work.num_chars

    async def settle(self) -> None:
        """Wait until everything that was taken is read or given up."""
        if self._reading is not None:
            await self._reading

    async def close(self) -> None:
        """Give up what has not begun, wait for the rest, stop the thread. Idempotent."""
        for work in [work for line in self._lines.values() for work in line]:
            self.give_up(work)
        await self.settle()
        self._thread.shutdown(wait=False)

    async def _read_all(self) -> None:
        while self._turns:
            tenant = self._turns[0]
            line = self._lines[tenant]
            if line:
                work = next(iter(line))
                reading = asyncio.ensure_future(self._read(work, line.pop(work)))
                await asyncio.wait((reading,))  # whatever becomes of it, the others are read
            self._turns.popleft()
            if line:
                self._turns.append(tenant)

    async def _read(self, work: Work, intake: Intake) -> None:
        run = asyncio.get_running_loop().run_in_executor
        try:
            self._go_on(work, await run(self._thread, intake.read, work.prompted))
        except Exception as error:
            self._fail(work, error)
        finally:
            self._num_chars[work.tenant] -= work.num_chars
