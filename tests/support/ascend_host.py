"""Fabricated hosts for the doctor: a tree of files, an environment, and commands that answer.

Nothing here comes from a host with a card; the texts have the form that public reports print.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tools.doctor.host import Host, Ran

CANN = "/usr/local/Ascend/ascend-toolkit/latest"
DRIVER = "/usr/local/Ascend/driver"

TOOLKIT_INFO = """\
package_name=Ascend-cann-toolkit
version=8.0.0
innerversion=V100R001C20SPC001B251
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20]
arch=aarch64
os=linux
"""
VERSION_CFG = """\
# version: 1.0
runtime_running_version=[7.6.0.1.220:8.0.0]
toolkit_running_version=[7.6.0.1.220:8.0.0]
"""
DRIVER_INFO = """\
Version=24.1.rc3
ascendhal_version=7.35.23
Innerversion=V100R001C19SPC001B124
compatible_version=[V100R001C13],[V100R001C15],[V100R001C17],[V100R001C18],[V100R001C19]
package_version=24.1.rc3
"""
INSTALL_INFO = """\
UserName=HwHiAiUser
UserGroup=HwHiAiUser
Driver_Install_Path_Param=/usr/local/Ascend
Driver_Install_For_All=no
"""
SMI_910B4 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.1                   Version: 24.1.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4               | OK            | 88.2        30                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          2838 / 32768         |
+===========================+===============+====================================================+
| 1     910B4               | OK            | 87.0        30                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          29356/ 32768         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 4711          | python                   | 26518                   |
+===========================+===============+====================================================+
"""
SMI_310B4 = """\
+--------------------------------------------------------------------------------------------------+
| npu-smi 23.0.0                                   Version: 23.0.0                                 |
+-------------------------------+-----------------+------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)     Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                  |
+===============================+=================+================================================+
| 0       310B4                 | Alarm           | 0.0          65          15    / 15            |
| 0       0                     | NA              | 0            3628 / 15609                      |
+===============================+=================+================================================+
"""
SMI_A3 = """\
| npu-smi 25.2.1                   Version: 25.2.1                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 166.5       38                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3131 / 65536         |
| 0     Ascend910           | OK            | -           37                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2886 / 65536         |
"""


class Answers:
    """A runner that answers instead of running.

    Attributes:
        commands: what was asked, in order.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.smi: Ran | OSError = Ran(0, SMI_910B4, "")
        self.importing: Ran = said(
            pip={}, file=f"{CANN}/python/site-packages/acl.so", is_pyacl=True
        )
        self.probe: Ran = said(soc="Ascend910B4", free_bytes=30 << 30, total_bytes=32 << 30)

    def __call__(self, command: Sequence[str], limit_s: float, env: Mapping[str, str]) -> Ran:
        self.commands.append(list(command))
        if command[-1] == "info":
            if isinstance(self.smi, OSError):
                raise self.smi
            return self.smi
        return self.importing if len(command) == 3 else self.probe


def said(**facts: object) -> Ran:
    """The answer of one of the doctor's own programs."""
    import json

    return Ran(0, f"banner of a library\n\nrtcache-doctor: {json.dumps(facts)}\n", "")


class HostMaker:
    """Builds one host: a 910B4 with CANN 8.0.0 and a driver of before it, all in order.

    Tests take something away, or change it, and then ask for `host`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers = Answers()
        self.closed: set[str] = set()
        self.env: dict[str, str] = {
            "ASCEND_TOOLKIT_HOME": CANN,
            "PATH": "/usr/local/sbin:/usr/bin",
            "HOME": "/home/rtcache",
            "USER": "rtcache",
        }
        self.changes: dict[str, object] = {}
        self.add(f"{CANN}/aarch64-linux/ascend_toolkit_install.info", TOOLKIT_INFO)
        self.add(f"{CANN}/version.cfg", VERSION_CFG)
        self.add("/usr/local/Ascend/ascend-toolkit/set_env.sh")
        self.add(f"{CANN}/lib64/libascendcl.so")
        self.add(f"{DRIVER}/version.info", DRIVER_INFO)
        self.add(f"{DRIVER}/lib64/driver/libascend_hal.so")
        self.add("/etc/ascend_install.info", INSTALL_INFO)
        self.add("/etc/group", "root:x:0:\nHwHiAiUser:x:1000:rtcache\n")
        for node in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
            self.add(f"/dev/{node}")
        self.add("/usr/local/sbin/npu-smi")
        for directory in ("/home/rtcache", "/var/lib/rtcache"):
            (root / directory[1:]).mkdir(parents=True)

    def add(self, path: str, text: str = "") -> None:
        """Put a file there."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def remove(self, *paths: str) -> None:
        """Take files or whole directories away."""
        for path in paths:
            target = self.root / path.lstrip("/")
            if target.is_dir():
                for directory, _, names in os.walk(target, topdown=False):
                    for name in names:
                        (Path(directory) / name).unlink()
                    Path(directory).rmdir()
            else:
                target.unlink()

    def close(self, *paths: str) -> None:
        """Nobody may use these."""
        self.closed |= {str(self.root / path.lstrip("/")) for path in paths}

    def host(self, **changes: object) -> Host:
        """The host as it is now."""
        made = Host(
            root=self.root,
            env=dict(self.env),
            cwd="/var/lib/rtcache",
            uid=1001,
            groups=frozenset({"rtcache", "HwHiAiUser"}),
            machine="aarch64",
            python=(3, 11, 4),
            runner=self.answers,
            access=self._access(),
        )
        return replace(made, **changes)  # type: ignore[arg-type]

    def _access(self) -> Callable[[Path, int], bool]:
        return lambda path, mode: path.exists() and str(path) not in self.closed
