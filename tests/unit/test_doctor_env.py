"""`rtcache-doctor env`: what a service gets of CANN, from scripts that really run."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runtime_cache.errors import ConfigError
from tests.support.ascend_host import DRIVER, HostMaker
from tests.support.cann_tree import CannTree
from tests.support.rtcached import run as run_module
from tools.doctor.host import Host, Ran, run
from tools.doctor.service_env import quoted, service_environment, write_whole


@pytest.fixture
def tree(tmp_path: Path) -> CannTree:
    tree = CannTree(tmp_path / "Ascend")
    (tree.modules / "acl.so").touch()
    for library in ("libascendcl.so", "libascend_hal.so"):
        (tree.home / "lib64").mkdir(exist_ok=True)
        (tree.home / "lib64" / library).touch()
    return tree


def host(**env: str) -> Host:
    return Host(env={"HOME": "/home/nobody", **env})


def test_what_the_script_sets(tree: CannTree) -> None:
    home = tree.home
    found = service_environment(host(ASCEND_TOOLKIT_HOME=str(home)))
    assert list(found.variables.items()) == [
        ("ASCEND_HOME_PATH", str(home)),
        ("ASCEND_OPP_PATH", f"{home}/opp"),
        ("ASCEND_TOOLKIT_HOME", str(home)),
        # The script leaves an empty part at the end, which would be the working directory.
        ("LD_LIBRARY_PATH", f"{home}/lib64"),
        ("PYTHONPATH", f"{home}/python/site-packages"),
    ]
    assert found.notes == ()
    first, *lines = found.text().splitlines()
    assert first == f"# Made by `rtcache-doctor env` from CANN 8.1.RC1 in {home}."
    assert lines == [f"{name}={value}" for name, value in found.variables.items()]


def test_the_same_host_gives_the_same_text_whatever_the_caller_has_set(tree: CannTree) -> None:
    texts = {
        service_environment(host(ASCEND_TOOLKIT_HOME=str(tree.home), **more)).text()
        for more in ({}, {"LD_LIBRARY_PATH": "/mine", "PYTHONPATH": "/mine", "ASCEND_X": "1"})
    }
    assert len(texts) == 1


def test_a_named_directory_wins(tree: CannTree, tmp_path: Path) -> None:
    other = CannTree(tmp_path / "other", layout="8.5", release="8.5.0")
    found = service_environment(host(ASCEND_HOME_PATH=str(tree.home)), str(other.home))
    assert found.variables["ASCEND_HOME_PATH"] == str(other.home)


def test_a_relative_directory_is_made_absolute(
    tree: CannTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.home.parent)
    named = service_environment(host(), tree.home.name)
    assert named == service_environment(host(), str(tree.home))
    assert named.variables["LD_LIBRARY_PATH"] == f"{tree.home}/lib64"


def test_the_drivers_libraries_are_added(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    maker.add(f"{DRIVER}/lib64/common/libc_sec.so")
    asked: list[object] = []

    def answer(command: object, limit_s: float, env: object) -> Ran:
        asked.extend([command, env])
        return Ran(
            0, "LD_LIBRARY_PATH=/a::/b:.:c:/a\0PATH=/c\0BROKEN\0ASCEND_AICPU_PATH=/d e\0", ""
        )

    found = service_environment(replace(maker.host(), runner=answer))
    assert found.variables == {
        "ASCEND_AICPU_PATH": "/d e",
        "LD_LIBRARY_PATH": f"/a:/b:/usr/local/Ascend/ascend-toolkit/latest/lib64"
        f":{DRIVER}/lib64:{DRIVER}/lib64/common:{DRIVER}/lib64/driver",
    }
    assert found.driver is not None
    # Nothing of the caller's, nor of the user whom the service is not.
    assert asked[1].keys() == {"PATH", "HOME"}  # type: ignore[attr-defined]
    assert [note.partition(" holds ")[2].split()[0] for note in found.notes] == ["pyACL"]


def test_what_will_not_work_is_said(tree: CannTree) -> None:
    (tree.modules / "acl.so").unlink()
    shutil.rmtree(tree.home / "lib64")
    notes = service_environment(host(), str(tree.home)).notes
    assert [note.partition(" holds ")[2].split()[0].rstrip(":") for note in notes] == [
        "pyACL",
        "libascendcl.so",
        "libascend_hal.so",
    ]


def test_a_cann_in_a_home_directory_is_hidden_from_the_service(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    maker.add("/home/me/Ascend/set_env.sh")
    maker.add("/home/me/Ascend/latest/version.cfg")
    silent = replace(maker.host(), runner=lambda *_: Ran(0, "", ""))
    (note,) = (
        n for n in service_environment(silent, "/home/me/Ascend/latest").notes if "home" in n
    )
    assert note.startswith("/home/me/Ascend/latest lies in a home directory")


def test_no_cann(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    maker.remove("/usr/local/Ascend")
    maker.env["ASCEND_TOOLKIT_HOME"] = "/gone"
    with pytest.raises(ConfigError, match=r"^no CANN was found in /gone, /usr/local/Ascend/"):
        service_environment(maker.host())
    with pytest.raises(ConfigError, match=r"^/none is no directory"):
        service_environment(maker.host(), "/none")


def test_a_cann_without_its_script(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    maker.remove("/usr/local/Ascend/ascend-toolkit/set_env.sh")
    with pytest.raises(ConfigError, match=r"no set_env\.sh in or beside /usr/local/Ascend/ascend"):
        service_environment(maker.host())


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo trouble >&2; exit 3", r"set_env\.sh ended with exit code 3: trouble"),
        ("exit 4", r"set_env\.sh ended with exit code 4: it says nothing"),
        ('export ASCEND_X="a\nREADY=1"', r"sets ASCEND_X to 'a\\nREADY=1', which no line"),
    ],
)
def test_a_script_that_fails(tree: CannTree, script: str, sentence: str) -> None:
    tree.set_env.write_text(script)
    with pytest.raises(ConfigError, match=sentence):
        service_environment(host(), str(tree.home))


def test_a_script_that_does_not_end(tree: CannTree) -> None:
    tree.set_env.write_text("read line < /dev/zero")

    def in_a_moment(command: object, limit_s: float, env: object) -> Ran:
        return run(command, 0.1, env)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="did not end within 30 seconds: it says nothing"):
        service_environment(replace(host(), runner=in_a_moment), str(tree.home))


@pytest.mark.parametrize("value", ["", "/a:/b", "a b", 'a"b', "a\\b", "$HOME `id` $(id)", "#", "é"])
def test_a_shell_reads_what_is_written(value: str) -> None:
    script = f'V={quoted(value)}\nprintf %s "$V"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout == (
        value.encode()
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "cann.env"
    write_whole(path, "A=1\n")
    write_whole(path, "A=2\n")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("A=2\n", 0o644)
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "cann.env", "")
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["cann.env"]


def test_the_command(tree: CannTree, tmp_path: Path) -> None:
    path = tmp_path / "cann.env"
    command = ("tools.doctor.main", "env", "--cann", str(tree.home))
    shown, listed, written = (
        run_module(*command, *more) for more in ((), ("--json",), ("--output", str(path)))
    )
    assert (shown.code, listed.code, written.code) == (0, 0, 0)
    assert shown.out == path.read_text()
    assert json.loads(listed.out)["PYTHONPATH"] == f"{tree.home}/python/site-packages"
    assert (written.out, written.complaint) == ("", "")
    refused = run_module("tools.doctor.main", "env", "--cann", str(tmp_path / "none"))
    assert (refused.code, refused.out) == (1, "")
    assert refused.complaint.endswith("is no directory: name the one that holds CANN")
