"""Releasing in reverse order, all of it, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from runtime_cache.errors import DeviceError


class Teardown:
    """A stack of releases.

    `contextlib.ExitStack` would do but for one thing: it reports the last error, and the first one
    is the cause.
    """

    def __init__(self) -> None:
        self._releases: list[Callable[[], None]] = []

    def push(self, release: Callable[[], None]) -> None:
        """Adds a release that runs before all those already there."""
        self._releases.append(release)

    def close(self) -> None:
        """Runs every release once, last pushed first; a second call does nothing.

        Raises:
            DeviceError: the first failure, after all releases were tried.
        """
        first_error: DeviceError | None = None
        while self._releases:
            try:
                self._releases.pop()()
            except DeviceError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """Runs the releases if the block raises; its error is the one that is reported."""
        try:
            yield
        except BaseException:
            with suppress(DeviceError):
                self.close()
            raise
