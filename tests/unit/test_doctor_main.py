"""The command line of the doctor; `tests/process/test_doctor.py` runs it as a process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.real_om import ATTRIBUTES, RealOm, write_real_om
from tools.doctor import main as command
from tools.doctor import om_file
from tools.doctor.examine import Examined, Request
from tools.doctor.findings import Finding, ok, problem, warning
from tools.doctor.host import Host, run


@pytest.mark.parametrize(
    "arguments", [["--no-such"], ["om"], ["om", "a", "b"], ["--device"], ["stray"], ["om", "--x"]]
)
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: rtcache-doctor" in err


@pytest.mark.parametrize("arguments", [["--help"], ["om", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert arguments[0] == "om" or "2 wrong command line" in out


@pytest.mark.parametrize(
    ("findings", "code"),
    [([ok("a", "")], 0), ([warning("a", "")], 0), ([ok("a", ""), problem("b", "", "")], 1)],
)
def test_the_exit_code(
    findings: list[Finding],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Request] = []

    def examine(host: Host, request: Request) -> Examined:
        asked.append(request)
        return Examined("npu:3", findings)

    monkeypatch.setattr(command, "examine", examine)
    words = ["--device", "npu:3", "--bundle", "b", "--config", "c", "--checksums", "--no-probe"]
    assert command.main([*words, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["device"] == "npu:3"
    assert command.main([]) == code
    assert "this host, for npu:3" in capsys.readouterr().out
    assert asked == [
        Request("npu:3", Path("b"), "c", has_checksums=True, may_probe=False),
        Request(),
    ]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_bytes(b""), "is no .om: it starts with nothing"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: None, "No such file or directory"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"IMOD" + bytes(300)), "is damaged: its header says"),
    ],
)
def test_om_that_is_none(
    tmp_path: Path,
    make: Callable[[Path], object],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "m.om"
    make(path)
    assert command.main(["om", str(path), "--json"]) == 1
    out, err = capsys.readouterr()
    assert why in err
    assert why in json.loads(out)["error"]
    assert command.main(["om", str(path)]) == 1
    assert capsys.readouterr().out == ""


def test_om_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(om_file, "read_om_header", refuse)
    assert command.main(["om", str(tmp_path / "m.om")]) == 1
    assert "Permission denied" in capsys.readouterr().err


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_real_om(tmp_path / os.fsdecode(b"\xff.om"))
    assert command.main(["om", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == f"{tmp_path}/?.om"
    assert command.main(["om", str(path)]) == 0
    path.unlink()
    assert command.main(["om", str(path), "--json"]) == 1


def test_who_waits_is_told_for_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command._host().runner is run
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    host = command._host()
    assert host.run(["/bin/true"], 20.0).code == 0
    assert capsys.readouterr().err == "waiting for pyACL, at most 20 s\r\x1b[K"
    with pytest.raises(FileNotFoundError):
        host.run(["/none/npu-smi", "info"], 0.5)
    assert capsys.readouterr().err == "waiting for npu-smi, at most 0.5 s\r\x1b[K"


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not command._has_colours()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert command._has_colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not command._has_colours()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("PROGRAM --device sim:0 >/dev/full", 1, "rtcache-doctor: No space left on device\n"),
        ("PROGRAM --device sim:0 >&-", 0, ""),
        ("PROGRAM --bundle b\u00fcndel | cat", 0, ""),
        ("PROGRAM --device sim:0 | true", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_or_not_all(command: str, code: int, said: str) -> None:
    program = f"{shlex.quote(sys.executable)} -m tools.doctor.main"
    ran = subprocess.run(
        ["/bin/sh", "-c", command.replace("PROGRAM", program)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (code, said)


def test_om(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_real_om(tmp_path / "m.om")
    assert command.main(["om", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{path}:", "IR model, compiled for Ascend310B4 by ATC 7.6.0.1.220"]
    assert not any("--json" in line for line in lines)


def test_om_with_a_hundred_gears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gears = ";".join(f"1,{number},{number},2048" for number in range(100))
    words = f'atc --framework=5 --dynamic_dims="{gears}" --soc_version=Ascend310B4'
    om = RealOm(attributes={**ATTRIBUTES, "atc_cmdline": words})
    path = write_real_om(tmp_path / "m.om", om)
    assert command.main(["om", str(path)]) == 0
    said = capsys.readouterr().out
    first, *lines = said.splitlines()
    assert first == f"{path}:"
    assert max(map(len, lines)) <= 80
    assert lines[-4:] == [
        "command: atc --framework=5",
        f'--dynamic_dims="{gears}'[:77] + "...",
        "--soc_version=Ascend310B4",
        "What ends in ... is longer: --json has all of it.",
    ]
    assert command.main(["om", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["atc_command"] == words
