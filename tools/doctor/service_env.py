"""`rtcache-doctor env`: what a service needs of CANN's environment, as systemd reads it.

A user sources `set_env.sh`; a service does not. So it is sourced here, in a shell without anything
of the caller's, and what it sets of LD_LIBRARY_PATH, PYTHONPATH and ASCEND_* is written down, with
the driver's libraries added. The same host gives the same text.

Source: set_env.sh of CANN 8.1.RC1; quoting of EnvironmentFile= in systemd.exec(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from om_models.staging import sync
from runtime_cache.errors import ConfigError
from tools.doctor.host import Host
from tools.doctor.installed import (
    Installed,
    find_driver,
    find_set_env,
    library_directories,
    toolkit_at,
    toolkit_roots,
)

#: Lists of directories, the first one wins.
_LISTS = ("LD_LIBRARY_PATH", "PYTHONPATH")
_PREFIX = "ASCEND_"
_SOURCE_S = 30.0
#: As a user's shell takes it: what the script returns is not asked, its variables stand.
_SOURCING = '. "$1" >/dev/null || :; exec env -0'
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What units with ProtectHome=yes cannot see.
_HIDDEN = ("/root/", "/home/", "/run/user/")
_PLAIN = re.compile(r"[\w./:+,@%=-]*", re.ASCII)
_ESCAPED = re.compile(r'(["\\`$])')


@dataclass(frozen=True, slots=True)
class ServiceEnvironment:
    """What a service is to get.

    Attributes:
        toolkit: the CANN it comes from.
        driver: whose libraries were added; None if there is no driver.
        variables: name → value, sorted by name.
        notes: what will not work with it, in sentences.
    """

    toolkit: Installed
    driver: Installed | None
    variables: Mapping[str, str]
    notes: tuple[str, ...]

    def text(self) -> str:
        """The file, as EnvironmentFile= reads it; a shell reads it in the same way."""
        origin = f"CANN {self.toolkit.version or '(release not known)'} in {self.toolkit.root}"
        lines = [f"# Made by `rtcache-doctor env` from {origin}."]
        lines += [f"{name}={quoted(value)}" for name, value in self.variables.items()]
        return "\n".join(lines) + "\n"


def service_environment(host: Host, directory: str | None = None) -> ServiceEnvironment:
    """What `set_env.sh` of the host's CANN sets.

    Args:
        directory: the CANN to take; None for the one that is found.

    Raises:
        ConfigError: there is none, or its script fails, or sets what cannot be written down.
    """
    # A relative path would be below the service's working directory, which is another one.
    toolkit, script = _find(host, directory and os.path.abspath(directory))
    driver = find_driver(host)
    left = _sourced(host, script)
    variables = {n: v for n, v in left.items() if n in _LISTS or n.startswith(_PREFIX)}
    wanted = [d for d in library_directories(toolkit, driver) if host.is_dir(d)]
    for name, added in (("LD_LIBRARY_PATH", wanted), ("PYTHONPATH", [])):
        if joined := _joined(variables.get(name, ""), added):
            variables[name] = joined
        else:
            variables.pop(name, None)
    for name, value in variables.items():
        if not value.isprintable():
            raise ConfigError(f"{script} sets {name} to {value!r}, which no line of a file can say")
    variables = dict(sorted(variables.items()))
    return ServiceEnvironment(toolkit, driver, variables, tuple(_notes(host, toolkit, variables)))


def quoted(value: str) -> str:
    """A value as the file has it."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + _ESCAPED.sub(r"\\\1", value) + '"'


def write_whole(path: Path, text: str) -> None:
    """Put a file there that everybody may read; who reads meanwhile sees the old one or the new.

    Raises:
        OSError: it cannot be written; what was there is unchanged.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, "utf-8")
        new.chmod(0o644)
        sync(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _find(host: Host, directory: str | None) -> tuple[Installed, str]:
    """The installation and its script."""
    if directory is not None and not host.is_dir(directory):
        raise ConfigError(f"{directory} is no directory: name the one that holds CANN")
    roots = toolkit_roots(host) if directory is None else [directory]
    there = [root for root in roots if host.is_dir(root)]
    for root in there:
        if script := find_set_env(host, root):
            return toolkit_at(host, root), script
    if there:
        raise ConfigError(
            f"there is no set_env.sh in or beside {', '.join(there)}: CANN is not installed whole"
        )
    raise ConfigError(
        f"no CANN was found in {', '.join(dict.fromkeys(roots))}: install its toolkit or nnrt "
        f"package, or name its directory by --cann; a service on the software device needs none"
    )


def _sourced(host: Host, script: str) -> dict[str, str]:
    """The whole environment behind the script."""
    shell = "/bin/bash" if host.exists("/bin/bash") else "/bin/sh"
    command = [shell, "-c", _SOURCING, shell, str(host.at(script))]
    try:
        ran = host.runner(command, _SOURCE_S, {"PATH": _PATH, "HOME": "/var/lib/rtcached"})
    except OSError as error:
        raise ConfigError(f"{shell} cannot be run: {error.strerror}") from error
    if ran.code != 0:
        last = ([*ran.err.split("\n"), ""][0] or "it says nothing").strip()
        raise ConfigError(f"{script} {ran.how_it_ended(_SOURCE_S)}: {last}")
    pairs = (entry.partition("=") for entry in ran.out.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def _joined(paths: str, added: Sequence[str]) -> str:
    """Each directory once. What is empty or relative would be the working directory's: left out."""
    parts = (*paths.split(":"), *added)
    return ":".join(dict.fromkeys(part for part in parts if part.startswith("/")))


def _notes(host: Host, toolkit: Installed, variables: Mapping[str, str]) -> Iterator[str]:
    libraries = variables.get("LD_LIBRARY_PATH", "").split(":")
    modules = variables.get("PYTHONPATH", "").split(":")
    if not any(name.startswith("acl") for d in modules for name in host.names_in(d)):
        yield "No directory of PYTHONPATH holds pyACL (acl.so): that part of CANN is missing."
    if host.find_in(libraries, "libascendcl.so") is None:
        yield "No directory of LD_LIBRARY_PATH holds libascendcl.so: CANN is not installed whole."
    if host.find_in(libraries, "libascend_hal.so") is None:
        yield (
            "No directory of LD_LIBRARY_PATH holds libascend_hal.so: install the driver, and make "
            "this file again."
        )
    places = (os.path.realpath(host.at(toolkit.root)), toolkit.root)
    if any(place.startswith(_HIDDEN) for place in places):
        yield (
            f"{toolkit.root} lies in a home directory, which the service's ProtectHome=yes hides: "
            f"install CANN below /usr/local/Ascend, or set ProtectHome=read-only in a drop-in."
        )
