"""A CANN installation that is none: the files by which one is found, a Python, and an `atc` that
notes how it was called and does what it is told. Laid out as 8.1.RC1 or as 8.5 and later.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

from om_models.cann import PYTHON_MODULES

#: Without site-packages: it has the standard library and what `set_env.sh` puts on PYTHONPATH.
PYTHON = f'#!/bin/sh\nexec "{os.path.realpath(sys.executable)}" -S "$@"\n'

SET_ENV = """\
export ASCEND_TOOLKIT_HOME={home}
export ASCEND_HOME_PATH={home}
export ASCEND_OPP_PATH={home}/opp
export LD_LIBRARY_PATH={home}/lib64:$LD_LIBRARY_PATH
export PYTHONPATH={home}/python/site-packages:$PYTHONPATH
export PATH={home}/bin:$PATH
echo sourced
"""

ATC = """\
import json, os, pathlib, signal, sys
home = pathlib.Path(__file__).resolve().parents[1]
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
output = pathlib.Path(flags["output"])
with (home / "runs.jsonl").open("a") as runs:
    run = {"flags": flags, "env": dict(os.environ), "cwd": os.getcwd()}
    runs.write(json.dumps(run) + "\\n")
acts = json.loads((home / "acts.json").read_text()).get(output.name, {})
print("ATC start working now, please wait for a moment.", flush=True)
for line in acts.get("lines", []):
    print(line, flush=True)
if acts.get("half"):
    output.with_name(output.name + ".om").write_bytes(b"half")
if "hang" in acts:
    with open(acts["hang"], "w") as told:
        told.write(str(os.getpid()))
    signal.pause()
if "signal" in acts:
    os.kill(os.getpid(), acts["signal"])
if acts.get("code"):
    print("ATC run failed, Please check the detail log, Try 'atc --help' for more information")
    print(*acts.get("errors", []), sep="\\n", flush=True)
    sys.exit(acts["code"])
for name in acts.get("weights", []):
    output.parent.joinpath("weight").mkdir(exist_ok=True)
    output.parent.joinpath("weight", name).write_text(name)
if acts.get("writes", True):
    om = output.with_name(output.name + acts.get("suffix", "") + ".om")
    om.write_text(output.name)
    om.chmod(0o600)
pathlib.Path("kernel_meta").mkdir(exist_ok=True)
print("ATC run success, welcome to the next use.")
"""


class CannTree:
    """One fabricated installation.

    Attributes:
        home: what `--cann` and ASCEND_TOOLKIT_HOME name.
        root: what holds it.
    """

    def __init__(
        self, root: Path, *, layout: Literal["8.x", "8.5"] = "8.x", release: str = "8.1.RC1"
    ) -> None:
        """Writes it.

        Args:
            layout: where set_env.sh lies: beside the installation (8.x) or inside (8.5).
        """
        self.root = root
        self.home = root / "ascend-toolkit" / "latest" if layout == "8.x" else root / "cann"
        self.set_env = (self.home.parent if layout == "8.x" else self.home) / "set_env.sh"
        self.home.mkdir(parents=True)
        self.set_env.write_text(SET_ENV.format(home=self.home))
        info = self.home / "aarch64-linux" / "ascend_toolkit_install.info"
        info.parent.mkdir()
        info.write_text(f"package_name=Ascend-cann-toolkit\nversion={release}\narch=aarch64\n")
        (self.home / "bin").mkdir()
        self._program("python3", PYTHON)
        self._program(
            "atc", f'#!/bin/sh\nexec "{self.home}/bin/python3" "{self.home}/bin/atc.py" "$@"\n'
        )
        (self.home / "bin" / "atc.py").write_text(ATC)
        self.modules = self.home / "python" / "site-packages"
        for name in PYTHON_MODULES:
            module = self.modules.joinpath(*name.split("."))
            module.mkdir(parents=True)
            (module / "__init__.py").touch()
        self.acts()

    def acts(self, **acts: dict[str, Any]) -> None:
        """Tell `atc` what to do, by the name of its output; what is not named succeeds."""
        (self.home / "acts.json").write_text(json.dumps(acts))

    @property
    def runs(self) -> list[dict[str, Any]]:
        """How `atc` was called: flags, environment, directory."""
        path = self.home / "runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def compiled(self) -> list[str]:
        """What it was asked to compile, by name."""
        return [Path(run["flags"]["output"]).name for run in self.runs]

    def _program(self, name: str, text: str) -> None:
        path = self.home / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
