"""Free device memory, looked at now and then: a gauge, and an alarm when it is low.

The KV pool is one allocation made at the start, so evicting frees nothing of it: what takes device
memory in service is the driver, or another process on the same device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from runtime_cache.device.acl_device import AclDevice, MemoryInfo
from runtime_cache.errors import AclError, DeviceError

log = structlog.get_logger(__name__)

_MIB = 1024**2


class MemoryWatch:
    """What the driver last said.

    Attributes:
        info: the last reading; None if the driver does not say.
        is_low: whether less is free than there should be.
        low_bytes: how much there should be; 0 for no alarm.
        loaded_bytes: what loading the bundle took: pool, weights, work memory, staging; None if the
            driver does not say.
    """

    def __init__(self, read: Callable[[], Awaitable[MemoryInfo | None]], low_bytes: int) -> None:
        """Args:
        read: asks the driver.
        """
        self.info: MemoryInfo | None = None
        self.is_low = False
        self.loaded_bytes: int | None = None
        self._read = read
        self.low_bytes = low_bytes
        self._has_failed = False

    async def run(self, period_s: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            await self.look()

    async def look(self) -> None:
        """Look once; the log says when memory becomes low, and when it no longer is.

        A refusal of the driver is logged once, and read as not knowing.
        """
        try:
            self.info = await self._read()
        except DeviceError as error:
            self.info = None
            if not self._has_failed:
                log.warning("device_memory_unknown", error=str(error))
            self._has_failed = True
        self._judge()

    def _judge(self) -> None:
        if self.info is None:  # what is not known is no alarm, and no end of one
            return
        was_low, self.is_low = self.is_low, self.info.free_bytes < self.low_bytes
        if self.is_low == was_low:
            return
        free_mib, low_mib = self.info.free_bytes // _MIB, self.low_bytes // _MIB
        if self.is_low:
            log.warning("device_memory_low", free_mib=free_mib, low_mib=low_mib)
        else:
            log.info("device_memory_recovered", free_mib=free_mib, low_mib=low_mib)


def memory_or_none(device: AclDevice) -> MemoryInfo | None:
    """What the driver says; None if it does not, or refuses."""
    try:
        return device.memory_info()
    except AclError:
        return None


def taken_bytes(before: MemoryInfo | None, after: MemoryInfo | None) -> int | None:
    """What became used between two readings, by whomever; None without both."""
    if before is None or after is None:
        return None
    return before.free_bytes - after.free_bytes
