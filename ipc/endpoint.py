"""Where a daemon listens: checks of the address, and the exclusive right to an ipc path.

libzmq removes whatever file stands at an ipc path before it binds, so a second daemon would take
the path from a running one and succeed. Therefore the right to a path is a lock on a file beside
it, and the listening socket is made here (its mode is set before anybody can connect) and handed
to libzmq as a file descriptor, so that libzmq neither creates nor removes the socket file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from dataclasses import dataclass

from ipc.errors import EndpointBusy, EndpointError
from ipc.tcp_port import check_port

DEFAULT_ENDPOINT = "ipc:///run/rtcached/rtcached.sock"

#: A Unix socket address holds 108 bytes, the last one zero. Source: unix(7).
MAX_IPC_PATH_BYTES = 107
#: Of a directory that is made for sockets: its group may look for the daemon in it, nobody else.
DIRECTORY_MODE = 0o750
#: Connections the kernel keeps until libzmq accepts them.
_LISTEN_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class IpcAddress:
    """A Unix socket: `ipc://PATH`."""

    path: str


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port: `tcp://HOST:PORT`; port `*` lets the system choose."""

    host: str
    port: str


def parse_endpoint(text: str) -> IpcAddress | TcpAddress:
    """Read an endpoint that a daemon shall bind.

    Raises:
        EndpointError: with a sentence that says what is wrong and what would be right.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "ipc":
        return _parse_ipc(rest)
    if separator and scheme == "tcp":
        return _parse_tcp(rest)
    raise EndpointError(f"endpoint {text!r}: expected ipc://PATH or tcp://HOST:PORT")


def _parse_ipc(path: str) -> IpcAddress:
    if not path or path.startswith("@") or "\0" in path:
        raise EndpointError(
            f"endpoint 'ipc://{path}': expected the path of a socket file (abstract sockets have "
            f"no permissions and are not supported)"
        )
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_IPC_PATH_BYTES:
        raise EndpointError(
            f"endpoint 'ipc://{path}': the path has {num_bytes} bytes, the system allows "
            f"{MAX_IPC_PATH_BYTES}; choose a shorter directory"
        )
    return IpcAddress(path)


def _parse_tcp(rest: str) -> TcpAddress:
    host, _, port = rest.rpartition(":")
    is_number = port.isascii() and port.isdigit() and int(port) <= 65535
    if not host or not (is_number or port == "*"):
        raise EndpointError(f"endpoint 'tcp://{rest}': expected tcp://HOST:PORT")
    return TcpAddress(host, port)


def claim_endpoint(endpoint: str, option: str = "") -> SocketClaim | None:
    """The right to an endpoint, taken before there is anything to serve.

    None for TCP: there it is only known that the port is free now.

    Args:
        endpoint: where a daemon shall listen.
        option: that names it, for people.

    Raises:
        EndpointBusy, EndpointError: as `parse_endpoint`, `SocketClaim` and `check_port`.
    """
    address = parse_endpoint(endpoint)
    if isinstance(address, IpcAddress):
        return SocketClaim(address.path)
    check_port(endpoint, option)
    return None


class SocketClaim:
    """The exclusive right to serve at a path, held from `SocketClaim(path)` to `release()`.

    On construction the lock is taken and a stale socket file (one whose daemon is gone) is removed.
    The lock file stays: removing it would let two daemons lock two different files.

    Raises:
        EndpointBusy: another process holds the right.
        EndpointError: the directory cannot be made or is not writable, or something that is not a
            socket stands at the path. Nothing was removed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = _lock(path)
        try:
            _remove_stale(path)
        except BaseException as error:
            os.close(self._lock_fd)
            if isinstance(error, OSError):
                raise EndpointError(f"cannot serve at {path}: {error.strerror}") from error
            raise

    def listen(self, mode: int) -> int:
        """Make the socket file and listen on it.

        Args:
            mode: permissions of the socket file, such as 0o660; whoever may write may connect.

        Returns:
            The listening socket's file descriptor; it belongs to the caller.

        Raises:
            EndpointError: the system refuses; nothing listens.
        """
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise EndpointError(
                f"cannot make a socket for {self.path}: {error.strerror}"
            ) from error
        try:
            # The file gets the descriptor's mode less the umask, so it is never wider than `mode`;
            # the second call makes it exactly that.
            os.fchmod(listener.fileno(), mode)
            listener.bind(self.path)
            os.chmod(self.path, mode)
            listener.listen(_LISTEN_BACKLOG)
        except OSError as error:
            listener.close()
            raise EndpointError(f"cannot listen on {self.path}: {error.strerror}") from error
        listener.setblocking(False)
        return listener.detach()

    def hide(self) -> None:
        """Remove the socket file: nobody connects any more. May be called twice.

        A directory that has become read-only keeps it; the next daemon finds it stale.
        """
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def release(self) -> None:
        """Remove the socket file and give up the right. May be called twice."""
        if self._lock_fd < 0:
            return
        self.hide()
        os.close(self._lock_fd)
        self._lock_fd = -1


def _lock(path: str) -> int:
    """Open and lock the lock file; its content, the holder's process id, is for people."""
    _make_directory(path)
    lock_path = f"{path}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(lock_path, flags, 0o600)
    except OSError as error:
        raise EndpointError(f"cannot open the lock file {lock_path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise EndpointError(f"cannot lock {lock_path}: {error.strerror}") from error
        raise EndpointBusy(
            f"another daemon (process {holder or 'unknown'}) already serves at {path}"
        ) from error
    with contextlib.suppress(OSError):  # a full disk: only people miss the number
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd


def _make_directory(path: str) -> None:
    """Make the socket's directory, but not those above it, if it is missing."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(directory):
        return
    try:
        os.mkdir(directory, DIRECTORY_MODE)
        os.chmod(directory, DIRECTORY_MODE)  # whatever the umask
    except FileExistsError:
        raise EndpointError(f"cannot serve at {path}: {directory} is no directory") from None
    except OSError as error:
        raise EndpointError(
            f"cannot serve at {path}: there is no directory {directory}, and it cannot be made: "
            f"{error.strerror}"
        ) from error


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody serves; the caller holds the lock."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"{path} exists and is not a socket; it is left as it is")
    if _is_served(path):
        raise EndpointBusy(
            f"a process serves at {path} and does not hold {path}.lock: another program, or a "
            f"daemon whose lock file was removed; stop it first"
        )
    os.unlink(path)


def _is_served(path: str) -> bool:
    """Whether somebody listens on a socket file, as far as can be seen without waiting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it has no room for one more, or is not ours to ask
    return True
