"""What ONNX Runtime does beside executing models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import runtime_cache.aclsim, runtime_cache.aclsim.atc.trial"


def test_nothing_is_reported_and_nothing_left_in_the_home_directory(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ORT_")}
    env.pop("CI", None)  # with it ONNX Runtime is silent by itself
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**env, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    assert list(tmp_path.iterdir()) == []
