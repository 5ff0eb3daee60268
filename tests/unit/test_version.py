"""Every command tells the one version, in the same form."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import runtime_cache
from ipc.version import __version__
from tools.admin.completion import PROGRAMS, script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_command_says_name_and_version(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = importlib.import_module(PROGRAMS[program]).new_parser()
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{program} {__version__}\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_shells_complete_it(program: str) -> None:
    assert re.search(r"_option_strings=\(.*--version\b", script(program, "bash"))


def test_the_documentation_names_them() -> None:
    line = re.search(r"^.*--version[^.]*", (ROOT / "docs" / "admin.md").read_text("utf-8"), re.M)
    assert line is not None
    assert set(re.findall(r"`(rtcached?(?:-\w+)?)\b", line[0])) == set(PROGRAMS)


def test_the_version_is_the_packages() -> None:
    written = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert written is not None
    assert written[1] == __version__ == runtime_cache.__version__
