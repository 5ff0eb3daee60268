"""`import acl` that goes wrong, in every way that field reports have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ascend_host import CANN, DRIVER, HostMaker, said
from tools.doctor.checks_acl import AclImport, Probe, check_acl, check_probe
from tools.doctor.findings import Finding
from tools.doctor.host import Ran
from tools.doctor.installed import find_driver, find_toolkit


@pytest.fixture
def maker(tmp_path: Path) -> HostMaker:
    return HostMaker(tmp_path)


def imported(maker: HostMaker, **facts: object) -> AclImport:
    """What the doctor makes of what its program said of the import."""
    if facts:
        maker.answers.importing = said(**{"pip": {}, **facts})
    host = maker.host()
    return check_acl(host, find_toolkit(host), find_driver(host))


def failed(
    maker: HostMaker, text: str, kind: str = "ImportError", missing: str | None = None
) -> Finding:
    result = imported(maker, error=text, kind=kind, missing=missing)
    assert not result.is_ready
    (finding,) = result.findings
    assert finding.status == "problem"
    assert finding.check == "acl"
    return finding


def test_pyacl(maker: HostMaker) -> None:
    result = imported(maker)
    assert result.is_ready
    assert result.findings == [
        Finding("acl", "ok", f"pyACL is {CANN}/python/site-packages/acl.so.")
    ]
    ((executable, option, _),) = maker.answers.commands
    assert (executable, option) == (maker.host().executable, "-c")


def test_no_module(maker: HostMaker) -> None:
    result = imported(
        maker, error="No module named 'acl'", kind="ModuleNotFoundError", missing="acl"
    )
    assert (result.is_ready, result.is_absent) == (False, True)
    (finding,) = result.findings
    assert "PYTHONPATH does not lead to it, or CANN is not installed" in finding.text
    assert finding.remedy == "Run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`."


def test_no_module_and_no_cann(maker: HostMaker) -> None:
    maker.remove("/usr/local/Ascend/ascend-toolkit")
    finding = failed(maker, "No module named 'acl'", "ModuleNotFoundError", "acl")
    assert finding.remedy.startswith("Install the CANN toolkit; pyACL is part of it")


def test_another_module_is_missing(maker: HostMaker) -> None:
    finding = failed(maker, "No module named 'te'", "ModuleNotFoundError", "te")
    assert "pyACL cannot be imported: No module named 'te'." in finding.text
    assert finding.remedy == "Install te into this virtual environment."


def test_libascendcl_is_not_on_the_library_path(maker: HostMaker) -> None:
    finding = failed(maker, "libascendcl.so: cannot open shared object file: No such file")
    assert "LD_LIBRARY_PATH is not set" in finding.text
    assert finding.remedy == (
        f"libascendcl.so is in {CANN}/lib64: export LD_LIBRARY_PATH={CANN}/lib64:$LD_LIBRARY_PATH"
    )


def test_libascendcl_is_nowhere(maker: HostMaker) -> None:
    maker.remove(f"{CANN}/lib64")
    finding = failed(maker, "libascendcl.so: cannot open shared object file: No such file")
    assert finding.remedy == "Run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`."


def test_a_driver_library_off_the_path(maker: HostMaker) -> None:
    finding = failed(maker, "libascend_hal.so: cannot open shared object file: No such file")
    assert "the NPU driver is not installed, or not mounted into this container" in finding.text
    assert f"libascend_hal.so is in {DRIVER}/lib64/driver" in finding.remedy


def test_a_driver_library_that_is_not_there(maker: HostMaker) -> None:
    maker.remove(DRIVER)
    finding = failed(maker, "libascend_hal.so: cannot open shared object file: No such file")
    assert finding.remedy.startswith("Install the driver; in a container mount /usr/local/Ascend")


def test_a_library_of_nobody_known(maker: HostMaker) -> None:
    finding = failed(maker, "libge_common.so: cannot open shared object file: No such file")
    assert "or CANN or the NPU driver is not whole" in finding.text
    assert finding.remedy == "Run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`."


def test_releases_that_do_not_fit(maker: HostMaker) -> None:
    finding = failed(maker, "/x/acl.so: undefined symbol: aclrtNewThing")
    assert "pyACL and the CANN libraries are of different releases" in finding.text
    assert finding.remedy.startswith("Source the set_env.sh of one CANN only")


def test_an_interpreter_that_does_not_fit(maker: HostMaker) -> None:
    finding = failed(maker, "/x/acl.so: undefined symbol: _PyUnicode_Ready")
    assert "pyACL was built for another version of Python" in finding.text


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("acl.cpython-39-aarch64-linux-gnu.so", "Python 3.9 on aarch64"),
        ("acl.cpython-311-x86_64-linux-gnu.so", "Python 3.11 on x86_64"),
    ],
)
def test_an_extension_for_another_interpreter(maker: HostMaker, name: str, other: str) -> None:
    maker.add(f"{CANN}/python/site-packages/{name}")
    finding = failed(maker, "No module named 'acl'", "ModuleNotFoundError", "acl")
    assert f"was built for {other} ({CANN}/python/site-packages/{name})" in finding.text
    assert "not for Python 3.11 on aarch64" in finding.text
    assert finding.remedy == "Make the virtual environment with that Python."


def test_an_extension_for_this_interpreter_that_is_not_found(maker: HostMaker) -> None:
    maker.env["PYTHONPATH"] = "/opt/a:/opt/b"
    maker.add("/opt/b/acl.cpython-39-aarch64-linux-gnu.so")
    maker.add(f"{CANN}/python/site-packages/acl.cpython-311-aarch64-linux-gnu.so")
    finding = failed(maker, "No module named 'acl'", "ModuleNotFoundError", "acl")
    assert "PYTHONPATH does not lead to it" in finding.text


def test_the_package_of_pypi(maker: HostMaker) -> None:
    result = imported(maker, pip={"acl": "0.2"}, file="/v/acl/__init__.py", is_pyacl=False)
    assert not result.is_ready
    assert not result.is_absent
    (finding,) = result.findings
    assert finding.text.startswith("The module `acl` at /v/acl/__init__.py is not pyACL")
    assert finding.remedy == "Run: pip uninstall acl"


def test_a_stranger_that_pip_does_not_know(maker: HostMaker) -> None:
    (finding,) = imported(maker, file=None, is_pyacl=False).findings
    assert "at an unknown place is not pyACL" in finding.text
    assert finding.remedy == "Remove that module, or take its directory off PYTHONPATH."


def test_a_stranger_that_does_not_say_where_it_is(maker: HostMaker) -> None:
    """A directory without __init__.py."""
    (finding,) = imported(maker, place=["/a/acl"], file=None, is_pyacl=False).findings
    assert "at ['/a/acl'] is not pyACL" in finding.text


def test_a_stranger_behind_pyacl(maker: HostMaker) -> None:
    result = imported(maker, pip={"acl": "0.2", "pyacl": "1.0a1"}, file="/x/acl.so", is_pyacl=True)
    assert result.is_ready
    assert [finding.status for finding in result.findings] == ["ok", "warning"]
    assert "pip has installed acl 0.2 and pyacl 1.0a1" in result.findings[1].text
    assert result.findings[1].remedy == "Run: pip uninstall acl pyacl"


def test_a_stranger_that_is_not_of_this_python(maker: HostMaker) -> None:
    finding = failed(maker, "Missing parentheses (acl.py, line 1)", "SyntaxError")
    assert finding.text.startswith("The module `acl` ends with SyntaxError: Missing parentheses")
    assert "another package of that name is in its place" in finding.text


def test_what_fails_is_named_with_its_place(maker: HostMaker) -> None:
    place = "/home/u/acl.py"
    (finding,) = imported(maker, place=place, error="boom", kind="RuntimeError").findings
    assert finding.text.startswith(f"The module `acl` at {place} ends with RuntimeError: boom;")
    assert finding.remedy == f"Remove {place}, or take its directory off PYTHONPATH."
    facts = {"error": "No module named 'x'", "kind": "ModuleNotFoundError", "missing": "x"}
    (finding,) = imported(maker, place=place, **facts).findings
    assert finding.text == f"pyACL ({place}) cannot be imported: No module named 'x'."
    maker.answers.importing = replace(said(place=place), code=None)
    (finding,) = imported(maker).findings
    assert finding.text == f"Importing `acl` from {place} did not end within 30 seconds."


def test_an_import_that_prints_without_end(maker: HostMaker) -> None:
    maker.answers.importing = Ran(None, "x" * 10, "", is_flood=True)
    (finding,) = imported(maker).findings
    assert finding.text == "Importing `acl` printed more than 1 MiB and was ended."
    assert "pyACL does not print" in finding.remedy


def test_an_import_that_hangs(maker: HostMaker) -> None:
    maker.answers.importing = Ran(None, '\nrtcache-doctor: {"pip": {}}\n', "")
    result = imported(maker)
    assert not result.is_ready
    (finding,) = result.findings
    assert finding.text == "Importing `acl` did not end within 30 seconds."
    assert "hangs" in finding.remedy


@pytest.mark.parametrize(
    ("ran", "how"),
    [
        (Ran(-11, "", ""), "signal 11."),
        (Ran(3, "", "loading\nfatal: no device\n"), "exit code 3. It said: fatal: no device."),
        (Ran(0, "rtcache-doctor: {broken\n", ""), "exit code 0."),
        (Ran(0, "rtcache-doctor: [1]\n", ""), "exit code 0."),
    ],
)
def test_an_import_that_ends_the_process(maker: HostMaker, ran: Ran, how: str) -> None:
    maker.answers.importing = ran
    (finding,) = imported(maker).findings
    assert finding.text.startswith("Importing `acl` ended with ")
    assert finding.text.endswith(how)


def test_the_device(maker: HostMaker) -> None:
    finding, probe = check_probe(maker.host(), 3)
    assert probe == Probe("Ascend910B4", 30 << 30, 32 << 30)
    assert finding == Finding("device", "ok", "Device 3 is Ascend910B4.")
    assert maker.answers.commands[-1][-1] == "3"


def test_a_device_that_says_little(maker: HostMaker) -> None:
    maker.answers.probe = said(soc=None)
    finding, probe = check_probe(maker.host(), 0)
    assert probe == Probe(None, None, None)
    assert finding.text == "Device 0 is of unknown name."


@pytest.mark.parametrize(
    ("call", "code", "meaning"),
    [
        ("acl.rt.set_device", 107001, "there is no device of that number"),
        ("acl.init", 500000, "an installation that is not whole"),
        ("acl.init", 500001, "CANN does not fit the device"),
        ("acl.rt.set_device", 207000, "the driver is older than this CANN"),
        ("acl.rt.set_device", 507033, "the device did not start"),
        ("acl.rt.set_device", 1, "see the error codes of pyACL"),
    ],
)
def test_a_device_that_refuses(maker: HostMaker, call: str, code: int, meaning: str) -> None:
    maker.answers.probe = said(call=call, code=code, message="EE1001: a\n  reason")
    finding, probe = check_probe(maker.host(), 0)
    assert probe is None
    assert finding.status == "problem"
    assert finding.text.startswith(f"{call} answers {code} for device 0: ")
    assert meaning in finding.text
    assert finding.text.endswith("It says: EE1001: a reason")


def test_a_device_that_hangs(maker: HostMaker) -> None:
    maker.answers.probe = Ran(None, "", "")
    finding, probe = check_probe(maker.host(), 1)
    assert probe is None
    assert finding.text == "The first use of device 1 did not end within 120 seconds."
