"""A service manager that is none: the datagram socket of one, and what was said to it."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from tests.support.rtcached import PATIENCE_S

Message = dict[str, str]

#: Said by the manager to itself.
_MARK, _END = b"MARK", b"END"


class ServiceManager:
    """Listens; a context manager.

    Messages are taken at once, on a thread: the system keeps ten of them, and then whoever sends
    has to wait.

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
        self._path = f"\0{name}" if directory is None else self.address
        self._socket, self._own = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)
        )
        self._socket.bind(self._path)
        self._said: SimpleQueue[bytes] = SimpleQueue()
        self._reader = threading.Thread(target=self._take, daemon=True)

    def __enter__(self) -> ServiceManager:
        self._reader.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._own.sendto(_END, self._path)
        self._reader.join(PATIENCE_S)
        self._socket.close()
        self._own.close()

    def next(self) -> Message:
        """The next message; its fields."""
        return self._next(PATIENCE_S)

    def until(self, is_wanted: Callable[[Message], bool]) -> Message:
        """The next one of a kind; those before it are read."""
        while not is_wanted(message := self.next()):
            pass
        return message

    def until_silent(self, silence_s: float) -> None:
        """Wait until nothing has been said for so long: what a watchdog does [seconds]."""
        try:
            while True:
                self._next(silence_s)
        except TimeoutError:
            return

    def rest(self) -> list[Message]:
        """What has been said and was not read yet; does not wait for more."""
        begin = len(self.heard)
        self._own.sendto(_MARK, self._path)
        while (data := self._said.get(timeout=PATIENCE_S)) != _MARK:
            self._note(data)
        return self.heard[begin:]

    def _take(self) -> None:
        while (data := self._socket.recv(1 << 16)) != _END:
            self._said.put(data)

    def _next(self, timeout_s: float) -> Message:
        try:
            data = self._said.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"nothing was said for {timeout_s:g} s") from None
        return self._note(data)

    def _note(self, data: bytes) -> Message:
        lines = data.decode().splitlines()
        self.heard.append(dict(line.split("=", 1) for line in lines))
        return self.heard[-1]
