"""Python and its packages, CANN, the driver, and whether they suit each other.

Source: the CANN installation guide, instg_0045 of each release, for the Python versions; the series
that CANN and the driver name as compatible are their own (`compatible_version`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

from om_models.cann import HOME_VARIABLES
from tools.doctor.findings import Finding, Status, ok, problem, skipped, warning
from tools.doctor.host import Host
from tools.doctor.installed import (
    Installed,
    find_set_env,
    is_driver_for_all,
    named_root,
    numbers,
    toolkit_roots,
)

#: First release of CANN → newest Python it takes.
_NEWEST_PYTHON = (((8, 0), (3, 11)), ((8, 5), (3, 13)), ((9, 1), (3, 14)))
#: First release of CANN that takes numpy 2. Source: instg_0045 (8.5.0 wants < 2.0, 9.0.0 does not).
_NUMPY_2_SINCE = (9, 0)

#: The installed version of a package, or None.
Versions = Callable[[str], "str | None"]


def installed_version(package: str) -> str | None:
    """The version of an installed Python package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(host: Host, toolkit: Installed | None) -> Finding:
    """The interpreter that runs this, and so the daemon."""
    name = ".".join(map(str, host.python))
    newest = _newest_python(toolkit)
    if host.python < (3, 10):
        return problem(
            "python",
            f"Python {name} runs this; the daemon needs 3.10 or newer.",
            "Make the virtual environment with a newer Python.",
        )
    if toolkit is not None and newest is not None and host.python[:2] > newest:
        return warning(
            "python",
            f"Python {name} is newer than CANN {toolkit.version} was made for, up to"
            f" {newest[0]}.{newest[1]}: its `acl` may not load.",
            f"Make the virtual environment with Python {newest[0]}.{newest[1]}.",
        )
    return ok("python", f"Python {name}.")


def check_numpy(toolkit: Installed | None, versions: Versions = installed_version) -> Finding:
    """The daemon calls none of pyACL's numpy helpers, but the CANN's own tools may be older."""
    version = versions("numpy")
    if version is None:
        return problem("numpy", "numpy is not installed.", "Run: pip install runtime-cache")
    release = numbers(toolkit.version) if toolkit is not None else ()
    if toolkit is not None and release and release < _NUMPY_2_SINCE and numbers(version) >= (2,):
        return ok(
            "numpy",
            f"numpy {version}. CANN {toolkit.version} asks for less than 2: the daemon does"
            " not mind, as it calls none of pyACL's numpy helpers; other programs may.",
        )
    return ok("numpy", f"numpy {version}.")


def check_cann(host: Host, toolkit: Installed | None) -> Finding:
    """CANN is there, and its environment is set."""
    named = named_root(host)
    if named and not host.is_dir(named):
        return problem(
            "cann",
            f"The environment says that CANN is in {named}, but there is no such directory.",
            "Run `source set_env.sh` of the CANN that is installed.",
        )
    if toolkit is None:
        return problem(
            "cann",
            f"CANN is in none of its usual places: {', '.join(toolkit_roots(host))}.",
            "Install the CANN toolkit, or run `source set_env.sh` where it is.",
        )
    name = f"CANN {toolkit.version or 'of unknown version'} in {toolkit.root}"
    if named:
        return ok("cann", f"{name}.")
    script = find_set_env(host, toolkit.root)
    return problem(
        "cann",
        f"{name} is installed, but its environment is not set: {' and '.join(HOME_VARIABLES)}"
        " are missing.",
        f"Run `source {script or 'set_env.sh'}` before the daemon starts. A systemd unit does"
        " not read ~/.bashrc: `rtcache-doctor env --output /etc/rtcached/cann.env` writes an"
        " EnvironmentFile for it.",
    )


def check_driver(driver: Installed | None) -> Finding:
    """The driver is installed, or mounted."""
    if driver is None:
        return problem(
            "driver",
            "The NPU driver is not installed here, or not mounted into this container.",
            "Install the driver on the host; a container needs its directory"
            " /usr/local/Ascend/driver and /etc/ascend_install.info mounted.",
        )
    if not driver.version:
        return warning(
            "driver",
            f"The driver in {driver.root} does not say its version: version.info is missing"
            " or has no Version.",
            f"A container needs {driver.root}/version.info mounted.",
        )
    return ok("driver", f"Driver {driver.version} in {driver.root}.")


def check_versions(toolkit: Installed | None, driver: Installed | None) -> Finding:
    """CANN against the driver, as far as they say themselves."""
    if toolkit is None or driver is None:
        return skipped("versions", "CANN and driver are not both installed.")
    pair = f"CANN {toolkit.version or toolkit.series}, driver {driver.version or driver.series}"
    if not toolkit.series or not driver.series:
        return skipped("versions", f"{pair}: not both say what they work with.")
    if driver.series == toolkit.series:
        return ok("versions", f"{pair}: both are of series {driver.series}.")
    if driver.series in toolkit.compatible or toolkit.series in driver.compatible:
        return ok("versions", f"{pair}: they name each other as compatible.")
    return warning(
        "versions",
        f"{pair}: neither names the other's series ({toolkit.series}, {driver.series}) as"
        " compatible.",
        "Compare them with the version table of the CANN release, and update the older one.",
    )


def check_group(host: Host, driver: Installed | None, *, may_use_nodes: bool) -> Finding:
    """The driver's group, which a service user must be in.

    Args:
        may_use_nodes: the user may use the device's nodes all the same, so this is only a warning.
    """
    if host.uid == 0:
        return ok("groups", "This is root, who needs no group; a service should be another user.")
    if "HwHiAiUser" in host.groups:
        return ok("groups", "The user is in the group HwHiAiUser.")
    if is_driver_for_all(host):
        return ok("groups", "The driver was installed for all users.")
    members = _members(host)
    if driver is None or members is None:
        return skipped("groups", "There is no group HwHiAiUser: the driver makes it.")
    user = host.env.get("USER") or str(host.uid)
    status: Status = "warning" if may_use_nodes else "problem"
    if user in members:
        text = f"{user} was put into the group HwHiAiUser, but this login is older than that."
        return Finding("groups", status, text, "Log in again, or restart the service.")
    return Finding(
        "groups",
        status,
        f"The user {user} is not in the group HwHiAiUser, whose members may use the driver.",
        f"Run `usermod -aG HwHiAiUser {user}` and log in again; in a systemd unit write"
        " SupplementaryGroups=HwHiAiUser.",
    )


def _newest_python(toolkit: Installed | None) -> tuple[int, int] | None:
    release = numbers(toolkit.version) if toolkit is not None else ()
    suited = [newest for first, newest in _NEWEST_PYTHON if release and release >= first]
    return suited[-1] if suited else None


def _members(host: Host) -> set[str] | None:
    """Users that the system's list names as members, or None if there is no such group."""
    match = re.search(r"^HwHiAiUser:[^:]*:[^:]*:(.*)$", host.read("/etc/group") or "", re.MULTILINE)
    return None if match is None else {name for name in match[1].split(",") if name}
