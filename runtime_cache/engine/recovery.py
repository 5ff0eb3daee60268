"""Brings the device back to where a step can run, after one that failed; or gives it up.

Not pure: it waits for the device thread. What is still running is waited for in short turns, so
that whoever wants an end of it is heard.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Literal

import structlog

from runtime_cache.errors import (
    AclError,
    DeviceHung,
    DeviceLost,
    RuntimeCacheError,
    StepTimeout,
)

log = structlog.get_logger(__name__)

#: One turn of waiting for the device [milliseconds].
TURN_MS = 500
#: When so many steps have failed in a row, whatever with, only a new process may help: a request
#: that fails each time it is computed fails twice. Not from a manual: of most codes of failed work
#: those say no more than "collect logs".
MAX_FAILURES = 8

#: What the device is doing. `recovering`: a step has failed, and it is being asked whether it
#: works. `hung`: a step goes on longer than it may. `lost`: it cannot be used any more.
DeviceState = Literal["serving", "recovering", "hung", "lost"]
#: Waits so long [milliseconds] for what still runs, then asks the device whether it works; raises
#: StepTimeout or DeviceLost.
Recover = Callable[[int], Awaitable[None]]


async def _nothing_to_do(timeout_ms: int) -> None:
    """For a device that is well as soon as its step has failed."""


class Recovery:
    """What is done after a step that failed.

    Attributes:
        state: see `DeviceState`.
    """

    def __init__(
        self,
        recover: Recover = _nothing_to_do,
        *,
        hang_limit_ms: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        hang_limit_ms: how long to wait for a step that did not end in time, beyond that time.
        clock: seconds.
        """
        self.state: DeviceState = "serving"
        self._recover = recover
        self._hang_limit_s = hang_limit_ms / 1000
        self._clock = clock
        self._num_failures = 0
        self._is_given_up = False

    @property
    def is_given_up(self) -> bool:
        """Whether work still runs that nobody waits for any more."""
        return self.state == "lost" and self._is_given_up

    def note_done(self) -> None:
        """A step is done."""
        self._num_failures = 0

    def note_lost(self) -> None:
        """The device cannot be used any more."""
        self.state = "lost"

    def give_up(self) -> None:
        """Do not wait any more for a step that hangs."""
        self._is_given_up = True

    async def run(self, error: AclError) -> None:
        """Wait until a step can run again; nothing of the failed one runs then.

        Args:
            error: how the step has failed.

        Raises:
            DeviceHung: something runs on, longer than it may.
            DeviceLost: the device does not work any more.
        """
        self.state = "hung" if isinstance(error, StepTimeout) else "recovering"
        try:
            await self._wait()
            self.count(error)
        except DeviceLost:
            self.state = "lost"
            raise
        log.warning("device_recovered", after=self.state)
        self.state = "serving"

    async def _wait(self) -> None:
        begun_s = self._clock()
        while True:
            left_s = self._hang_limit_s - (self._clock() - begun_s)
            try:
                return await self._recover(min(TURN_MS, max(1, round(left_s * 1000))))
            except StepTimeout as error:
                if self._is_given_up or self._clock() - begun_s >= self._hang_limit_s:
                    self._is_given_up = True
                    raise DeviceHung(*_call(error), "work on the device does not end") from error
                self.state = "hung"  # if it was not, the question itself does not end

    def count(self, error: RuntimeCacheError) -> None:
        """One more step has failed.

        Raises:
            DeviceLost: they were too many in a row.
            RuntimeCacheError: the error itself, if they were, and it is none of the device.
        """
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return
        if not isinstance(error, AclError):
            raise error
        detail = f"{MAX_FAILURES} steps in a row have failed, this one was the last"
        raise DeviceLost(*_call(error), detail) from error


def _call(error: AclError) -> tuple[str, int, str]:
    return error.function, error.acl_code, error.acl_name
