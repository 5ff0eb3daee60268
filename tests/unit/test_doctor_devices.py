"""Nodes, mounts and npu-smi on hosts and in containers where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ascend_host import CANN, DRIVER, SMI_310B4, SMI_910B4, HostMaker
from tools.doctor.checks_devices import (
    check_container,
    check_nodes,
    check_smi,
    signs_of_npu,
    visible_index,
)
from tools.doctor.findings import Finding
from tools.doctor.host import Host, Ran
from tools.doctor.installed import find_driver

COMMON = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")


@pytest.fixture
def maker(tmp_path: Path) -> HostMaker:
    return HostMaker(tmp_path)


def smi_says(maker: HostMaker, ran: Ran | OSError) -> Finding:
    maker.answers.smi = ran
    (finding,), chips = check_smi(maker.host())
    assert chips == []
    assert finding.check == "npu-smi"
    return finding


def test_signs_of_an_npu(maker: HostMaker) -> None:
    assert signs_of_npu(maker.host()) == [
        "/dev/davinci0",
        "/dev/davinci1",
        "/dev/davinci_manager",
        "the driver",
        CANN,
        "ASCEND_TOOLKIT_HOME",
        "npu-smi",
    ]


def test_no_sign_of_an_npu(tmp_path: Path) -> None:
    assert signs_of_npu(Host(root=tmp_path, env={"PATH": "/usr/bin", "HOME": "/root"})) == []


@pytest.mark.parametrize("device_id", [0, 1])
def test_nodes_in_order(maker: HostMaker, device_id: int) -> None:
    assert check_nodes(maker.host(), device_id) == Finding(
        "nodes", "ok", f"/dev/davinci{device_id} and the nodes beside it are there and may be used."
    )


def test_no_node_at_all(maker: HostMaker) -> None:
    maker.remove("/dev")
    finding = check_nodes(maker.host(), 0)
    assert finding.status == "problem"
    assert "no /dev/davinciN and none of the nodes beside it" in finding.text
    assert "--device /dev/davinci0 --device /dev/davinci_manager" in finding.remedy


@pytest.mark.parametrize("node", COMMON)
def test_a_missing_node(maker: HostMaker, node: str) -> None:
    maker.remove(node)
    finding = check_nodes(maker.host(), 0)
    assert finding.status == "problem"
    assert finding.text == f"Missing: {node}."
    assert f"--device {node}" in finding.remedy


def test_only_the_devices_own_node_is_missing(maker: HostMaker) -> None:
    maker.remove("/dev/davinci0", "/dev/davinci1")
    assert check_nodes(maker.host(), 0).text == "Missing: /dev/davinciN."


def test_a_container_with_one_device_of_another_number(maker: HostMaker) -> None:
    maker.remove("/dev/davinci0", "/dev/davinci1")
    maker.add("/dev/davinci7")
    assert check_nodes(maker.host(), 0).text.startswith("/dev/davinci7 and")
    finding = check_nodes(maker.host(), 7)
    assert finding.status == "problem"
    assert finding.text == ("npu:7 does not exist: the devices are /dev/davinci7, counted from 0.")


def test_devices_are_counted_as_numbers(maker: HostMaker) -> None:
    for number in range(2, 12):
        maker.add(f"/dev/davinci{number}")
    assert check_nodes(maker.host(), 10).text.startswith("/dev/davinci10 and")


@pytest.mark.parametrize(
    ("text", "device_id", "index"),
    [
        ("", 1, 1),
        ("1", 0, 1),
        ("1", 1, None),
        ("1,0", 1, 0),
        ("0, 1", 1, 1),
    ],
)
def test_visible_devices_are_numbered_again(
    maker: HostMaker, text: str, device_id: int, index: int | None
) -> None:
    maker.env["ASCEND_RT_VISIBLE_DEVICES"] = text
    assert visible_index(maker.host(), device_id) == index
    if index is not None:
        assert check_nodes(maker.host(), device_id).text.startswith(f"/dev/davinci{index} and")
    else:
        assert "ASCEND_RT_VISIBLE_DEVICES is '1'" in check_nodes(maker.host(), device_id).text


@pytest.mark.parametrize("text", ["none", "0-1", "0,,1", " "])
def test_visible_devices_of_another_form(maker: HostMaker, text: str) -> None:
    maker.env["ASCEND_RT_VISIBLE_DEVICES"] = text
    assert visible_index(maker.host(), 1) == 1
    finding = check_nodes(maker.host(), 1)
    assert finding.status == "warning"
    assert f"is {text!r}, which is no list of numbers" in finding.text


@pytest.mark.parametrize("node", ["/dev/davinci0", *COMMON])
def test_a_node_that_may_not_be_used(maker: HostMaker, node: str) -> None:
    maker.close(node)
    finding = check_nodes(maker.host(), 0)
    assert finding.status == "problem"
    assert finding.text == f"This user may not read and write {node}."
    assert "SupplementaryGroups=HwHiAiUser and no PrivateDevices" in finding.remedy


def test_another_devices_node_does_not_matter(maker: HostMaker) -> None:
    maker.close("/dev/davinci1")
    assert check_nodes(maker.host(), 0).status == "ok"


def test_no_container(maker: HostMaker) -> None:
    host = maker.host()
    assert check_container(host, find_driver(host), is_board=False).status == "skipped"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/.dockerenv", ""),
        ("/run/.containerenv", ""),
        ("/proc/1/cgroup", "0::/kubepods/burstable/pod1\n"),
        ("/proc/1/cgroup", "12:pids:/docker/1234\n"),
    ],
)
def test_a_container_in_order(maker: HostMaker, path: str, text: str) -> None:
    maker.add(path, text)
    maker.add("/usr/local/dcmi/libdcmi.so")
    host = maker.host()
    found = check_container(host, find_driver(host), is_board=False)
    assert found == Finding(
        "container", "ok", "This is a container, and the driver's files are in it."
    )


@pytest.mark.parametrize(
    ("removed", "mount"),
    [
        (f"{DRIVER}/lib64", f"{DRIVER}/lib64"),
        (f"{DRIVER}/version.info", f"{DRIVER}/version.info"),
        (DRIVER, f"{DRIVER}/lib64"),
        ("/etc/ascend_install.info", "/etc/ascend_install.info"),
        ("/usr/local/dcmi", "/usr/local/dcmi"),
        ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi"),
    ],
)
def test_a_mount_that_is_missing(maker: HostMaker, removed: str, mount: str) -> None:
    maker.add("/.dockerenv")
    maker.add("/usr/local/dcmi/libdcmi.so")
    maker.remove(removed)
    host = maker.host()
    finding = check_container(host, find_driver(host), is_board=False)
    assert finding.status == "problem"
    assert f"not mounted into it: {mount}" in finding.text
    assert f"-v {mount}:{mount}" in finding.remedy


def test_a_boards_container_needs_more(maker: HostMaker) -> None:
    maker.add("/.dockerenv")
    maker.add("/usr/local/dcmi/libdcmi.so")
    host = maker.host()
    finding = check_container(host, find_driver(host), is_board=True)
    assert "-v /etc/sys_version.conf:/etc/sys_version.conf" in finding.remedy
    maker.add("/etc/sys_version.conf")
    maker.add("/etc/hdcBasic.cfg")
    assert check_container(maker.host(), find_driver(host), is_board=True).status == "ok"


def test_npu_smi(maker: HostMaker) -> None:
    findings, chips = check_smi(maker.host())
    assert findings == [Finding("npu-smi", "ok", "npu-smi 24.1.1 shows npu:0 910B4, npu:1 910B4.")]
    assert len(chips) == 2
    assert maker.answers.commands == [["/usr/local/sbin/npu-smi", "info"]]


def test_npu_smi_off_the_path_is_found(maker: HostMaker) -> None:
    maker.env["PATH"] = "/usr/bin"
    assert check_smi(maker.host())[0][0].status == "ok"


def test_no_npu_smi(maker: HostMaker) -> None:
    maker.remove("/usr/local/sbin/npu-smi")
    (finding,), chips = check_smi(maker.host())
    assert (finding.status, chips) == ("warning", [])
    assert "neither on PATH nor in its usual places" in finding.text


@pytest.mark.parametrize(
    ("health", "status"), [("Alarm", "warning"), ("Warning", "warning"), ("Critical", "problem")]
)
def test_a_chip_that_is_not_well(maker: HostMaker, health: str, status: str) -> None:
    maker.answers.smi = Ran(0, SMI_910B4.replace("| OK", f"| {health}", 1), "")
    findings, _ = check_smi(maker.host())
    assert [f.status for f in findings] == ["ok", status]
    assert findings[1].text == f"npu-smi says that 910B4 of NPU 0 has health {health}."
    assert findings[1].remedy == "Ask what it is: npu-smi info -t health -i 0 -c 0"


def test_the_alarm_of_boards(maker: HostMaker) -> None:
    maker.answers.smi = Ran(0, SMI_310B4, "")
    findings, _ = check_smi(maker.host())
    assert findings[1].status == "warning"
    assert "boards whose power sensor is not read show Alarm and work" in findings[1].remedy


def test_npu_smi_hangs(maker: HostMaker) -> None:
    finding = smi_says(maker, Ran(None, "", ""))
    assert finding.status == "problem"
    assert finding.text == "npu-smi did not end within 20 seconds."
    assert "hangs" in finding.remedy


def test_npu_smi_prints_without_end(maker: HostMaker) -> None:
    finding = smi_says(maker, Ran(None, "y", "", is_flood=True))
    assert finding.text == "npu-smi printed more than 1 MiB and was ended."
    assert finding.remedy == "See what /usr/local/sbin/npu-smi is: this is no answer of npu-smi."


def test_npu_smi_crashes(maker: HostMaker) -> None:
    finding = smi_says(maker, Ran(-11, "", ""))
    assert finding.text == "npu-smi info ended with signal 11 and says: nothing"


def test_npu_smi_may_not_be_run(maker: HostMaker) -> None:
    finding = smi_says(maker, PermissionError(13, "Permission denied"))
    assert finding.remedy == "See that it is a program, and that this user may run it."


def test_npu_smi_is_for_another_cpu(maker: HostMaker) -> None:
    finding = smi_says(maker, OSError(8, "Exec format error"))
    assert finding.status == "problem"
    assert finding.text == "/usr/local/sbin/npu-smi cannot be run: Exec format error."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dcmi module initialize failed. ret is -8005", "(-8005): the driver is not loaded"),
        (
            "dcmi model initialized failed, because the device is used. ret is -8020",
            "(-8020): the device is in use by another container",
        ),
        ("dcmi module initialize failed. ret is -9999", "(-9999): the driver could not be"),
    ],
)
def test_npu_smi_does_not_reach_the_driver(maker: HostMaker, text: str, why: str) -> None:
    first = "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n"
    for ran in (Ran(1, first + text, ""), Ran(0, "", first + text)):
        finding = smi_says(maker, ran)
        assert finding.status == "problem"
        assert f"npu-smi cannot reach the driver {why}" in finding.text


def test_npu_smi_fails_otherwise(maker: HostMaker) -> None:
    finding = smi_says(maker, Ran(2, "a table\nThis device does not support it.\n\n", ""))
    assert finding.status == "problem"
    assert "exit code 2 and says: This device does not support it." in finding.text
    assert smi_says(maker, Ran(2, "", "")).text.endswith("says: nothing")


def test_npu_smi_of_a_form_that_is_not_known(maker: HostMaker) -> None:
    finding = smi_says(maker, Ran(0, "chips:\n- 910B4\n", ""))
    assert finding.status == "warning"
    assert "no table of a form that is known here; nothing was read from it" in finding.text


def test_npu_smi_without_chips(maker: HostMaker) -> None:
    finding = smi_says(maker, Ran(0, SMI_910B4.partition("+====")[0], ""))
    assert (finding.status, finding.text) == ("problem", "npu-smi shows no chip.")
