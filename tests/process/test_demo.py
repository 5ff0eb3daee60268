"""`make demo`'s second half, end to end, with the real model."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.smollm2
@pytest.mark.timeout(600)
def test_the_demo_keeps_its_promises(tmp_path: Path):
    with tempfile.TemporaryDirectory() as short:  # the name of a socket in it has an end
        ended = subprocess.run(
            [sys.executable, "-m", "tools.demo"],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": short},
            capture_output=True,
            text=True,
            check=False,
        )
        assert list(Path(short).glob("rtcache-*")) == []
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), (
        ended.stdout + ended.stderr
    )
    out = ended.stdout
    for answer in (
        "The fishing boat Marta was built in 1894.",
        "The telephone number of the office is 555 0142.",
        "The nearest car park is at the fish market, ten minutes away on foot.",
        "The museum is at 12 Pier Road, beside the lighthouse ferry.",
    ):
        assert f"\n{answer}\n" in out
    # request, prompt tokens, cached, prefilled; to the token
    rows = re.findall(r"│ (cold|hit|second turn) +│ +(\d+) │ +(\d+) │ +(\d+) │", out)
    assert rows == [
        ("cold", "531", "0", "531"),
        ("hit", "531", "516", "15"),
        ("hit", "529", "516", "13"),
        ("second turn", "561", "545", "16"),
    ]
    assert re.search(r"live_blocks +0\n", out)
    assert "rtcached drained, exited with 0 and removed its socket" in out
    assert max(map(len, out.splitlines())) <= 80
