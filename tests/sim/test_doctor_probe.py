"""The doctor's own programs, on the software device under the name of the vendor's module."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.doctor.checks_acl import check_acl, check_probe
from tools.doctor.host import Host

ROOT = Path(__file__).parents[2]
SHIM = """\
import sys
from runtime_cache import aclsim
sys.modules["acl"] = aclsim
"""


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """One whose Python finds the software device as `acl`."""
    (tmp_path / "acl.py").write_text(SHIM)
    env = dict(os.environ)
    env |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RTCACHE_ACLSIM_SOC_NAME": "Ascend910B4"}
    return Host(root=tmp_path, env=env, executable=sys.executable)


def test_the_import(host: Host) -> None:
    result = check_acl(host, None, None)
    assert result.is_ready, result.findings


def test_the_first_use(host: Host) -> None:
    finding, probe = check_probe(host, 0)
    assert probe is not None, finding
    assert finding.text == "Device 0 is Ascend910B4."
    assert probe.total_bytes == 32 << 30
    assert probe.free_bytes is not None
    assert 0 < probe.free_bytes < probe.total_bytes


def test_a_device_that_is_not_there(host: Host) -> None:
    finding, probe = check_probe(host, 99)
    assert probe is None
    assert finding.status == "problem"
    assert finding.text.startswith("acl.rt.set_device answers 107001 for device 99: there is no")
