"""Python, CANN, the driver and the group, on hosts where each of them is wrong in its own way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ascend_host import CANN, DRIVER, HostMaker
from tools.doctor.checks_software import (
    check_cann,
    check_driver,
    check_group,
    check_numpy,
    check_python,
    check_versions,
    installed_version,
)
from tools.doctor.findings import Finding
from tools.doctor.installed import (
    Installed,
    find_driver,
    find_set_env,
    find_toolkit,
    library_directories,
    numbers,
)


@pytest.fixture
def maker(tmp_path: Path) -> HostMaker:
    return HostMaker(tmp_path)


def cann(version: str) -> Installed:
    return Installed(CANN, version)


def test_what_is_installed(maker: HostMaker) -> None:
    host = maker.host()
    toolkit, driver = find_toolkit(host), find_driver(host)
    assert toolkit is not None
    assert driver is not None
    assert (toolkit.root, toolkit.version, toolkit.component) == (CANN, "8.0.0", "7.6.0.1.220")
    assert toolkit.series == "V100R001C20"
    assert "V100R001C19" in toolkit.compatible
    assert (driver.root, driver.version, driver.series) == (DRIVER, "24.1.rc3", "V100R001C19")
    assert library_directories(toolkit, driver)[0] == f"{CANN}/lib64"
    assert find_set_env(host, CANN) == "/usr/local/Ascend/ascend-toolkit/set_env.sh"


@pytest.mark.parametrize(
    ("removed", "added", "version"),
    [
        ("aarch64-linux", {}, "8.0.0"),
        ("aarch64-linux", {"version.cfg": "toolkit_running_version=[8.5.0]\n"}, "8.5.0"),
        ("aarch64-linux", {"version.cfg": "x", "version.info": "Version=9.0.0\n"}, "9.0.0"),
        ("aarch64-linux", {"version.cfg": "x", "runtime/version.info": "Version=9.1\n"}, "9.1"),
        ("aarch64-linux", {"version.cfg": "x"}, ""),
    ],
)
def test_where_cann_says_its_version(
    maker: HostMaker, removed: str, added: dict[str, str], version: str
) -> None:
    maker.remove(f"{CANN}/{removed}")
    for name, text in added.items():
        maker.add(f"{CANN}/{name}", text)
    toolkit = find_toolkit(maker.host())
    assert toolkit is not None
    assert toolkit.version == version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0.RC2", (8, 0)),
        ("7.6.0.1.220", (7, 6, 0, 1, 220)),
        ("", ()),
        ("RC1", ()),
        ("9.1.0-b", (9, 1)),
    ],
)
def test_versions_as_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


def test_all_is_well(maker: HostMaker) -> None:
    host = maker.host()
    toolkit, driver = find_toolkit(host), find_driver(host)
    findings = [
        check_python(host, toolkit),
        check_numpy(toolkit, lambda package: "1.24.4"),
        check_cann(host, toolkit),
        check_driver(driver),
        check_versions(toolkit, driver),
        check_group(host, driver, may_use_nodes=False),
    ]
    assert [finding.status for finding in findings] == ["ok"] * 6
    assert findings[2].text == f"CANN 8.0.0 in {CANN}."
    assert findings[4].text == ("CANN 8.0.0, driver 24.1.rc3: they name each other as compatible.")


@pytest.mark.parametrize(
    ("python", "version", "status"),
    [
        ((3, 9, 18), "8.0.0", "problem"),
        ((3, 10, 0), "8.0.0", "ok"),
        ((3, 11, 9), "8.3.RC1", "ok"),
        ((3, 12, 0), "8.3.RC1", "warning"),
        ((3, 13, 1), "8.5.0", "ok"),
        ((3, 14, 0), "9.0.0", "warning"),
        ((3, 14, 0), "9.1.0", "ok"),
        ((3, 14, 0), "7.0.0", "ok"),  # nothing is known of it
        ((3, 14, 0), "", "ok"),
    ],
)
def test_the_interpreter_against_cann(
    maker: HostMaker, python: tuple[int, int, int], version: str, status: str
) -> None:
    finding = check_python(maker.host(python=python), cann(version))
    assert finding.status == status
    if status == "warning":
        assert f"is newer than CANN {version} was made for" in finding.text
        assert finding.remedy.startswith("Make the virtual environment with Python 3.1")


def test_an_interpreter_that_is_too_old_without_cann(maker: HostMaker) -> None:
    finding = check_python(maker.host(python=(3, 8, 2)), None)
    assert finding.text == "Python 3.8.2 runs this; the daemon needs 3.10 or newer."


def test_numpy() -> None:
    assert check_numpy(None, lambda package: None).status == "problem"
    assert check_numpy(None, lambda package: "2.4.6").text == "numpy 2.4.6."
    assert "the daemon does not mind" in check_numpy(cann("8.3.RC1"), lambda p: "2.0.0").text
    assert check_numpy(cann("8.3.RC1"), lambda p: "1.26.4").text == "numpy 1.26.4."
    assert check_numpy(cann("9.0.0"), lambda p: "2.0.0").text == "numpy 2.0.0."
    assert installed_version("numpy")
    assert installed_version("no-such-package-at-all") is None


def test_no_cann(maker: HostMaker) -> None:
    maker.remove("/usr/local/Ascend/ascend-toolkit")
    del maker.env["ASCEND_TOOLKIT_HOME"]
    host = maker.host()
    finding = check_cann(host, find_toolkit(host))
    assert finding.status == "problem"
    assert "CANN is in none of its usual places: /usr/local/Ascend/ascend-toolkit" in finding.text
    assert "/home/rtcache/Ascend/cann" in finding.text
    assert finding.remedy.startswith("Install the CANN toolkit")


def test_a_cann_that_the_environment_names_and_that_is_gone(maker: HostMaker) -> None:
    maker.env["ASCEND_TOOLKIT_HOME"] = "/opt/cann"
    host = maker.host()
    finding = check_cann(host, find_toolkit(host))
    assert finding.status == "problem"
    assert "says that CANN is in /opt/cann, but there is no such directory" in finding.text


def test_an_environment_that_was_not_sourced(maker: HostMaker) -> None:
    del maker.env["ASCEND_TOOLKIT_HOME"]
    host = maker.host()
    finding = check_cann(host, find_toolkit(host))
    assert finding.status == "problem"
    assert "CANN 8.0.0 in /usr/local/Ascend/ascend-toolkit/latest is installed" in finding.text
    assert "Run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`" in finding.remedy
    assert "systemd" in finding.remedy


def test_the_newer_name_of_the_variable_and_a_home_install(maker: HostMaker) -> None:
    maker.remove("/usr/local/Ascend/ascend-toolkit")
    maker.add("/home/rtcache/Ascend/cann/version.info", "Version=9.0.0\n")
    maker.env = {"HOME": "/home/rtcache", "ASCEND_HOME_PATH": "/home/rtcache/Ascend/cann"}
    host = maker.host()
    assert check_cann(host, find_toolkit(host)) == Finding(
        "cann", "ok", "CANN 9.0.0 in /home/rtcache/Ascend/cann."
    )
    del maker.env["ASCEND_HOME_PATH"]
    host = maker.host()
    toolkit = find_toolkit(host)
    assert toolkit is not None
    assert toolkit.root == "/home/rtcache/Ascend/cann"


def test_no_driver(maker: HostMaker) -> None:
    maker.remove(DRIVER)
    finding = check_driver(find_driver(maker.host()))
    assert finding.status == "problem"
    assert "not installed here, or not mounted into this container" in finding.text
    assert "/etc/ascend_install.info mounted" in finding.remedy


def test_a_driver_elsewhere(maker: HostMaker) -> None:
    maker.remove(DRIVER)
    maker.add("/etc/ascend_install.info", "Driver_Install_Path_Param=/opt/hw\n")
    maker.add("/opt/hw/driver/version.info", "Version=25.2.0\n")
    driver = find_driver(maker.host())
    assert check_driver(driver).text == "Driver 25.2.0 in /opt/hw/driver."


def test_a_driver_without_a_version(maker: HostMaker) -> None:
    maker.remove(f"{DRIVER}/version.info")
    finding = check_driver(find_driver(maker.host()))
    assert finding.status == "warning"
    assert "does not say its version" in finding.text
    assert f"{DRIVER}/version.info mounted" in finding.remedy


@pytest.mark.parametrize(
    ("toolkit", "driver", "status"),
    [
        (("C20", ("C20",)), ("C20", ()), "ok"),
        (("C23", ("C18", "C21")), ("C18", ("C15",)), "ok"),
        (("C17", ("C13",)), ("C21", ("C17", "C18")), "ok"),
        (("C25", ("C21", "C23")), ("C15", ("C13",)), "warning"),
        (("C25", ()), (None, ()), "skipped"),
        ((None, ()), ("C15", ()), "skipped"),
    ],
)
def test_cann_against_driver(
    toolkit: tuple[str | None, tuple[str, ...]],
    driver: tuple[str | None, tuple[str, ...]],
    status: str,
) -> None:
    def made(version: str, facts: tuple[str | None, tuple[str, ...]]) -> Installed:
        series = "" if facts[0] is None else f"V100R001{facts[0]}"
        others = frozenset(f"V100R001{name}" for name in facts[1])
        return Installed("/x", version, series=series, compatible=others)

    finding = check_versions(made("8.5.0", toolkit), made("24.1.rc1", driver))
    assert finding.status == status
    assert finding.text.startswith("CANN 8.5.0, driver 24.1.rc1: ")
    if status == "warning":
        assert "(V100R001C25, V100R001C15)" in finding.text
        assert "update the older one" in finding.remedy


def test_versions_need_both(maker: HostMaker) -> None:
    assert check_versions(None, find_driver(maker.host())).status == "skipped"
    assert check_versions(find_toolkit(maker.host()), None).status == "skipped"


def about_group(maker: HostMaker, *, may_use_nodes: bool = False, **changes: object) -> Finding:
    """Of a user who is not in the group."""
    host = maker.host(**{"groups": frozenset({"rtcache"}), **changes})
    return check_group(host, find_driver(host), may_use_nodes=may_use_nodes)


def test_a_user_outside_the_group(maker: HostMaker) -> None:
    maker.add("/etc/group", "HwHiAiUser:x:1000:other\n")
    finding = about_group(maker)
    assert finding.status == "problem"
    assert about_group(maker, may_use_nodes=True) == replace(finding, status="warning")
    assert "The user rtcache is not in the group HwHiAiUser" in finding.text
    assert "usermod -aG HwHiAiUser rtcache" in finding.remedy
    assert "SupplementaryGroups=HwHiAiUser" in finding.remedy


def test_a_login_older_than_the_membership(maker: HostMaker) -> None:
    finding = about_group(maker)
    assert finding.status == "problem"
    assert about_group(maker, may_use_nodes=True) == replace(finding, status="warning")
    assert "this login is older than that" in finding.text
    assert finding.remedy.startswith("Log in again")


def test_who_needs_no_group(maker: HostMaker) -> None:
    assert about_group(maker, uid=0).status == "ok"
    for word in ("y", "yes", "YES"):
        maker.add("/etc/ascend_install.info", f"Driver_Install_For_All={word}\n")
        assert about_group(maker).text == "The driver was installed for all users."


def test_a_host_without_the_group(maker: HostMaker) -> None:
    maker.add("/etc/group", "root:x:0:\n")
    assert about_group(maker).status == "skipped"
