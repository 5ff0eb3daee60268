"""`rtcache-convert` as a process: what it refuses, what it leaves, and which compiler it calls."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from om_models.bundle import load_bundle
from tests.support.rtcached import (
    PATIENCE_S,
    Ended,
    background,
    reading,
    run,
    wait_for_input,
)
from tests.support.tiny import tiny_spec, write_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf

#: What the shell of somebody who has sourced a CANN would say.
NO_CANN = {"ASCEND_HOME_PATH": "", "ASCEND_TOOLKIT_HOME": ""}
SMALL = ("--kv-tokens", "256", "--gears", "prefill=8@32,64 decode=1,2@32,64")

#: Stands for CANN's atc: notes its arguments and writes an empty model.
ATC = """\
#!/bin/sh
printf '%s\\n' "$@" > "$ATC_NOTES"
for word in "$@"; do
  case "$word" in --output=*) : > "${word#--output=}.om" ;; esac
done
"""
#: Says where it runs, then never ends.
SLOW_ATC = '#!/bin/sh\necho $$ > "$ATC_NOTES"\nexec sleep 600\n'
#: Waits for a child, as CANN's script does; both hold the notes open as long as they live.
ATC_WITH_CHILD = '#!/bin/sh\nexec > "$ATC_NOTES"\nsleep 600 &\necho compiling\nwait\n'


def convert(*words: str, **env: str) -> Ended:
    return run("tools.convert_model", *words, env=env)


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def wait_until_ended(process_id: int) -> None:
    """Killed processes are gone a little later, or stay as zombies until somebody asks."""
    give_up_s = time.monotonic() + PATIENCE_S
    status = Path(f"/proc/{process_id}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < give_up_s, f"process {process_id} still runs"


def options(words: list[str]) -> dict[str, str]:
    """`--name=value` words."""
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def put_on_path(directory: Path, script: str) -> dict[str, str]:
    """An `atc` and an environment in which it is found, of no known CANN."""
    directory.mkdir()
    (directory / "atc").write_text(script)
    (directory / "atc").chmod(0o755)
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "ATC_NOTES": str(directory / "notes"), **NO_CANN}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", tiny_spec())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """In a directory of its own, to see what else is written there."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


def test_a_summary_as_json(gguf: Path, output: Path):
    ended = convert(str(gguf), "--output", str(output), "--json", *SMALL)
    assert ended.code == 0
    summary = json.loads(ended.out)
    manifest = load_bundle(output).manifest
    assert (summary["output"], summary["digest"]) == (str(output), manifest.digest)
    assert summary["files"] == {name: file.num_bytes for name, file in manifest.files.items()}
    assert left_in(output.parent) == ["bundle"]
    assert max(map(len, ended.complaint.splitlines())) <= max(80, len(f"bundle: {output}"))


def test_the_help_fits_a_terminal():
    ended = convert("--help")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80


# --- what is refused ------------------------------------------------------------------------------


def truncated_gguf(directory: Path) -> Path:
    path = write_tiny_gguf(directory / "whole.gguf", tiny_spec())
    cut = directory / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-1])
    return cut


def no_gguf(directory: Path) -> Path:
    path = directory / "letter.gguf"
    path.write_text("Dear Sir or Madam")
    return path


def other_architecture(directory: Path) -> Path:
    return write_tiny_gguf(directory / "falcon.gguf", tiny_spec(), architecture="falcon")


def other_architecture_in_json(directory: Path) -> Path:
    path = write_checkpoint(directory / "bert")
    config = json.loads((path / "config.json").read_text())
    changed = config | {"architectures": ["BertModel"], "model_type": "bert"}
    (path / "config.json").write_text(json.dumps(changed))
    return path


def empty_directory(directory: Path) -> Path:
    (directory / "empty").mkdir()
    return directory / "empty"


def nothing(directory: Path) -> Path:
    return directory / "nothing"


def a_text_file(directory: Path) -> Path:
    path = directory / "notes.txt"
    path.write_text("not a model")
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (truncated_gguf, "is truncated"),
        (no_gguf, "is not a GGUF file or is truncated"),
        (other_architecture, "falcon"),
        (other_architecture_in_json, "bert"),
        (empty_directory, "config.json"),
        (nothing, "nothing"),
        (a_text_file, "notes.txt"),
    ],
)
def test_sources_that_are_no_model(
    tmp_path: Path, output: Path, make: Callable[[Path], Path], reason: str
):
    source = make(tmp_path)
    ended = convert(str(source), "--output", str(output), *SMALL)
    assert (ended.code, ended.out) == (1, "")
    last = ended.complaint.splitlines()[-1]
    assert last.startswith("rtcache-convert: ")
    assert str(source) in last
    assert reason.lower() in last.lower()
    assert left_in(output.parent) == []


def test_a_directory_with_something_else_is_left_alone(gguf: Path, output: Path):
    output.mkdir()
    (output / "thesis.tex").write_text("precious")
    ended = convert(str(gguf), "--output", str(output), *SMALL)
    assert ended.code == 1
    assert ended.complaint.splitlines()[-1] == (
        f"rtcache-convert: {output} exists and holds no manifest.json; it is not overwritten"
    )
    assert left_in(output.parent) == ["bundle"]
    assert (output / "thesis.tex").read_text() == "precious"


# --- the compiler ---------------------------------------------------------------------------------


def test_export_here_compile_there(gguf: Path, output: Path):
    export = output.parent / "export"
    first = convert(str(gguf), "--output", str(export), "--export-only", "--json", *SMALL)
    assert (first.code, left_in(output.parent)) == (0, ["export"])
    second = convert(str(export), "--output", str(output), "--from-export", "--json")
    assert (second.code, left_in(output.parent)) == (0, ["bundle", "export"])
    assert json.loads(first.out)["digest"] == json.loads(second.out)["digest"]
    assert load_bundle(output).manifest.kv.num_slots == 256


def test_atc_gets_the_command_line_of_the_export(gguf: Path, output: Path, tmp_path: Path):
    flags = ("--target", "ascend", "--soc-version", "Ascend310P3", "--no-python-check", *SMALL)
    env = put_on_path(tmp_path / "cann", ATC)
    ended = convert(str(gguf), "--output", str(output), *flags, **env)
    assert (ended.code, left_in(output)) == (0, ["manifest.json", "model.om", "tokenizer.json"])
    assert load_bundle(output).manifest.target == "ascend"
    noted = dict(
        word[2:].split("=", 1) for word in Path(env["ATC_NOTES"]).read_text().split("\n")[:-1]
    )
    export = tmp_path / "export"
    assert convert(str(gguf), "--output", str(export), "--export-only", *flags).code == 0
    (line,) = [s for s in (export / "atc.sh").read_text().splitlines() if s.startswith("atc ")]
    wanted = options(shlex.split(line)[1:])
    assert noted.pop("model").endswith("/export/model.onnx")
    assert noted.pop("output").endswith("/model")
    assert (wanted.pop("model"), wanted.pop("output")) == ("model.onnx", "model")
    assert noted == wanted
    assert (noted["framework"], noted["soc_version"]) == ("5", "Ascend310P3")
    assert len(noted["dynamic_dims"].split(";")) == 6


def test_an_ended_compiler_takes_its_children_with_it(gguf: Path, output: Path, tmp_path: Path):
    env = put_on_path(tmp_path / "cann", ATC_WITH_CHILD)
    os.mkfifo(env["ATC_NOTES"])
    (tmp_path / "tmp").mkdir()
    with (
        started(gguf, output, {**env, "TMPDIR": str(tmp_path / "tmp")}) as process,
        reading(Path(env["ATC_NOTES"])) as notes,
    ):
        assert notes.readline() == "compiling\n"
        process.terminate()
        wait_for_input(notes)
        assert notes.read() == "", "ends when the last one that holds it is gone"
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert not output.exists()
    assert left_in(tmp_path / "tmp") == []


def test_what_a_killed_run_left_goes_with_the_next(gguf: Path, output: Path, tmp_path: Path):
    env = put_on_path(tmp_path / "cann", SLOW_ATC)
    os.mkfifo(env["ATC_NOTES"])
    with started(gguf, output, env) as process:
        with reading(Path(env["ATC_NOTES"])) as notes:
            compiler = int(notes.read())
        convert("null", "--output", str(output), *SMALL)
        left = left_in(output.parent)
        assert sum(name.startswith(".bundle.work-") for name in left) == 1
        assert [name[:8] for name in left] == [".bundle.", ".bundle.", "bundle"]
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    os.kill(compiler, signal.SIGKILL)
    assert left_in(output.parent) == left
    assert convert("null", "--output", str(output), *SMALL).code == 0
    assert left_in(output.parent) == ["bundle"]


@contextmanager
def started(source: Path, output: Path, env: dict[str, str]) -> Iterator[Popen[str]]:
    """A conversion for a card, in the background."""
    flags = ("--target", "ascend", "--soc-version", "Ascend310P3", "--no-python-check", *SMALL)
    command = ("tools.convert_model", str(source), "--output", str(output), *flags)
    with background(*command, env=env) as process:
        yield process


def test_an_interrupted_compiler_is_ended(gguf: Path, output: Path, tmp_path: Path):
    env = put_on_path(tmp_path / "cann", SLOW_ATC)
    os.mkfifo(env["ATC_NOTES"])
    with started(gguf, output, env) as process:
        with reading(Path(env["ATC_NOTES"])) as notes:
            compiler = int(notes.read())  # as soon as the compiler runs
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted; nothing was changed\nkept: the export in " in said
    wait_until_ended(compiler)
