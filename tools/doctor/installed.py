"""Which CANN and which driver a host has, from the files that their installers leave.

Source: `ascend_toolkit_install.info`, `version.cfg` (of 8.x) and the driver's `version.info` as
public reports print them; default places and set_env.sh from the CANN installation guide
(instg_0044, instg_0045).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from om_models.cann import HOME_VARIABLES, WELL_KNOWN
from tools.doctor.host import Host

#: The package that runs models and compiles none.
_RUNTIME_ONLY = ("/usr/local/Ascend/nnrt/latest", "~/Ascend/nnrt/latest")
_DRIVER_PARENT = "/usr/local/Ascend"
_LIBRARY_DIRECTORIES = ("lib64", "lib64/common", "lib64/driver")
_RUNNING = re.compile(r"^(?:runtime|toolkit)_running_version=\[([^\]:]*):?([^\]]*)\]", re.MULTILINE)
#: Of one of CANN's parts: up to 8.x the part's own number, later that of the release.
_VERSION_FILES = ("version.info", "runtime/version.info", "compiler/version.info")
_SERIES = re.compile(r"V\d+R\d+C\d+")


@dataclass(frozen=True, slots=True)
class Installed:
    """CANN or the driver.

    Attributes:
        root: its directory.
        version: as people name it, such as `8.0.0` or `24.1.rc3`; empty if no file says.
        component: the number its parts have, such as `7.6.0.1.220`, which ATC writes into an .om.
        series: such as `V100R001C21`; empty if no file says.
        compatible: the series it says it works with.
    """

    root: str
    version: str = ""
    component: str = ""
    series: str = ""
    compatible: frozenset[str] = frozenset()


def find_toolkit(host: Host) -> Installed | None:
    """The CANN that the environment names, else the first in its usual places."""
    root = next((root for root in toolkit_roots(host) if host.is_dir(root)), None)
    return None if root is None else toolkit_at(host, root)


def toolkit_at(host: Host, root: str) -> Installed:
    """The CANN in a directory."""
    info = fields(
        host.read(os.path.join(root, f"{host.machine}-linux/ascend_toolkit_install.info"))
    )
    running = _RUNNING.search(host.read(os.path.join(root, "version.cfg")) or "")
    component, release = running.groups() if running else ("", "")
    files = (fields(host.read(os.path.join(root, place))) for place in _VERSION_FILES)
    plain = next((found["Version"] for found in files if found.get("Version")), "")
    return Installed(
        root,
        version=info.get("version") or release or component or plain,
        component=component or plain,
        series=_series(info.get("innerversion", "")),
        compatible=frozenset(_SERIES.findall(info.get("compatible_version", ""))),
    )


def toolkit_roots(host: Host) -> list[str]:
    """Where CANN may be, the environment's own first."""
    home = host.env.get("HOME")
    usual = [
        root.replace("~", home or "~", 1)
        for root in (*WELL_KNOWN, *_RUNTIME_ONLY)
        if home or not root.startswith("~")
    ]
    named = named_root(host)
    return usual if named is None else [named, *usual]


def named_root(host: Host) -> str | None:
    """The directory that CANN's set_env.sh left in the environment."""
    return next((host.env[name] for name in HOME_VARIABLES if host.env.get(name)), None)


def find_set_env(host: Host, root: str) -> str | None:
    """The script that sets CANN's environment, in or beside its directory."""
    directories = (root, os.path.dirname(root.rstrip("/")))
    found = host.find_in(directories, "set_env.sh")
    return None if found is None else os.path.join(found, "set_env.sh")


def find_driver(host: Host) -> Installed | None:
    """The NPU driver, or as much of it as a container sees."""
    values = fields(host.read("/etc/ascend_install.info"))
    parent = values.get("Driver_Install_Path_Param", _DRIVER_PARENT)
    root = os.path.join(parent, "driver")
    if not host.is_dir(root):
        return None
    values = fields(host.read(os.path.join(root, "version.info")))
    return Installed(
        root,
        version=values.get("package_version") or values.get("Version", ""),
        series=_series(values.get("Innerversion", "")),
        compatible=frozenset(_SERIES.findall(values.get("compatible_version", ""))),
    )


def is_driver_for_all(host: Host) -> bool:
    """Whether the driver was installed with --install-for-all."""
    values = fields(host.read("/etc/ascend_install.info"))
    return values.get("Driver_Install_For_All", "").lower() in ("y", "yes")


def library_directories(toolkit: Installed | None, driver: Installed | None) -> list[str]:
    """Where the libraries lie that `import acl` needs."""
    found = [] if toolkit is None else [os.path.join(toolkit.root, "lib64")]
    if driver is not None:
        found += [os.path.join(driver.root, name) for name in _LIBRARY_DIRECTORIES]
    return found


def fields(text: str | None) -> dict[str, str]:
    """The `key=value` lines of a file."""
    lines = (line.partition("=") for line in (text or "").splitlines())
    return {key.strip(): value.strip() for key, equals, value in lines if equals}


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers, up to the first part that is none: `8.0.RC2` is (8, 0)."""
    found = []
    for part in text.split("."):
        if not part.isascii() or not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def _series(inner: str) -> str:
    match = _SERIES.match(inner)
    return match[0] if match else ""
