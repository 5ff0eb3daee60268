"""`python -m runtime_cache.aclsim run -m MODULE`: the program is a module, as for `python -m`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WELL = "software device (Ascend310P3): 0 calls, and nothing that a card would not forgive\n"


def run_module(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime_cache.aclsim", "run", "-m", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_module_is_run_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "demo"
    package.mkdir()
    (package / "__init__.py").write_text("import acl\n")
    (package / "parts.py").write_text("VALUE = 7\n")
    source = """
        import sys
        from . import parts
        print(__name__, __package__, __spec__.name, sys.argv == [__file__, "-x"], parts.VALUE)
        """
    for name in ("__main__", "tool"):
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    for name in ("demo", "demo.tool"):
        done = run_module(tmp_path, name, "-x")
        found = name if name == "demo.tool" else "demo.__main__"
        assert (done.returncode, done.stdout) == (0, f"__main__ demo {found} True 7\n")
        assert done.stderr == WELL


def test_what_a_module_holds_is_let_go_before_the_report(tmp_path: Path) -> None:
    (tmp_path / "tidy.py").write_text(
        "import acl\nacl.init()\nacl.rt.set_device(0)\n"
        "class Last:\n"
        "    def __del__(self): acl.rt.reset_device(0); acl.finalize()\n"
        "last = Last()\n"
    )
    done = run_module(tmp_path, "tidy")
    assert done.stderr == WELL.replace("0 calls", "4 calls")


@pytest.mark.parametrize("name", ["absent", "absent.tool", "empty", "_queue"])
def test_a_module_that_cannot_be_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run_module(tmp_path, name)
    assert done.returncode == 1
    assert name.split(".")[0] in done.stderr.splitlines()[-2]
    assert done.stderr.endswith(WELL)
