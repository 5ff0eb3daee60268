"""The list of keys that may connect by CURVE: its file, its checks, and the list in force.

A TOML file with one table a key:

    [[keys]]
    name = "search-frontend"
    public_key = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
    role = "user"
    tenant = "search"
    quota = { max_requests = 16, tokens_per_minute = 60000 }

It holds no secret, but who can write it can let anybody in; so it is refused if others may.
"""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from ipc.auth import Principal
from ipc.curve_keys import is_key
from ipc.handler import Role
from runtime_cache.errors import ConfigError
from runtime_cache.quota import Quota

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Larger files are no lists of keys.
_MAX_FILE_BYTES = 4 * 1024**2
_TO_MAKE_IT = (
    "; make it, with an entry a key, as `rtcache-admin keygen NAME` prints them and "
    "docs/security.md shows"
)


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    public_key: str
    role: Role = "user"
    tenant: str = ""
    quota: Quota = Quota()


class KeyList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: tuple[Key, ...] = ()


@dataclass
class Keyring:
    """The keys in force; the `ipc.auth.Authority` of the servers."""

    keys: Sequence[Key] = ()
    _by_key: Mapping[str, Principal] = field(init=False)
    _quotas: Mapping[str, Quota] = field(init=False)

    def __post_init__(self) -> None:
        self.replace(self.keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """Put another list in force, as a whole."""
        self.keys = keys
        self._by_key = {
            key.public_key: Principal(key.public_key, key.name, key.role, key.tenant)
            for key in keys
        }
        self._quotas = {key.name: key.quota for key in keys}

    def find(self, key: str) -> Principal | None:
        """Whom a public key stands for; None: nobody."""
        return self._by_key.get(key)

    def quota(self, name: str) -> Quota:
        """What the key of this name may use."""
        return self._quotas.get(name, Quota())


def read_keys(path: str, tenants: Collection[str]) -> tuple[Key, ...]:
    """Read and check a file.

    Args:
        tenants: names that a key may have as its tenant, besides the default one.

    Raises:
        ConfigError: one message that lists every fault.
    """
    try:
        found = msgspec.convert(tomllib.loads(_read(path)), KeyList)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        hint = f" (a role is {' or '.join(get_args(Role))})" if "enum" in str(error) else ""
        raise ConfigError(f"{path}: {error}{hint}") from error
    if faults := _faults(found.keys, tenants):
        raise ConfigError(f"{path} is wrong:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return found.keys


def _read(path: str) -> str:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{path} is no list of keys")
            _check_owner(path, status)
            return file.read().decode("utf-8")
    except OSError as error:
        next_step = _TO_MAKE_IT if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(
            f"cannot read the list of keys {path}: {error.strerror}{next_step}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8") from error


def _open_at_once(path: str, flags: int) -> int:
    """Waits for nobody, if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_owner(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"the list of keys {path} belongs to another user (uid {status.st_uid}), who could let "
            f"anybody in: give it to root or to the daemon's user"
        )
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"everybody may write the list of keys {path}: chmod o-w {path}")


def _faults(keys: Sequence[Key], tenants: Collection[str]) -> list[str]:
    """What the types do not show."""
    faults = [
        f"the name {name!r} is given to {number} keys"
        for name, number in Counter(key.name for key in keys).items()
        if number > 1
    ]
    faults += [
        f"{number} names have the same public key"
        for number in Counter(key.public_key for key in keys).values()
        if number > 1
    ]
    for key in keys:
        if not is_key(key.public_key):
            faults.append(f"{key.name}: public_key is not 40 characters of Z85")
        if key.tenant and key.tenant not in tenants:
            faults.append(
                f"{key.name}: there is no tenant {key.tenant!r} in the configuration ([[tenants]])"
            )
    return faults
