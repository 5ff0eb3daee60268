"""A model too large for one protobuf: converted and served in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.tiny import tiny_spec, write_checkpoint
from tools.daemon_process import DaemonProcess

#: 2.4 GB of float32 weights in 9 layers; protobuf ends at 2 GiB.
SPEC = tiny_spec(
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=9,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
)
#: A few times the largest tensor (64 MiB), and what Python and its libraries take.
MAX_RESIDENT_KIB = 700 * 1024
#: `rtcache-convert`, and then its own peak of resident memory [KiB]. (What the system reports to a
#: parent counts the parent's memory at the fork.)
CONVERT = """
import re, sys
from tools.convert_model import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SPEC, num_shards=3)
    bundle = tmp_path / "bundle"
    gears = ("--gears", "prefill=16@128 decode=1@128", "--context", "128", "--kv-tokens", "512")
    command = (sys.executable, "-c", CONVERT, str(checkpoint), *gears)
    ended = subprocess.run(
        [*command, "--output", str(bundle), "--target", "sim"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert (bundle / "model.om").stat().st_size > 2**31
    assert int(ended.stdout) < MAX_RESIDENT_KIB
    with DaemonProcess(bundle, "sim:0") as daemon, Client(daemon.endpoint) as client:
        answer = client.generate(prompt_ids=[1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True)
        assert len(answer.result().token_ids) == 2
