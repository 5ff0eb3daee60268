"""Which compiler is started, in which environment, and what is told of a run that fails."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from om_models import cann
from om_models.atc_log import AtcLog
from om_models.atc_table import Release
from om_models.compiler import (
    Compiler,
    CompilerOptions,
    find_compiled,
    find_compiler,
    run_atc,
)
from om_models.manifest import Gear, OmFile
from runtime_cache.errors import ConversionError
from tests.support.cann_tree import CannTree

OM = OmFile(path="model.om", prefill=(Gear(1, 16, 64),), decode=(Gear(1, 1, 64),))


@pytest.fixture
def tree(tmp_path: Path) -> CannTree:
    return CannTree(tmp_path / "usr")


def silent() -> AtcLog:
    return AtcLog(lambda done, total: None, lambda part: None)


def run_fake(directory: Path, script: str) -> list[str]:
    """Run a shell script in ATC's place; returns the lines it printed."""
    program = directory / "atc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    log = silent()
    run_atc(Compiler((str(program),), None, None, "fake"), ["--model=a b"], directory, log)
    return list(log.lines)


def failure(directory: Path, script: str) -> list[str]:
    """The lines of the message when the script fails."""
    with pytest.raises(ConversionError) as caught:
        run_fake(directory, script)
    return caught.value.message.splitlines()


# --- which one ------------------------------------------------------------------------------------


def test_compiler_of_the_software_device():
    compiler = find_compiler("sim", CompilerOptions(cann=Path("/nowhere")))
    assert compiler.command == (sys.executable, "-m", "runtime_cache.aclsim", "atc")
    assert (compiler.environment, compiler.release) == (None, None)


def test_a_missing_atc_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cann, "WELL_KNOWN", ())
    for name in cann.HOME_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConversionError, match=r"source set_env\.sh of CANN .* use --export-only"):
        find_compiler("ascend")


def test_the_users_cann(tree: CannTree):
    compiler = find_compiler("ascend", CompilerOptions(cann=tree.home))
    assert compiler.command == (str(tree.home / "bin" / "atc"),)
    assert (compiler.release, compiler.notes) == (Release(8, 1), ())
    assert compiler.name == f"CANN 8.1.RC1, {tree.home}"
    assert compiler.environment is not None
    assert compiler.environment["ASCEND_SLOG_PRINT_TO_STDOUT"] == "1"
    assert "TE_PARALLEL_COMPILER" not in compiler.environment


def test_few_jobs_for_a_small_board(tree: CannTree):
    found = find_compiler("ascend", CompilerOptions(cann=tree.home, jobs=1)).environment
    assert found is not None
    assert (found["TE_PARALLEL_COMPILER"], found["MAX_COMPILE_CORE_NUMBER"]) == ("1", "1")


def test_the_user_knows_the_release_better(tree: CannTree):
    options = CompilerOptions(cann=tree.home, release=Release(9, 0))
    assert find_compiler("ascend", options).release == Release(9, 0)


def test_a_python_that_lacks_something_can_be_passed_over(tree: CannTree):
    shutil.rmtree(tree.modules / "sympy")
    with pytest.raises(ConversionError, match="which lacks: sympy"):
        find_compiler("ascend", CompilerOptions(cann=tree.home))
    find_compiler("ascend", CompilerOptions(cann=tree.home, checks_python=False))


def test_a_release_that_nobody_knows_is_noted(tree: CannTree):
    (tree.home / "aarch64-linux" / "ascend_toolkit_install.info").unlink()
    compiler = find_compiler("ascend", CompilerOptions(cann=tree.home))
    assert compiler.release is None
    assert "--cann-release" in compiler.notes[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [(None, "~/ascend/log/debug/plog"), ("/var/log/npu", "/var/log/npu/debug/plog")],
)
def test_where_its_log_lies(path: str | None, expected: str):
    environment = {} if path is None else {"ASCEND_PROCESS_LOG_PATH": path}
    assert Compiler((), environment, None, "").log_directory == expected


# --- running it -----------------------------------------------------------------------------------


def test_it_runs_in_a_directory_that_is_removed(tmp_path: Path):
    lines = run_fake(tmp_path, 'echo "args: $*"; pwd; touch kernel_meta')
    assert lines[0] == "args: --model=a b"
    assert not (Path.cwd() / "kernel_meta").exists()
    assert not Path(lines[1]).exists(), "the compiler's litter is removed"


def test_a_failing_compiler_is_quoted(tmp_path: Path):
    script = "for i in $(seq 30); do echo line $i; done; echo E10036: 101 gears >&2; exit 3"
    shown = failure(tmp_path, script)
    assert shown[:2] == ["atc failed with exit code 3:", "line 17"]
    assert shown[15:] == [
        "E10036: 101 gears",
        "what this means:",
        "- E10036: --dynamic_dims has more than 100 gears. Next: choose fewer: --gears small",
    ]


def test_without_a_code_nothing_is_explained(tmp_path: Path):
    assert failure(tmp_path, "echo sorry; exit 1") == ["atc failed with exit code 1:", "sorry"]


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 137"])
def test_killed_for_want_of_memory(tmp_path: Path, script: str):
    assert failure(tmp_path, script) == [
        "atc was ended by SIGKILL; a host that runs out of memory ends programs so: --compile-jobs"
        " 1 needs the least:"
    ]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_died_of_a_signal(tmp_path: Path, number: signal.Signals):
    assert failure(tmp_path, f"kill -{number.value} $$") == [f"atc was ended by {number.name}:"]


def test_lines_come_whole_however_they_are_written(tmp_path: Path):
    script = "printf 'one\\rtwo\\r\\nth\\303'; printf '\\251\\n'; printf '%8192s|\\nno end' x"
    one, two, three, *pieces, last = run_fake(tmp_path, script)
    assert (one, two, three, last) == ("one", "two", "thé", "no end")
    assert "".join(pieces).strip() == "x|"


def test_workers_that_outlive_it_are_ended(tmp_path: Path):
    # The worker holds the output open: until it has ended, the run would not.
    assert run_fake(tmp_path, "echo begun; sleep 300 &") == ["begun"]


def test_an_interrupt_that_wakes_nobody_is_heeded(tmp_path: Path):
    """One that comes just before a thread goes to sleep does not wake it; nor does this one."""
    os.mkfifo(tmp_path / "told")

    def interrupt() -> None:
        (tmp_path / "told").read_text()  # as soon as the compiler runs
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            run_fake(tmp_path, f"echo > '{tmp_path}/told'; exec sleep 300")
        sender.join()
    finally:
        signal.signal(signal.SIGINT, before)


def test_output_without_end_or_sense_is_no_message(tmp_path: Path):
    binary = "head -c 50000 /dev/zero; printf '\\033[31mE10036\\377\\033[0m: 101\\a'; exit 3"
    shown = failure(tmp_path, f"printf '%50000s' x; echo; {binary}")
    assert "E10036: 101" in shown
    assert "- E10036: --dynamic_dims has more than 100 gears. Next:" in shown[-1]
    assert max(map(len, shown)) <= 4096
    assert "" not in shown


def test_a_program_that_cannot_be_started(tmp_path: Path):
    (tmp_path / "atc").write_text("no program")
    compiler = Compiler((str(tmp_path / "atc"),), None, None, "")
    with pytest.raises(ConversionError, match="cannot be started: Permission denied"):
        run_atc(compiler, [], tmp_path, silent())


def test_the_software_compiler_refuses_what_atc_refuses(tmp_path: Path):
    with pytest.raises(ConversionError, match=r"E10007"):
        run_atc(find_compiler("sim"), ["--framework=5"], tmp_path, silent())
    assert list(tmp_path.iterdir()) == []


def test_what_atc_wrote_is_found(tmp_path: Path):
    assert find_compiled(tmp_path, OM) is None
    (tmp_path / "model_linux_aarch64.om").touch()
    assert find_compiled(tmp_path, OM) == tmp_path / "model_linux_aarch64.om"
    (tmp_path / "model_linux_x86_64.om").touch()
    with pytest.raises(ConversionError, match=r"several of model\.om: .*aarch64.*x86_64"):
        find_compiled(tmp_path, OM)
    (tmp_path / "model.om").touch()
    assert find_compiled(tmp_path, OM) == tmp_path / "model.om"
