"""`python -m runtime_cache.aclsim run`: a program runs as Python runs it, and is reported on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from runtime_cache.aclsim import run
from runtime_cache.aclsim.__main__ import main

ROOT = Path(__file__).parents[2]
WELL = "software device (Ascend310P3): 0 calls, and nothing that a card would not forgive\n"
#: Sets a device and leaves it so.
UNTIDY = "import acl\nacl.init()\nacl.rt.set_device(0)\n"
LEFT = (
    "software device (Ascend310P3): 2 calls; what a card would not forgive, or not quickly:\n"
    "  teardown_order: device 0 was set once more than it was reset\n"
    "  teardown_order: acl.finalize was not called; it must be before the exit\n"
)


class Programs:
    """Writes programs and runs them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "program.py"

    def __call__(
        self,
        source: str,
        *args: str,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        self.path.write_text(textwrap.dedent(source))
        plain = {k: v for k, v in os.environ.items() if not k.startswith("RTCACHE_")}
        return subprocess.run(
            [sys.executable, "-m", "runtime_cache.aclsim", "run", *flags, str(self.path), *args],
            cwd=ROOT,
            env=plain | (env or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_the_program_is_main_and_acl_is_what_it_imports(programs: Programs) -> None:
    (programs.path.parent / "beside.py").write_text("VALUE = 7\n")
    done = programs(
        """
        import json, sys
        import acl, acl.rt
        from acl.mdl import load_from_file
        import beside
        print(json.dumps({
            "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
            "main": sys.modules["__main__"].beside is beside, "beside": beside.VALUE,
            "acl": [acl.__name__, acl.rt.__name__],
            "same": load_from_file is acl.mdl.load_from_file,
            "constants": [n for n in dir(acl) + dir(acl.rt) if n.isupper()],
            "public": [n for n in dir(acl) if n[0] != "_"],
        }))
        """,
        "one",
        "--two",
    )
    assert (done.returncode, done.stderr) == (0, WELL)
    found: dict[str, Any] = json.loads(done.stdout)
    public = set(found.pop("public"))
    assert found == {
        "name": "__main__",
        "file": str(programs.path),
        "argv": [str(programs.path), "one", "--two"],
        "path": str(programs.path.parent),
        "main": True,
        "beside": 7,
        "acl": ["acl", "acl.rt"],
        "same": True,
        "constants": [],
    }
    assert {"init", "rt", "mdl", "util", "op", "media"} <= public
    assert not {"settings", "faults", "inspect", "ledger"} & public


@pytest.mark.parametrize(
    ("source", "code", "complaint"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('in words')", 1, "in words\n"),
        (
            "def f():\n    raise ValueError('x')\nf()",
            1,
            'Traceback (most recent call last):\n  File "{path}", line 3, in <module>\n    f()\n'
            "  File \"{path}\", line 2, in f\n    raise ValueError('x')\nValueError: x\n",
        ),
        ("def f(:", 1, '  File "{path}", line 1\n    def f(:\n          ^\nSyntaxError: invalid'),
    ],
)
def test_it_ends_as_python_lets_it_end(
    programs: Programs, source: str, code: int, complaint: str
) -> None:
    done = programs(source)
    assert done.returncode == code
    assert done.stderr.startswith(complaint.format(path=programs.path))
    assert done.stderr.endswith(WELL)


def test_ctrl_c_ends_it_by_the_signal(programs: Programs) -> None:
    interrupt = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = programs(UNTIDY + interrupt)
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt\n" in done.stderr
    assert done.stderr.endswith(LEFT)


def test_the_report_waits_for_threads_exit_handlers_and_destructors(programs: Programs) -> None:
    done = programs(
        """
        import atexit, threading
        from concurrent.futures import ThreadPoolExecutor
        import acl

        class Holder:
            def __init__(self):
                acl.init()
                acl.rt.set_device(0)
                self.context = acl.rt.get_context()[0]
                self.stream = acl.rt.create_stream()[0]

            def __del__(self):
                print("destructor", acl.rt.reset_device(0), acl.finalize())

        def late():
            started.wait()
            acl.rt.set_context(holder.context)
            print("thread", acl.rt.destroy_stream(holder.stream))

        started = threading.Event()
        holder = Holder()
        pool = ThreadPoolExecutor(1)
        pool.submit(print, "pool").result()
        atexit.register(lambda: print("handler", holder.stream != 0))
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        threading.Thread(target=late).start()
        started.set()
        """
    )
    assert done.returncode == 0
    assert done.stdout.split("\n") == [
        "pool",
        "thread 0",
        "handler True",
        "destructor 0 0",
        "",
    ]
    assert done.stderr.endswith("and nothing that a card would not forgive\n")


def test_modules_beside_the_program_let_go_of_what_they_hold_too(programs: Programs) -> None:
    """Wherever the program has gone meanwhile; libraries below it stay."""
    library = programs.path.parent / "env" / "site-packages"
    library.mkdir(parents=True)
    source = """
import os
class Says:
    def __del__(self, write=os.write, name=__name__):
        write(2, name.encode() + b"\\n")
says = Says()
"""
    (programs.path.parent / "beside.py").write_text(source)
    (library / "installed.py").write_text(source)
    done = programs(
        f"""
        import os, sys
        os.chdir("/")
        sys.path.append({str(library)!r})
        import beside, installed
        """
    )
    assert done.returncode == 0
    assert done.stderr == f"beside\n{WELL}installed\n"


def test_threads_that_do_not_end_can_be_interrupted(programs: Programs) -> None:
    done = programs(
        """
        import os, signal, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)
        never = threading.Event()
        def waits():
            while threading.main_thread().is_alive():
                never.wait(0.001)
            os.kill(os.getpid(), signal.SIGINT)  # the main thread waits for this one now
            never.wait()
        threading.Thread(target=waits).start()
        """
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith(WELL)


def test_the_report_comes_whatever_the_program_did_with_its_streams(programs: Programs) -> None:
    done = programs(
        """
        import io, sys
        sys.stderr = io.StringIO()
        print("said")
        sys.stdout.close()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", WELL)


def test_the_report_comes_without_a_standard_output(programs: Programs) -> None:
    done = programs("import sys; sys.stdout = None")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", WELL)


def test_processes_that_it_starts_find_the_same_acl(programs: Programs) -> None:
    done = programs(
        """
        import multiprocessing, subprocess, sys

        def ask(number):
            import acl, acl.rt
            acl.init()
            acl.rt.set_device(0)
            print(number, acl.get_soc_name(), acl.rt.get_mem_info(0)[1], acl.__name__, flush=True)

        if __name__ == "__main__":
            for number, method in enumerate(["spawn", "fork"]):
                process = multiprocessing.get_context(method).Process(target=ask, args=(number,))
                process.start()
                process.join()
            source = "import acl.rt; from acl import init; print(2, init(), acl.rt.__name__)"
            subprocess.run([sys.executable, "-c", source], check=True)
        """,
        flags=("--soc", "Ascend310B4", "--memory", "1GiB", "--misuse", "error"),
    )
    assert done.stdout.splitlines() == [
        "0 Ascend310B4 1073741824 acl",
        "1 Ascend310B4 1073741824 acl",
        "2 0 acl.rt",
    ]
    # The program itself has called nothing.
    assert done.stderr == WELL.replace("310P3", "310B4")
    assert done.returncode == 0


def test_a_forked_child_does_not_report(programs: Programs) -> None:
    done = programs(
        """
        import os, sys
        pid = os.fork()
        if pid == 0:
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert (done.stdout, done.stderr) == ("5\n", WELL)


@pytest.mark.parametrize(
    ("action", "source", "code"),
    [
        ("report", UNTIDY, 0),
        ("warn", UNTIDY, 0),
        ("error", UNTIDY, 1),
        ("error", UNTIDY + "raise SystemExit(3)\n", 3),
        ("error", "", 0),
    ],
)
def test_misuse_can_be_an_error(programs: Programs, action: str, source: str, code: int) -> None:
    done = programs(source, flags=("--misuse", action))
    assert (done.returncode, done.stderr) == (code, LEFT if source else WELL)


def test_a_misuse_can_be_told_when_it_happens(programs: Programs) -> None:
    source = UNTIDY + "acl.rt.malloc(0, 0)\nimport sys; sys.stderr.write('after\\n')\n"
    done = programs(source, flags=("--misuse=warn",))
    first, second, *_ = done.stderr.splitlines()
    assert first == "bad_call: acl.rt.malloc -> 100000: size is 0"
    assert second == "after"


def test_the_report_as_json(programs: Programs) -> None:
    source = UNTIDY + "import sys; sys.exit(4)"
    done = programs(source, flags=("--json", "--soc", "Ascend310B4", "--misuse", "error"))
    assert json.loads(done.stderr) == {
        "program": str(programs.path),
        "exit_code": 4,
        "soc": "Ascend310B4",
        "form": "board",
        "calls": {"acl.init": 1, "acl.rt.set_device": 1},
        "misuses": [
            {
                "kind": "teardown_order",
                "sentence": "device 0 was set once more than it was reset",
            },
            {
                "kind": "teardown_order",
                "sentence": "acl.finalize was not called; it must be before the exit",
            },
        ],
    }


def test_soc_memory_and_faults_are_chosen_on_the_command_line(
    programs: Programs, tmp_path: Path
) -> None:
    script = tmp_path / "faults.json"
    script.write_text('{"faults": [{"function": "acl.rt.malloc", "call": 2, "code": 207001}]}')
    flags = ("--soc", "Ascend910B4", "--memory", "2GiB", "--faults", str(script))
    source = UNTIDY + (
        "print(acl.get_soc_name(), acl.rt.get_run_mode(), acl.rt.get_mem_info(1)[1:])\n"
        "print([acl.rt.malloc(64, 0)[1] for _ in range(3)])\n"
    )
    environment = {"RTCACHE_ACLSIM_SOC_NAME": "Ascend310B4", "RTCACHE_ACLSIM_RUN_MODE": "0"}
    done = programs(source, flags=flags, env=environment)
    assert done.stdout == "Ascend910B4 (0, 0) (2147483648, 0)\n[0, 207001, 0]\n"


def test_a_family_that_is_not_there_says_so(programs: Programs) -> None:
    done = programs("import acl\nfrom acl.op import set_model_dir\nset_model_dir('x')\n")
    assert done.returncode == 1
    assert "NotImplementedError: acl.op.set_model_dir is not in the software device" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "none.py"], "run: [Errno 2] No such file or directory: 'none.py'"),
        (["run", "--soc", "Ascend1", "x.py"], "run: SoC 'Ascend1' is unknown; known: Ascend310B1"),
        (["run", "--memory", "much", "x.py"], 'run: "much" is not a size'),
        (["run", "--memory", "1MiB", "x.py"], "run: memory_bytes 1048576 must exceed"),
        (["run", "--faults", "/none.json", "x.py"], "run: fault script /none.json: "),
        (["walk"], "usage: python -m runtime_cache.aclsim run"),
        ([], "usage: python -m runtime_cache.aclsim run"),
    ],
)
def test_what_cannot_be_started_is_said(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(complaint)


@pytest.mark.parametrize("arguments", [["run", "--help"], ["--help"], ["-h"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse
        code = int(str(ended.code))
    out = capsys.readouterr().out
    assert code == 0
    assert "python -m runtime_cache.aclsim run" in out
    assert arguments[0] != "run" or "example:\n  python -m runtime_cache.aclsim run --soc" in out


def test_arguments_of_the_program_are_its_own() -> None:
    parsed = run._parse(["--json", "p.py", "--json", "-h", "--soc", "x"])
    assert (parsed.program, parsed.args) == ("p.py", ["--json", "-h", "--soc", "x"])
