"""Device nodes, what a container must be given, and npu-smi.

Source: CANN installation guide (instg_0004) and the container images' documentation for nodes and
mounts; Tlntin/ascend-docker for those of 310B boards; vllm-ascend#2698 and cann-container-image#46
for the codes with which npu-smi fails.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from tools.doctor import npu_smi
from tools.doctor.findings import Finding, ok, problem, skipped, warning
from tools.doctor.host import Host, Ran
from tools.doctor.installed import Installed, find_driver, toolkit_roots
from tools.doctor.npu_smi import Chip

SMI_LIMIT_S = 20.0

#: Beside the device's own node.
COMMON_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_LIST = re.compile(r"\s*\d+\s*(?:,\s*\d+\s*)*")
_DAVINCI = re.compile(r"davinci(\d+)")
_SMI_PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_WORDS = ("docker", "kubepods", "containerd", "lxc")
_MOUNTS = ("/etc/ascend_install.info", "/usr/local/dcmi")
_BOARD_MOUNTS = ("/etc/sys_version.conf", "/etc/hdcBasic.cfg")
_HEALTHY = "OK"
_SMI_CODES = {
    -8005: "the driver is not loaded, its nodes are not given to this container, or another"
    " container has the device",
    -8020: "the device is in use by another container",
}


def signs_of_npu(host: Host) -> list[str]:
    """What tells that this host has, or had, an Ascend NPU or its software."""
    signs = [f"/dev/{name}" for name in host.names_in("/dev") if name.startswith("davinci")]
    if find_driver(host) is not None:
        signs.append("the driver")
    signs += [root for root in toolkit_roots(host) if host.is_dir(root)][:1]
    signs += [name for name, value in host.env.items() if value and name.startswith("ASCEND_")][:1]
    return signs + ([] if _find_smi(host) is None else ["npu-smi"])


def check_nodes(host: Host, device_id: int) -> Finding:
    """The nodes in /dev that a device needs, and whether this user may use them."""
    devices = _davinci_nodes(host)
    missing = [name for name in COMMON_NODES if not host.exists(f"/dev/{name}")]
    if not devices and len(missing) == len(COMMON_NODES):
        return problem(
            "nodes",
            "There is no /dev/davinciN and none of the nodes beside it.",
            "See with `lspci` and `dmesg` that the card is there and its driver loaded; give"
            f" a container {_device_flags('/dev/davinci0')}.",
        )
    if missing or not devices:
        named = ", ".join(f"/dev/{name}" for name in ([] if devices else ["davinciN"]) + missing)
        return problem(
            "nodes",
            f"Missing: {named}.",
            "Load the driver; give a container all of"
            f" {_device_flags(devices[0] if devices else '/dev/davinci0')}.",
        )
    visible = _visible(host, devices)
    if device_id >= len(visible):
        return problem(
            "nodes",
            f"npu:{device_id} does not exist: the devices are"
            f" {', '.join(visible) or 'none'}, counted from 0{_because_of_visible(host)}.",
            "Choose another device, or give this container the one that is meant.",
        )
    text = host.env.get(_VISIBLE, "")
    if text and _LIST.fullmatch(text) is None:
        return warning(
            "nodes",
            f"{_VISIBLE} is {text!r}, which is no list of numbers: what pyACL makes of it is not"
            " known.",
            "Set it to numbers with commas between them, such as 0,1, or not at all.",
        )
    return _check_access(host, visible[device_id])


def check_container(host: Host, driver: Installed | None, *, is_board: bool) -> Finding:
    """What a container must be given beside the device nodes."""
    if not _is_container(host):
        return skipped("container", "This is no container, as far as can be seen.")
    root = "/usr/local/Ascend/driver" if driver is None else driver.root
    needed = [f"{root}/lib64", f"{root}/version.info", *_MOUNTS]
    missing = [path for path in needed if not host.exists(path)]
    if _find_smi(host) is None:
        missing.append("/usr/local/bin/npu-smi")
    if is_board:
        missing += [path for path in _BOARD_MOUNTS if not host.exists(path)]
    if not missing:
        return ok("container", "This is a container, and the driver's files are in it.")
    flags = " ".join(f"-v {path}:{path}" for path in missing)
    return problem(
        "container",
        f"This is a container, and these are not mounted into it: {', '.join(missing)}.",
        f"Start it with {flags}",
    )


def check_smi(host: Host) -> tuple[list[Finding], list[Chip]]:
    """What npu-smi says of the chips, and their health."""
    command = _find_smi(host)
    if command is None:
        text = "npu-smi is neither on PATH nor in its usual places."
        remedy = "It comes with the driver; give a container /usr/local/bin/npu-smi."
        return [warning("npu-smi", text, remedy)], []
    try:
        ran = host.run([command, "info"], SMI_LIMIT_S)
    except OSError as error:
        remedy = (
            "Install the driver of this host's CPU again."
            if error.errno == errno.ENOEXEC
            else "See that it is a program, and that this user may run it."
        )
        return [problem("npu-smi", f"{command} cannot be run: {error.strerror}.", remedy)], []
    if ran.code is None:
        remedy = (
            f"See what {command} is: this is no answer of npu-smi."
            if ran.is_flood
            else "The driver or a device hangs: see `dmesg`, and start the device again."
        )
        return [problem("npu-smi", f"npu-smi {ran.how_it_ended(SMI_LIMIT_S)}.", remedy)], []
    chips = npu_smi.parse(ran.out)
    if chips:
        return [_shown(ran.out, chips), *filter(None, map(_health, chips))], chips
    return [_unread(ran, has_table=chips is not None)], []


def _shown(text: str, chips: Sequence[Chip]) -> Finding:
    names = ", ".join(f"npu:{index} {chip.name}" for index, chip in enumerate(chips))
    return ok("npu-smi", f"npu-smi {npu_smi.version(text) or ''} shows {names}.".replace("  ", " "))


def _health(chip: Chip) -> Finding | None:
    if chip.health == _HEALTHY:
        return None
    text = f"npu-smi says that {chip.name} of NPU {chip.npu} has health {chip.health}."
    remedy = f"Ask what it is: npu-smi info -t health -i {chip.npu} -c {chip.chip}"
    if chip.health.lower() == "critical":
        return problem("health", text, remedy)
    if chip.name.startswith("310B"):
        remedy += " (boards whose power sensor is not read show Alarm and work, users report)"
    return warning("health", text, remedy)


def _unread(ran: Ran, *, has_table: bool) -> Finding:
    """What to make of an output without chips."""
    text = f"{ran.out}\n{ran.err}"
    failed = npu_smi.failure(text)
    if failed is not None:
        why = _SMI_CODES.get(failed, "the driver could not be reached")
        return problem(
            "npu-smi",
            f"npu-smi cannot reach the driver ({failed}): {why}.",
            "See the findings about nodes and driver, and whether another container has it.",
        )
    if ran.code != 0:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "nothing")
        return problem(
            "npu-smi",
            f"npu-smi info {ran.how_it_ended(SMI_LIMIT_S)} and says: {last.strip()[:200]}",
            "See the findings about driver and nodes.",
        )
    if has_table:
        return problem(
            "npu-smi", "npu-smi shows no chip.", "See with `lspci` that a card is there."
        )
    return warning(
        "npu-smi",
        "npu-smi prints no table of a form that is known here; nothing was read from it.",
        "Look at it yourself: npu-smi info",
    )


def _check_access(host: Host, node: str) -> Finding:
    nodes = [node, *(f"/dev/{name}" for name in COMMON_NODES)]
    closed = [name for name in nodes if not host.may(name, os.R_OK | os.W_OK)]
    if not closed:
        return ok("nodes", f"{node} and the nodes beside it are there and may be used.")
    return problem(
        "nodes",
        f"This user may not read and write {', '.join(closed)}.",
        "Put the user into the group HwHiAiUser; in a systemd unit set"
        " SupplementaryGroups=HwHiAiUser and no PrivateDevices.",
    )


def _davinci_nodes(host: Host) -> list[str]:
    numbers = (_DAVINCI.fullmatch(name) for name in host.names_in("/dev"))
    return [f"/dev/davinci{number}" for number in sorted(int(m[1]) for m in numbers if m)]


def visible_index(host: Host, device_id: int) -> int | None:
    """Which of the host's devices pyACL counts as that one; None if it counts no such.

    Source: ASCEND_RT_VISIBLE_DEVICES selects devices and numbers them again from 0.
    """
    text = host.env.get(_VISIBLE, "")
    if _LIST.fullmatch(text) is None:
        return device_id
    wanted = [int(part) for part in text.split(",")]
    return wanted[device_id] if device_id < len(wanted) else None


def _visible(host: Host, devices: list[str]) -> list[str]:
    """The devices in the order in which pyACL counts them."""
    indexes = (visible_index(host, device_id) for device_id in range(len(devices)))
    return [devices[index] for index in indexes if index is not None and index < len(devices)]


def _because_of_visible(host: Host) -> str:
    text = host.env.get(_VISIBLE)
    return f"; {_VISIBLE} is {text!r}" if text else ""


def _device_flags(device: str) -> str:
    nodes = [device, *(f"/dev/{name}" for name in COMMON_NODES)]
    return " ".join(f"--device {node}" for node in nodes)


def _is_container(host: Host) -> bool:
    if any(host.exists(path) for path in _CONTAINER_FILES):
        return True
    groups = host.read("/proc/1/cgroup") or ""
    return any(word in groups for word in _CONTAINER_WORDS)


def _find_smi(host: Host) -> str | None:
    found = host.find_in([*host.paths("PATH"), *_SMI_PLACES], "npu-smi")
    return None if found is None else os.path.join(found, "npu-smi")
