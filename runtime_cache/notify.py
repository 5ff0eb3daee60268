"""What the service manager is told: systemd's notification protocol, spoken without its library.

Each message is one datagram of `NAME=value` lines to the socket that NOTIFY_SOCKET names. Whoever
was started without one tells nobody, and asks nothing. Messages may be sent from any thread.

Source: sd_notify(3), sd_watchdog_enabled(3) of systemd 249.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

from runtime_cache.errors import ConfigError

log = structlog.get_logger(__name__)

#: A manager that does not read for so long misses a message, and is never waited for again.
SEND_TIMEOUT_S = 0.5
_USEC = 1_000_000


class Notifier:
    """Tells one service manager, or nobody.

    Attributes:
        watchdog_s: how often it wants to hear `alive` at least [seconds]; None: not at all.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """Args:
        address: path of a socket file, or `@` and an abstract name; None for nobody.
        """
        self.watchdog_s = watchdog_s
        self._address = ""
        self._has_failed = False
        self._socket: socket.socket | None = None
        if address is not None:
            self._address = f"\0{address[1:]}" if address[0] == "@" else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.settimeout(SEND_TIMEOUT_S)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Notifier:
        """The manager that has started this process.

        Raises:
            ConfigError: its variables are none that can be followed.
        """
        address = env.get("NOTIFY_SOCKET") or None
        if address is not None and not (address[0] in "/@" and len(address) > 1):
            raise ConfigError(
                f"NOTIFY_SOCKET is {address!r}: the path of a socket, or @ and an abstract name, "
                f"is what systemd sets; unset it to start without a service manager"
            )
        return cls(address, None if address is None else _watchdog_s(env))

    @property
    def has_manager(self) -> bool:
        """Whether anybody is told."""
        return self._socket is not None

    def status(self, text: str, may_take_s: float | None = None) -> None:
        """Say what is being done.

        Args:
            may_take_s: what is begun may be silent for so long [seconds]: neither the time to
                start, nor that to stop, is over before.
        """
        self._send(STATUS=text, **_extension(may_take_s))

    def ready(self, text: str) -> None:
        """Clients can connect: what was ordered after this service may start."""
        self._send(READY="1", STATUS=text)

    def alive(self) -> None:
        """All is well, until `watchdog_s` from now."""
        self._send(WATCHDOG="1")

    def stopping(self, text: str, may_take_s: float) -> None:
        """It ends, of its own accord or because it was asked to.

        Args:
            may_take_s: as for `status`.
        """
        self._send(STOPPING="1", STATUS=text, **_extension(may_take_s))

    def close(self) -> None:
        """Tell nobody any more. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, **fields: str) -> None:
        """One datagram; a manager that does not take it costs a line in the log, the first time."""
        if self._socket is None:
            return
        lines = (f"{name}={' '.join(text.split())}\n" for name, text in fields.items())
        try:
            self._socket.sendto("".join(lines).encode("utf-8", "replace"), self._address)
        except (TimeoutError, BlockingIOError):
            self._socket.settimeout(0.0)  # the event loop has better things to do
            self._complain("the service manager does not read")
        except OSError as error:
            self._complain(str(error))

    def _complain(self, error: str) -> None:
        if not self._has_failed:
            log.warning("notify_failed", error=error)
        self._has_failed = True


def _extension(may_take_s: float | None) -> dict[str, str]:
    if may_take_s is None:
        return {}
    return {"EXTEND_TIMEOUT_USEC": str(round(may_take_s * _USEC))}


def _watchdog_s(env: Mapping[str, str]) -> float | None:
    """How often this very process is to say that it lives; None if it is not asked to."""
    text = env.get("WATCHDOG_USEC")
    if not text or env.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"WATCHDOG_USEC is {text!r}: a number of microseconds is expected")
    return int(text) / _USEC
