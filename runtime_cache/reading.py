"""Tokenises long texts on a worker thread, beside the event loop, one after the other.

Short ones are read by the service itself: they cost less than the hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from runtime_cache.errors import QueueFull
from runtime_cache.intake import Intake, Prompt
from runtime_cache.work import Work

#: Characters that may wait to be tokenised, of all clients together: about ten seconds' work.
_MAX_CHARS = 32 * 1024**2
_RETRY_MS = 5000


class Reader:
    """Reads the prompts of works; all but the reading itself happens in the event loop."""

    def __init__(
        self,
        go_on: Callable[[Work, Prompt], None],
        fail: Callable[[Work, Exception], None],
    ) -> None:
        """Args:
        go_on: called with the prompt, also if the work has ended meanwhile.
        fail: called if the prompt cannot be read, or if `go_on` fails.
        """
        self._go_on = go_on
        self._fail = fail
        self._num_chars = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def start(self, work: Work, intake: Intake) -> None:
        """Begin to read; cancelling `work.reading` gives it up, and nothing is called.

        Raises:
            QueueFull: too much waits already. Nothing has begun.
        """
        num_chars = work.num_chars
        if self._num_chars + num_chars > _MAX_CHARS:
            raise QueueFull(
                "too much text of other prompts waits to be tokenised",  # whose: no matter
                retry_after_ms=_RETRY_MS,
            )
        work.reading = self._thread.submit(intake.read, work.prompted)
        self._num_chars += num_chars
        task = asyncio.ensure_future(self._wait(work, num_chars))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until everything that was begun is read or given up."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Give up what has not begun, wait for the rest, stop the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self.settle()

    async def _wait(self, work: Work, num_chars: int) -> None:
        assert work.reading is not None
        try:
            self._go_on(work, await asyncio.wrap_future(work.reading))
        except asyncio.CancelledError:
            pass  # nobody wants this prompt any more
        except Exception as error:
            self._fail(work, error)
        finally:
            self._num_chars -= num_chars
