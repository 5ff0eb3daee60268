"""`docs/clients.md`: its programs run against a live daemon, its names exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc import command_line, errors
from ipc.dealer import DEFAULT_TIMEOUT_S
from ipc.endpoint import DEFAULT_ENDPOINT
from ipc.link import DEFAULT_WINDOW, PROBE_S
from ipc.session import REPEATABLE
from tests.process.test_other_clients import lacking
from tests.support.embedded import make_brief_bundle
from tests.support.rtcached import PATIENCE_S
from tools.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "clients.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    bundle = make_brief_bundle(tmp_path_factory.mktemp("brief"))
    with DaemonProcess(bundle, "sim:0") as daemon:
        yield daemon


def run(*command: str, endpoint: str) -> str:
    """Standard output of a program that must succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        env=os.environ | {"PATH": path, "RTCACHE_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended
    assert "Traceback" not in ended.stderr
    return ended.stdout


def test_the_programs_in_python(daemon: DaemonProcess) -> None:
    programs = blocks("python")
    assert len(programs) == 5
    for program in programs:
        assert DEFAULT_ENDPOINT in program
        text = program.replace(DEFAULT_ENDPOINT, daemon.endpoint)
        assert run(sys.executable, "-W", "error", "-c", text, endpoint="ipc:///nowhere")


def test_the_lines_for_a_shell(daemon: DaemonProcess) -> None:
    if shutil.which("jq") is None:
        lacking("jq is not installed")
    (script,) = blocks("sh")
    out = run("bash", "-euo", "pipefail", "-c", script, endpoint=daemon.endpoint)
    assert out.startswith("rtcached ")
    # The registered prefix was found.
    assert int(out.split()[-1]) >= len("You answer in one short sentence. ")


def test_what_it_says_of_numbers_and_names() -> None:
    assert f"`timeout_s` ({DEFAULT_TIMEOUT_S:g} s" in TEXT
    assert f"the daemon ({DEFAULT_TIMEOUT_S:g} s)" in TEXT
    assert f"gives up after {command_line.GREETING_S:g} s" in TEXT
    assert f"`window` messages ({DEFAULT_WINDOW};" in TEXT
    assert f"waited for {PROBE_S:g} seconds" in TEXT
    (repeated,) = re.findall(r"Calls that change nothing \((.*?)\)", TEXT, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", repeated)) == REPEATABLE
    named = {name for name in re.findall(r"`([A-Z]\w+)`", TEXT) if name.endswith(("Error", "Lost"))}
    assert {name for name in named if not hasattr(errors, name)} <= {"Lost"}
    codes = {getattr(command_line, name) for name in dir(command_line) if name.startswith("EXIT_")}
    codes.discard(command_line.EXIT_CODES)
    rows = TEXT.partition("| exit code |")[2].partition("\n\n")[0]
    told = {
        int(number)
        for row in re.findall(r"^\| ([\d, ]+) \|", rows, re.MULTILINE)
        for number in row.split(", ")
    }
    assert told == codes
