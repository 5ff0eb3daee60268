"""`rtcache-doctor` as an operator runs it: on this host, which has no NPU, and on doctored ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend_host import SMI_910B4
from tests.support.real_om import write_real_om
from tests.support.rtcached import PATIENCE_S, Ended, run

DOCTOR = "tools.doctor.main"
ROOT = Path(__file__).parents[2]

#: pyACL's surface as far as the doctor calls it, on a device that has nothing to do.
FAKE_ACL = """\
import types
print("a banner on standard output")
def init(): return 100002
def finalize(): return 0
def get_soc_name(): return "Ascend910B4"
def get_recent_err_msg(): return "EE9999: reason"
rt = types.SimpleNamespace(
    malloc=lambda size, policy: (0, 0),
    set_device=lambda device: 0 if device == 0 else 107001,
    reset_device=lambda device: 0,
    get_mem_info=lambda attribute: (20 << 30, 32 << 30, 0) if attribute == 1 else (0, 0, 0),
)
"""


pytestmark = pytest.mark.skipif(
    Path("/dev/davinci_manager").exists(), reason="these are about a host without an NPU"
)


def doctor(*arguments: str, **env: str) -> Ended:
    plain = {"ASCEND_TOOLKIT_HOME": "", "ASCEND_HOME_PATH": ""}
    return run(DOCTOR, *arguments, env=plain | env)


def findings(ended: Ended) -> dict[str, dict[str, Any]]:
    """By check; the last of a name."""
    return {found["check"]: found for found in json.loads(ended.out)["findings"]}


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """An environment that shows signs of an NPU: a CANN of which nothing is in order."""
    cann = tmp_path / "cann"
    cann.mkdir()
    (tmp_path / "bin").mkdir()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {"ASCEND_TOOLKIT_HOME": str(cann), "PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": path}


def test_this_host_has_no_npu() -> None:
    ended = doctor()
    assert ended.code == 0
    assert "skipped  npu        There is no sign of an Ascend NPU" in ended.out
    assert ended.out.splitlines()[-1].startswith("0 problems, ")
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "\x1b" not in ended.out


def test_a_card_was_expected() -> None:
    ended = doctor("--device", "npu:0", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["has_problems"]
    assert findings(ended)["npu"]["status"] == "problem"


def test_the_software_device(null_bundle: Path) -> None:
    ended = doctor("--device", "sim:0", "--bundle", str(null_bundle), "--checksums")
    assert ended.code == 0, ended.out
    assert "The software device can be used, with ONNX Runtime" in ended.out
    assert "checksums right." in " ".join(ended.out.split())


def test_a_bundle_of_the_software_device_on_a_card(null_bundle: Path, host: dict[str, str]) -> None:
    found = findings(doctor("--device", "npu:0", "--bundle", str(null_bundle), "--json", **host))
    assert found["target"]["remedy"] == "Convert the model again with --target ascend."


def test_a_wrong_command_line() -> None:
    ended = doctor("--device", "gpu:0")
    assert ended.code == 2
    assert ended.out == ""
    assert ended.complaint == (
        "rtcache-doctor: device 'gpu:0' is unknown; it is sim:N or npu:N, such as npu:0"
    )


def test_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "rtcached.toml"
    directory = tmp_path / ("x" * 120)
    directory.mkdir()
    config.write_text(f'[device]\ndevice = "sim:0"\n[ipc]\nendpoint = "ipc://{directory}/s"\n')
    ended = doctor("--config", str(config), "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["device"] == "sim:0"
    assert "the system allows 107" in findings(ended)["socket"]["text"]


def test_pyacl_is_missing_although_cann_is_there(host: dict[str, str]) -> None:
    ended = doctor("--json", **host)
    assert ended.code == 1
    found = findings(ended)
    assert "PYTHONPATH does not lead to it" in found["acl"]["text"]
    assert found["cann"]["status"] == "ok"
    assert found["driver"]["status"] == "problem"
    assert found["nodes"]["status"] == "problem"
    assert found["npu-smi"]["status"] == "warning"


def test_the_package_of_pypi(host: dict[str, str], tmp_path: Path) -> None:
    """A package without `init`, with the metadata that pip leaves."""
    (tmp_path / "acl").mkdir()
    (tmp_path / "acl/__init__.py").write_text("class Parser: pass\n")
    metadata = tmp_path / "acl-0.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acl\nVersion: 0.2\n")
    found = findings(doctor("--json", **host))["acl"]
    assert f"at {tmp_path}/acl/__init__.py is not pyACL" in found["text"]
    assert found["remedy"] == "Run: pip uninstall acl"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            'raise ImportError("libascendcl.so: cannot open shared object file: No such file")',
            "libascendcl.so: cannot open shared object file: No such file: LD_LIBRARY_PATH",
        ),
        (
            'raise ImportError("libascend_hal.so: cannot open shared object file: No such file")',
            "the NPU driver is not installed, or not mounted into this container",
        ),
        ('raise ImportError("acl.so: undefined symbol: aclrtX")', "of different releases"),
        ("print 'Python 2'", "acl.py ends with SyntaxError"),
        ("import os; os.kill(os.getpid(), 11)", "acl.py ended with signal 11"),
        ("raise SystemExit(0)", "acl.py ends with SystemExit"),
        ("import os; os._exit(0)", "acl.py ended with exit code 0"),
    ],
)
def test_a_module_that_does_not_load(
    host: dict[str, str], tmp_path: Path, source: str, text: str
) -> None:
    (tmp_path / "acl.py").write_text(source)
    found = findings(doctor("--json", **host))["acl"]
    assert found["status"] == "problem"
    assert text in found["text"]


def test_a_working_directory_with_an_acl_in_it(
    host: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed command does not look there, so the doctor does not."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/acl.py").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    found = findings(doctor("--json", **host))["acl"]
    assert "PYTHONPATH does not lead to it" in found["text"]


def test_pyacl_and_npu_smi(host: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "acl.py").write_text(FAKE_ACL)
    (tmp_path / "table").write_text(SMI_910B4)
    tool = tmp_path / "bin/npu-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = info ] && cat "{tmp_path}/table"\n')
    tool.chmod(0o755)
    found = findings(doctor("--json", **host))
    assert found["acl"]["text"] == f"pyACL is {tmp_path}/acl.py."
    assert found["npu-smi"]["text"] == "npu-smi 24.1.1 shows npu:0 910B4, npu:1 910B4."
    # This host has no nodes, so the device is left alone.
    assert found["device"]["status"] == "skipped"


def test_an_npu_smi_that_is_no_program(host: dict[str, str], tmp_path: Path) -> None:
    tool = tmp_path / "bin/npu-smi"
    for contents, mode in (("\x7fELF nonsense", 0o755), ("#!/no/such/shell\n", 0o755)):
        tool.write_text(contents)
        tool.chmod(mode)
        found = findings(doctor("--json", **host))["npu-smi"]
        assert found["status"] == "problem"
        assert "cannot be run" in found["text"]


def test_om_of_a_real_soc(tmp_path: Path) -> None:
    path = write_real_om(tmp_path / "m.om")
    ended = doctor("om", str(path))
    assert ended.code == 0
    assert "IR model, compiled for Ascend310B4 by ATC 7.6.0.1.220" in ended.out
    assert "command: atc --framework=5" in ended.out
    assert json.loads(doctor("om", str(path), "--json").out)["kind"] == "ascend"


def test_om_of_the_software_device(null_bundle: Path) -> None:
    (path,) = null_bundle.glob("*.om")
    ended = doctor("om", str(path))
    assert ended.code == 0
    assert "made for the software device, standing for Ascend" in ended.out
    facts = json.loads(doctor("om", str(path), "--json").out)
    assert facts["kind"] == "sim"
    assert facts["num_gears"] > 1


def test_om_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.om")
    ended = doctor("om", str(tmp_path / "m.om"))
    assert ended.code == 1
    assert ended.complaint == f"rtcache-doctor: {tmp_path}/m.om is not a regular file"


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """`rtcache-doctor | head -0`: nothing is wrong."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", DOCTOR, "om", str(write_real_om(tmp_path / "m.om"))],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
