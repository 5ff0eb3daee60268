"""The one thread that owns the device's context.

A context is current per thread, and one stream has one order: so every pyACL call of the daemon,
from `init` to `finalize`, runs here, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs functions on one thread, in the order they were asked for."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def start(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """As `run`, but the function is on its way when this returns."""
        return asyncio.wrap_future(self._pool.submit(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` on the device thread and returns what it returns.

        A cancelled wait does not stop a function that has started; it ends by itself and the next
        one waits for it.

        Raises:
            RuntimeError: the thread is closed.
            Exception: whatever the function raises.
        """
        return await self.start(function, *args, **kwargs)

    async def close(self) -> None:
        """Waits for what was asked for and ends the thread. Idempotent."""
        await asyncio.to_thread(self._pool.shutdown)
