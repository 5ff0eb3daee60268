"""A salt for each tenant: drawn by the daemon, kept in its state directory.

A salt keeps who knows a tenant's name and guesses its prompt from knowing the digests. It is never
shown and no message names it. One file a tenant, `salts/NAME`, 64 hexadecimal digits, mode 0600;
without a state directory that can be used, salts live as long as the process. Losing one costs
nothing but the names of what is cached, and the cache does not outlive the process either.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime_cache.ids import TenantName

_SALT_BYTES = 32
_FOLDER = "salts"


@dataclass(frozen=True, slots=True)
class Salts:
    """The salts in force.

    Attributes:
        by_tenant: each tenant's but the default one's, which has none.
        faults: sentences on what could not be read or kept; those salts are new at each start.
    """

    by_tenant: Mapping[TenantName, bytes]
    faults: tuple[str, ...] = ()


class SaltFault(Exception):
    """A salt's file cannot be used; the message says why, and what to do."""


def state_directory(configured: str, env: Mapping[str, str]) -> str:
    """The directory to keep salts in, or empty if there is none.

    Args:
        configured: daemon.state_dir.
        env: where systemd names its StateDirectory=, perhaps several, with colons between them.
    """
    return configured or env.get("STATE_DIRECTORY", "").partition(":")[0]


def load_salts(directory: str, tenants: Iterable[TenantName]) -> Salts:
    """Read each tenant's salt, and draw and keep what is missing. Never fails.

    Args:
        directory: of the daemon's own; made if its parent is there. Empty: none.
        tenants: without the default one.
    """
    salts: dict[TenantName, bytes] = {}
    faults: list[str] = []
    for tenant in tenants:
        salts[tenant] = secrets.token_bytes(_SALT_BYTES)
        if directory:
            try:
                salts[tenant] = _kept(Path(salt_path(directory, tenant)), salts[tenant])
            except SaltFault as fault:
                faults.append(f"tenant {tenant!r} has a salt for this run only: {fault}")
    return Salts(salts, tuple(faults))


def salt_path(directory: str, tenant: str) -> str:
    """The file of a tenant's salt."""
    return os.path.join(directory, _FOLDER, tenant)


def read_salt(path: Path) -> bytes | None:
    """The salt in a file; None if there is none yet.

    Raises:
        SaltFault: the file is damaged, not readable, or not the daemon's alone.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SaltFault(f"cannot read {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        text = os.read(fd, 4 * _SALT_BYTES) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise SaltFault(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise SaltFault(
            f"{path} is not the daemon's alone (mode {stat.S_IMODE(status.st_mode):04o}, uid "
            f"{status.st_uid}); remove it, and a new one is drawn at the next start"
        )
    return _parsed(path, text)


def _parsed(path: Path, text: bytes) -> bytes:
    with suppress(ValueError):
        salt = bytes.fromhex(text.decode("ascii"))
        if len(salt) == _SALT_BYTES:
            return salt
    raise SaltFault(f"{path} is damaged; remove it, and a new one is drawn at the next start")


def _kept(path: Path, new: bytes) -> bytes:
    """The salt of the file, which is made with `new` in it if it is missing."""
    found = read_salt(path)
    if found is None:
        try:
            _write(path, new)
        except OSError as error:
            raise SaltFault(f"cannot write {path}: {error.strerror}") from error
        found = read_salt(path)
    return new if found is None else found


def _write(path: Path, salt: bytes) -> None:
    """Make the file, whole or not at all; one that another daemon made meanwhile stays."""
    path.parent.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(salt.hex().encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
