"""A daemon whose standard error is the journal of systemd, as far as it can tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.rtcached import PATIENCE_S


def test_lines_in_the_journal_have_priorities(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as journal:
        status = os.fstat(journal.fileno())
        named = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = [sys.executable, "-m", "runtime_cache.daemon", "--device", "sim:0"]
        command += ["--model-bundle", "/nowhere", "--ipc-endpoint", f"ipc://{tmp_path}/s"]
        ended = subprocess.run(
            command, env=os.environ | named, stderr=journal, timeout=PATIENCE_S, check=False
        )
        journal.seek(0)
        lines = journal.read().splitlines()
    assert ended.returncode == 2
    assert lines == [
        "<6>bundle_reading path=/nowhere verify=true",
        "<3>rtcached: /nowhere is not a bundle: no such directory",
    ]
