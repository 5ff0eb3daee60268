"""Tells the service manager again and again that the daemon lives, as long as it does.

It does while the event loop turns, since this is a task of it, and while the device thread keeps
its promise (`device.thread`). A driver call that never returns breaks the promise; one that keeps
the interpreter meanwhile stops the loop as well. The manager then ends the process and starts it
again, which nobody inside it could.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from runtime_cache.notify import Notifier

log = structlog.get_logger(__name__)

#: Messages in the time that the manager gives: one or two may be late.
_MESSAGES = 3
#: How often the status is looked at when nobody watches [seconds].
_STATUS_S = 5.0
_STUCK = "Stuck: a call of the driver does not return"


class Watched(Protocol):
    """The device thread, as far as it is watched; see `DeviceThread`."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def overdue_s(self) -> float: ...


class Watchdog:
    """Feeds the manager's watchdog, and keeps its status line true."""

    def __init__(self, notifier: Notifier, thread: Watched, status: Callable[[], str]) -> None:
        """Args:
        status: what the daemon is doing, in a sentence.
        """
        self._notifier = notifier
        self._thread = thread
        self._status = status
        self._said = ""
        self._is_withheld = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look again and again from now on, in the running loop; nothing to do without a manager.

        To be called when the daemon is ready: no manager watches a service that starts.
        """
        if self._notifier.has_manager:
            self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        limit_s = self._notifier.watchdog_s
        period_s = _STATUS_S if limit_s is None else min(_STATUS_S, limit_s / _MESSAGES)
        while True:
            try:
                self.look()
            except Exception:  # without this line nobody would know why the manager ends us
                log.exception("watchdog_failed")
            await asyncio.sleep(period_s)

    def look(self) -> None:
        """Tell once, if all is well; the log says when it no longer is, and when it is again."""
        limit_s = self._notifier.watchdog_s
        overdue_s = self._thread.overdue_s
        is_well = limit_s is None or (self._thread.is_alive and overdue_s <= limit_s)
        if is_well == self._is_withheld:
            self._note(overdue_s, is_well=is_well)
        self._say(self._status() if is_well else _STUCK)
        if is_well and limit_s is not None:
            self._notifier.alive()

    def _say(self, status: str) -> None:
        if status != self._said:
            self._notifier.status(status)
            self._said = status

    def _note(self, overdue_s: float, *, is_well: bool) -> None:
        self._is_withheld = not is_well
        if is_well:
            log.warning("watchdog_resumed")
        else:
            log.error("watchdog_withheld", device_thread_overdue_s=round(overdue_s, 1))
