"""Commands within a limit, and files that are not what they should be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.process_state import is_running
from tools.doctor.host import Host, Ran, run, this_host

#: Only a failing test takes so long [seconds].
PATIENCE_S = 60.0


def run_python(program: str) -> Ran:
    return run([sys.executable, "-c", program], PATIENCE_S, dict(os.environ))


def run_shell(script: str) -> Ran:
    """A shell is there at once, so that the limit can be short."""
    return run(["/bin/sh", "-c", script], 2.0, dict(os.environ))


def test_a_command_that_ends() -> None:
    ran = run_python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert ran == Ran(3, "out\n", "err\n")


def test_a_command_that_crashes() -> None:
    assert run_python("import os; os.kill(os.getpid(), 11)").code == -11


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run(["/no/such/command"], PATIENCE_S, {})


def test_a_command_that_hangs_is_ended_with_all_it_started() -> None:
    """What it started holds the pipes too; the answer so far is kept."""
    ran = run_shell("sleep 600 & echo $!; sleep 600")
    assert ran.code is None
    pid = int(ran.out)
    for _ in range(1000):
        if not is_running(pid):
            break
        os.sched_yield()
    assert not is_running(pid)


def test_what_is_left_behind_does_not_hold_the_answer_up() -> None:
    """A command that ends, but leaves a child with its pipes: its answer is not complete."""
    ran = run_shell("sleep 600 & echo done")
    assert (ran.code, ran.out) == (None, "done\n")


def test_a_command_that_says_too_much_is_ended() -> None:
    ran = run_python("while True: print('x' * 1000)")
    assert (ran.code, ran.is_flood) == (None, True)
    assert 1 << 20 < len(ran.out) < 1 << 22


def test_bytes_that_are_no_text() -> None:
    program = "import sys; sys.stdout.buffer.write(b'a\\xff\\n')"
    assert run_python(program).out == "a\N{REPLACEMENT CHARACTER}\n"


def test_nothing_is_read_from_the_terminal() -> None:
    assert run_python("import sys; print(repr(sys.stdin.read()))").out == "''\n"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text").write_bytes(b"a\xffb")
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    host = Host(root=tmp_path)
    for name in ("pipe", "directory", "loop", "none"):
        assert host.read(f"/{name}") is None
    assert host.read("/text") == "a\N{REPLACEMENT CHARACTER}b"
    assert host.read("/large") == "x" * (1 << 20)
    assert host.names_in("/text") == []
    assert not host.is_dir("/loop")
    assert not host.exists("/loop")
    assert Host().read("/dev/zero") is None


def test_paths_lie_under_the_root(tmp_path: Path) -> None:
    host = Host(root=tmp_path, cwd="/home/x", env={"PATH": "/a::/b"})
    assert host.at("/etc/group") == tmp_path / "etc/group"
    assert host.at("file") == tmp_path / "home/x/file"
    assert host.paths("PATH") == ["/a", "/b"]
    assert host.paths("LD_LIBRARY_PATH") == []


def test_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = this_host()
    assert host.cwd == os.getcwd()
    assert host.python == sys.version_info[:3]
    assert host.groups
    assert host.env["PATH"] == os.environ["PATH"]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    assert this_host().cwd == str(gone)
