"""The configuration and the keys in force, and how they are read again in service.

All or nothing: if anything in the configuration or in the list of keys is wrong, everything stays
as it is. What cannot be changed in service is named, and counts from the next start on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from ipc import messages as wire
from ipc.auth import Curve
from ipc.curve_keys import fault_of_library, read_key_pair
from ipc.errors import KeyFileError
from runtime_cache import options
from runtime_cache.config import Config
from runtime_cache.errors import ConfigError, InvalidConfig
from runtime_cache.keys import Key, Keyring, read_keys
from runtime_cache.options import Loaded
from runtime_cache.quota import Quotas

log = structlog.get_logger(__name__)

#: The options that can be changed in service.
RELOADABLE = frozenset(
    {
        "ipc.drain_timeout_s",
        "ipc.max_unsent_tokens",
        "engine.default_max_tokens",
        "engine.default_deadline_ms",
        "log.level",
        "log.format",
    }
)
#: Stands for the contents of the list of keys among the paths that have changed.
_KEYS_PATH = "ipc.keys_file"


@dataclass(frozen=True, slots=True)
class Reloading:
    """What a reload has done.

    Attributes:
        changed: paths of the options that have a new value now.
        needs_restart: paths of those whose new value counts from the next start on.
        num_keys: in force; None without CURVE.
    """

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    num_keys: int | None


class Settings:
    """What is in force.

    Attributes:
        loaded: the configuration, and where each value came from.
        keyring: the keys that may connect by CURVE.
        quotas: what they have used.
    """

    def __init__(self, load: Callable[[], Loaded]) -> None:
        """Args:
        load: reads and checks the configuration, now and at each reload.

        Raises:
            ConfigError: it is wrong.
        """
        self._load = load
        self.loaded = load()
        self.keyring = Keyring()
        self.quotas = Quotas(self.keyring.quota)
        self._followers: list[Callable[[], None]] = []

    @property
    def config(self) -> Config:
        return self.loaded.config

    def open_keys(self) -> Curve | None:
        """Read the daemon's key and the list of keys; None if there is no CURVE.

        Raises:
            ConfigError: one of the files is wrong.
        """
        if not self.config.ipc.server_key_file:
            return None
        if fault := fault_of_library():
            raise ConfigError(f"ipc.server_key_file: {fault}")
        try:
            pair = read_key_pair(self.config.ipc.server_key_file)
        except KeyFileError as error:
            raise ConfigError(f"ipc.server_key_file: {error}") from error
        self.keyring.replace(self._read_keys())
        return Curve(pair, self.keyring)

    def follow(self, follower: Callable[[], None]) -> None:
        """Call this after each reload: it looks here for what has changed, and does not fail."""
        self._followers.append(follower)

    def reload(self) -> Reloading:
        """Read everything again, and put it in force.

        Raises:
            InvalidConfig: something is wrong; nothing has changed.
        """
        try:
            new, keys = self._load(), self._read_keys()
        except ConfigError as error:
            text = f"the former configuration and keys stay in force: {error.message}"
            log.error("reload_failed", error=text)
            raise InvalidConfig(text) from error
        differing = _differing(self.loaded, new)
        changed = [path for path in differing if path in RELOADABLE]
        self.loaded = _merged(self.loaded, new, changed)
        if keys != self.keyring.keys:
            self.keyring.replace(keys)
            changed.append(_KEYS_PATH)
        for follower in self._followers:
            follower()
        needs_restart = tuple(path for path in differing if path not in RELOADABLE)
        num_keys = len(keys) if self.config.ipc.keys_file else None
        log.info("reloaded", changed=changed, needs_restart=needs_restart, num_keys=num_keys)
        return Reloading(tuple(changed), needs_restart, num_keys)

    def reloaded(self, message_id: wire.MessageId) -> wire.Reloaded:
        """Reload, as an administrator asks for it.

        Raises:
            InvalidConfig: something is wrong; nothing has changed.
        """
        done = self.reload()
        return wire.Reloaded(
            id=message_id,
            changed=done.changed,
            needs_restart=done.needs_restart,
            num_keys=done.num_keys,
        )

    def configured(self, message_id: wire.MessageId) -> wire.Configured:
        """Every option in force."""
        found = tuple(
            wire.ConfigOption(
                path=path,
                value=options.toml(value),
                origin=origin,
                is_reloadable=path in RELOADABLE,
            )
            for path, value, origin in options.describe(self.loaded)
        )
        return wire.Configured(id=message_id, options=found)

    def _read_keys(self) -> tuple[Key, ...]:
        """Of the file, and for the tenants, that the daemon was started with."""
        if not self.config.ipc.keys_file:
            return ()
        return read_keys(self.config.ipc.keys_file, {t.name for t in self.config.tenants})


def _differing(old: Loaded, new: Loaded) -> list[str]:
    """Paths of the options that have another value, or are in one of the two only."""
    before, after = (
        {path: value for path, value, _ in options.describe(loaded)} for loaded in (old, new)
    )
    return [path for path in before | after if before.get(path) != after.get(path)]


def _merged(old: Loaded, new: Loaded, changed: list[str]) -> Loaded:
    """The old configuration with the new values of these options."""
    config, origins = old.config, dict(old.origins)
    for path in changed:
        section, key = path.split(".")
        value = getattr(getattr(new.config, section), key)
        part = msgspec.structs.replace(getattr(config, section), **{key: value})
        config = msgspec.structs.replace(config, **{section: part})
        origins[path] = new.origins[path]
    return Loaded(config, origins)
