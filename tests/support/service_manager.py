"""A service manager that is none: the datagram socket of one, and what was said to it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.support.rtcached import PATIENCE_S

Message = dict[str, str]


class ServiceManager:
    """Listens; a context manager.

    Attributes:
        address: what NOTIFY_SOCKET says.
        heard: every message that was read so far, in order.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Args:
        directory: for the socket file; None for an abstract name.
        """
        name = f"n{secrets.token_hex(3)}"  # short: of the file's path the system takes 107 bytes
        self.address = f"@{name}" if directory is None else f"{directory}/{name}"
        self.heard: list[Message] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name}" if directory is None else self.address)
        self._socket.settimeout(PATIENCE_S)

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def next(self) -> Message:
        """The next message; its fields."""
        lines = self._socket.recv(1 << 16).decode().splitlines()
        self.heard.append(dict(line.split("=", 1) for line in lines))
        return self.heard[-1]

    def until(self, is_wanted: Callable[[Message], bool]) -> Message:
        """The next one of a kind; those before it are read."""
        while not is_wanted(message := self.next()):
            pass
        return message

    def until_silent(self, silence_s: float) -> None:
        """Wait until nothing has been said for so long: what a watchdog does [seconds]."""
        self._socket.settimeout(silence_s)
        try:
            while True:
                self.next()
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(PATIENCE_S)

    def rest(self) -> list[Message]:
        """What has been said and was not read yet; does not wait."""
        begin = len(self.heard)
        self._socket.setblocking(False)
        try:
            while True:
                self.next()
        except BlockingIOError:
            return self.heard[begin:]
        finally:
            self._socket.settimeout(PATIENCE_S)
