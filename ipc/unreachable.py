"""What a command sees of an endpoint that gave no answer: why nobody answers there, for people.

It looks, and connects once without a word; it is no client, and is for a moment when waiting has
failed already.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

#: How long a connection may take to be made [seconds]. It is the system that makes it, not the
#: daemon.
_CONNECT_S = 1.0

_IS_IT_RUNNING = "is rtcached running, and with this endpoint?"
_SILENT = (
    "something listens there and says nothing: rtcached is busy for longer than that (raise the "
    "timeout)"
)


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen.

    Attributes:
        why: a clause that goes on from "no answer from … :"; None if nothing can be seen there.
        may_answer: somebody listens, as far as known, so that an answer may come yet.
    """

    why: str | None
    may_answer: bool = False


_NOTHING = Sight(None, may_answer=True)


def look(endpoint: str) -> Sight:
    """What is at an endpoint.

    Takes `_CONNECT_S` at the longest, and the time to resolve a name.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest and not rest.startswith("@"):
        return _look_at_path(os.path.abspath(rest))
    if scheme == "tcp":
        return _look_at_port(rest)
    return _NOTHING


def _look_at_path(path: str) -> Sight:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISSOCK(mode):
            return Sight(f"{path} is no socket; is this the endpoint of rtcached?")
        _connect(socket.AF_UNIX, path)
    except (FileNotFoundError, NotADirectoryError):
        directory = os.path.dirname(path)
        missing = path if os.path.isdir(directory) else f"directory {directory}"
        return Sight(f"there is no {missing}; {_IS_IT_RUNNING}")
    except PermissionError:
        return Sight(_bar(path))
    except ConnectionRefusedError:
        return Sight(
            f"nobody listens at {path}: a daemon has ended without removing it; "
            f"start rtcached, which replaces it"
        )
    except BlockingIOError:
        pass  # so many wait to be let in that there is no room for one more
    except OSError as error:
        return Sight(f"{path} cannot be opened: {error.strerror}")
    return Sight(f"{_SILENT}, or it is another program", may_answer=True)


def _bar(path: str) -> str:
    """What keeps this user from opening a socket, and who may."""
    above = [str(directory) for directory in reversed(Path(path).parents)]
    closed = next((directory for directory in above if not _may_enter(directory)), None)
    if closed is not None:
        return f"you may not look into {closed}: {_rights(closed, stat.S_IXGRP)}"
    return f"you may not open {path}, which takes write permission: {_rights(path, stat.S_IWGRP)}"


def _may_enter(directory: str) -> bool:
    return os.access(directory, os.X_OK, effective_ids=True)


def _rights(path: str, group_bit: int) -> str:
    """Whose a file is, and how to be one of those who may."""
    try:
        found = os.stat(path)
    except OSError:
        return "use sudo"
    mode = stat.S_IMODE(found.st_mode)
    owner, group = _user_name(found.st_uid), _group_name(found.st_gid)
    whose = f"it belongs to user {owner} and group {group}, mode {mode:04o}"
    if mode & group_bit:
        return f"{whose}; be in that group (it counts from your next login on), or use sudo"
    who = "root" if found.st_uid == 0 else f"{owner} and root"
    return f"{whose}; only {who} may, so use sudo"


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _group_name(group_id: int) -> str:
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)


def _look_at_port(rest: str) -> Sight:
    # libzmq also takes "the address to come from;host:port".
    host, _, port = rest.rpartition(";")[2].rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        return _NOTHING
    is_any = host.startswith("[")  # libzmq looks for IPv4 alone otherwise
    host = host.strip("[]")
    try:
        family, *_, address = socket.getaddrinfo(
            host, int(port), socket.AF_UNSPEC if is_any else socket.AF_INET, socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Sight(f"the host name {host} cannot be resolved ({why})")
    try:
        _connect(family, address)
    except ConnectionRefusedError:
        return Sight(f"nobody listens at port {port} of {host}; {_IS_IT_RUNNING}")
    except TimeoutError:
        return Sight(
            f"{host} lets no connection to port {port} come about: the host is down, or a firewall "
            f"stands before it"
        )
    except OSError as error:
        return Sight(f"port {port} of {host} cannot be reached: {error.strerror}")
    return Sight(
        f"{_SILENT}, it is another program, or only one side uses CURVE keys", may_answer=True
    )


def _connect(family: int, address: object) -> None:
    """Make a connection, and drop it.

    Raises:
        OSError: why there is none.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        probe.connect(address)  # type: ignore[arg-type]
