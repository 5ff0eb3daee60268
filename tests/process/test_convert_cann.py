"""`rtcache-convert` with a CANN: which environment its `atc` gets, what a failure leaves and says,
and how the next call goes on. The CANN is fabricated (`tests.support.cann_tree`)."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from om_models import cann
from om_models.bundle import load_bundle
from om_models.compiling import Compilation
from om_models.work_directory import kept_for
from tests.support.cann_tree import CannTree
from tests.support.rtcached import PATIENCE_S, background, reading
from tests.support.tiny import write_checkpoint
from tools.convert_model import main

GEARS = ("--kv-tokens", "256", "--gears", "prefill=8@32,64 decode=1,2@32,64")
CARD = ("--target", "ascend", "--soc-version", "Ascend310P3", "--layout", "split", *GEARS)
#: An old ATC's last words for a kernel that does not fit.
E20001 = "E20001: [PID: 7] 2025-03-18-09:02:18.501.341 Failed to compile Op [StridedSliceD]."


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CannTree:
    """The only CANN there is, sourced by the shell."""
    made = CannTree(tmp_path / "usr")
    monkeypatch.setattr(cann, "WELL_KNOWN", ())
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(made.home))
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """In a directory of its own, to see what else is written there."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


def convert(source: Path, output: Path, *more: str) -> int:
    return main([str(source), "--output", str(output), *CARD, *more])


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# --- the environment ------------------------------------------------------------------------------


def test_atc_runs_in_the_environment_of_set_env(
    tree: CannTree, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("PATH", f"/venv/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/venv/lib:/opt/mine")
    monkeypatch.setenv("PYTHONHOME", "/venv")
    monkeypatch.setenv("RTCACHE_DEVICE_DEVICE", "sim:0")
    assert convert(source, output, "--compile-jobs", "1") == 0
    env = tree.runs[0]["env"]
    assert not {"VIRTUAL_ENV", "PYTHONHOME", "RTCACHE_DEVICE_DEVICE"} & env.keys()
    assert env["PATH"].split(":")[0] == f"{tree.home}/bin"
    ours = {"/venv/bin", f"{sys.prefix}/bin"} if sys.prefix != sys.base_prefix else {"/venv/bin"}
    assert not ours & set(env["PATH"].split(":"))
    assert env["PYTHONPATH"] == f"{tree.modules}:/opt/mine"
    assert env["ASCEND_OPP_PATH"] == f"{tree.home}/opp"
    assert env["ASCEND_SLOG_PRINT_TO_STDOUT"] == "1"
    assert (env["TE_PARALLEL_COMPILER"], env["MAX_COMPILE_CORE_NUMBER"]) == ("1", "1")
    assert not Path(tree.runs[0]["cwd"]).exists(), "its litter is removed"


def test_the_whole_conversion(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    tree.acts(prefill={"suffix": "_linux_aarch64"})
    assert convert(source, output) == 0
    manifest = load_bundle(output).manifest
    assert sorted(manifest.files) == ["decode.om", "prefill.om", "tokenizer.json"]
    assert (manifest.target, manifest.soc_version) == ("ascend", "Ascend310P3")
    assert (output / "prefill.om").read_text() == "prefill"
    modes = {path.stat().st_mode for path in output.iterdir()}
    assert len(modes) == 1, "whoever may read the bundle may read all of it"
    assert left_in(output.parent) == ["bundle"]
    assert f"compiler      CANN 8.1.RC1, {tree.home}" in said(capsys)


def test_without_any(
    tree: CannTree,
    source: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME")
    monkeypatch.setenv("PATH", "/nowhere")
    assert convert(source, output) == 1
    assert said(capsys).lstrip() == (
        "rtcache-convert: atc is not on the PATH: source set_env.sh of CANN or name its directory "
        "by --cann; or use --export-only here and --from-export on a host that has CANN\n"
    )
    assert left_in(output.parent) == []


@pytest.mark.parametrize(
    ("name", "sign"),
    [("my models", "' '"), ("a+b", r"'\+'"), ("größe", "'ö'"), ("名字-1_2.3", None)],
)
def test_paths_that_atc_does_not_take(
    tree: CannTree,
    source: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    sign: str | None,
):
    real = output.parent / name
    real.mkdir()
    (output.parent / "link").symlink_to(real)
    bundle = output.parent / "link" / "bundle"
    assert convert(source, bundle) == (0 if sign is None else 1)
    assert (sign is None) == bool(tree.runs)
    if sign is not None:
        assert re.search(rf"ATC refuses the path .*{name[-1]}/bundle for its {sign}", said(capsys))
        assert left_in(real) == []


def test_the_path_of_an_export(
    tree: CannTree,
    source: Path,
    output: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    export = tmp_path / "my export"
    assert convert(source, export, "--export-only") == 0
    assert main([str(export), "--output", str(output), "--from-export"]) == 1
    assert "my export for its ' '" in said(capsys)
    assert left_in(output.parent) == []


def test_a_cann_by_name(tree: CannTree, source: Path, output: Path, tmp_path: Path):
    other = CannTree(tmp_path / "other", layout="8.5", release="8.5.0")
    assert convert(source, output, "--cann", str(other.home)) == 0
    assert (other.compiled, tree.compiled) == (["prefill", "decode"], [])


def test_a_python_that_lacks_packages_stops_before_any_work(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    (tree.modules / "sympy" / "__init__.py").write_text("import nothing")
    assert convert(source, output) == 1
    assert "which lacks: sympy" in said(capsys)
    assert (left_in(output.parent), tree.runs) == ([], [])
    assert convert(source, output, "--no-python-check") == 0


# --- failures, and going on -----------------------------------------------------------------------


def test_a_failed_decode_does_not_cost_the_prefill(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    tree.acts(decode={"code": 1, "half": True, "errors": [E20001]})
    assert convert(source, output) == 1
    told = said(capsys)
    assert "atc failed with exit code 1:" in told
    assert f"{E20001}\n" in told
    assert "- E20001: an operator cannot be compiled for these shapes. Next: smaller gears" in told
    (kept,) = left_in(output.parent)
    assert f"kept: the export, prefill.om in {output.parent / kept}\n" in told
    assert told.endswith("the same command goes on there; --fresh starts anew\n")
    assert left_in(output.parent / kept) == ["compiled", "export", "rtcache-convert.lock"]

    tree.acts()
    assert convert(source, output) == 0
    assert tree.compiled == ["prefill", "decode", "decode"]
    assert left_in(output.parent) == ["bundle"]
    assert (output / "decode.om").read_text() == "decode"
    load_bundle(output)


def test_an_environment_that_was_wrong_does_not_cost_the_export(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    tree.acts(prefill={"code": 1, "errors": ["E10501: IR for Op x is not registered."]})
    assert convert(source, output) == 1
    assert "kept: the export in " in said(capsys)
    tree.acts()
    assert convert(source, output) == 0
    told = said(capsys)
    assert "verify export" in told
    assert "weights and graph" not in told
    assert "context       64 tokens" in told, "the decisions are told again"


def test_starting_anew(tree: CannTree, source: Path, output: Path):
    tree.acts(decode={"code": 1})
    assert convert(source, output) == 1
    tree.acts()
    assert convert(source, output, "--fresh") == 0
    assert tree.compiled == ["prefill", "decode", "prefill", "decode"]


@pytest.mark.parametrize("change", ["options", "source"])
def test_another_conversion_does_not_go_on_with_it(
    tree: CannTree, source: Path, output: Path, change: str
):
    tree.acts(decode={"code": 1})
    assert convert(source, output) == 1
    tree.acts()
    more = ("--index-dtype", "int64") if change == "options" else ()
    if change == "source":
        write_checkpoint(source, seed=1)
    assert convert(source, output, *more) == 0
    assert tree.compiled == ["prefill", "decode", "prefill", "decode"]
    assert left_in(output.parent) == ["bundle"], "what was kept for this output goes"


def test_a_damaged_export_is_written_anew(tree: CannTree, source: Path, output: Path):
    tree.acts(decode={"code": 1})
    assert convert(source, output) == 1
    (kept,) = kept_for(output)
    data = kept.export / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    tree.acts()
    assert convert(source, output) == 0
    assert tree.compiled == ["prefill", "decode", "decode"]


def test_an_old_bundle_stays_until_the_new_one_is_whole(tree: CannTree, source: Path, output: Path):
    assert convert(source, output) == 0
    before = (output / "manifest.json").read_bytes()
    tree.acts(decode={"code": 1})
    assert convert(source, output, "--index-dtype", "int64") == 1
    assert (output / "manifest.json").read_bytes() == before
    load_bundle(output)


@pytest.mark.parametrize(
    ("acts", "message"),
    [
        ({"writes": False}, "atc reported success but wrote no decode.om"),
        ({"signal": 9}, "atc was ended by SIGKILL; a host that runs out of memory"),
        ({"signal": 11}, "atc was ended by SIGSEGV:\nATC start working now"),
        (
            {"code": 1, "errors": ["E19999: Inner Error!", "EH9999: x"]},
            "EH9999: an inner error of the compiler. Next: the reason is in its log (plog)",
        ),
    ],
)
def test_ways_to_fail(
    tree: CannTree,
    source: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    acts: dict[str, Any],
    message: str,
):
    tree.acts(decode=acts)
    assert convert(source, output) == 1
    told = said(capsys)
    assert message in told
    assert "Traceback" not in told
    assert not output.exists()
    assert [work.contents() for work in kept_for(output)] == [["the export", "prefill.om"]]


def test_a_full_disk(
    tree: CannTree,
    source: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def write(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Compilation, "gather", write)
    assert convert(source, output) == 1
    told = said(capsys)
    assert f"[Errno 28] No space left on device, at or beside {output}\nkept: the export" in told
    assert not output.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_while_it_compiles(
    tree: CannTree, source: Path, output: Path, tmp_path: Path, number: signal.Signals
):
    os.mkfifo(tmp_path / "told")
    tree.acts(decode={"hang": str(tmp_path / "told"), "half": True})
    with background("tools.convert_model", str(source), "--output", str(output), *CARD) as process:
        with reading(tmp_path / "told") as told_by_atc:
            assert told_by_atc.read().isdecimal()  # as soon as the compiler runs
        process.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "rtcache-convert: interrupted; nothing was changed\nkept: the export, prefill.om" in told
    assert "Traceback" not in told
    tree.acts()
    assert convert(source, output) == 0
    assert tree.compiled == ["prefill", "decode", "decode"]


def test_the_same_conversion_twice_at_once(
    tree: CannTree,
    source: Path,
    output: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    os.mkfifo(tmp_path / "told")
    tree.acts(prefill={"hang": str(tmp_path / "told")})
    with background("tools.convert_model", str(source), "--output", str(output), *CARD) as process:
        with reading(tmp_path / "told"):  # as soon as the compiler runs
            pass
        assert convert(source, output) == 1
        told = said(capsys)
        assert "the same conversion runs already; it works in" in told
        assert "kept: " not in told, "it is in use"
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert [work.contents() for work in kept_for(output)] == [["the export"]]


# --- from an export -------------------------------------------------------------------------------


def test_an_export_goes_on_too(tree: CannTree, source: Path, output: Path, tmp_path: Path):
    export = tmp_path / "export"
    assert convert(source, export, "--export-only") == 0
    before = left_in(export)
    tree.acts(decode={"code": 1})
    words = [str(export), "--output", str(output), "--from-export"]
    assert main(words) == 1
    assert [work.contents() for work in kept_for(output)] == [["prefill.om"]]
    tree.acts()
    assert main(words) == 0
    assert tree.compiled == ["prefill", "decode", "decode"]
    assert (left_in(export), left_in(output.parent)) == (before, ["bundle"])


def test_a_users_files_are_copied_not_shared(
    tree: CannTree, source: Path, output: Path, tmp_path: Path
):
    export = tmp_path / "export"
    assert convert(source, export, "--export-only") == 0
    for name in ("prefill.om", "decode.om"):
        (export / name).write_text("made by atc.sh")
    assert main([str(export), "--output", str(output), "--from-export"]) == 0
    (export / "decode.om").write_text("made again by atc.sh")
    load_bundle(output)
    assert tree.runs == []


# --- external weights -----------------------------------------------------------------------------


def test_weights_beside_the_models(tree: CannTree, source: Path, output: Path):
    tree.acts(
        prefill={"weights": ["weight_aa", "weight_bb"]},
        decode={"weights": ["weight_bb", "weight_cc"]},
    )
    assert convert(source, output, "--external-weight", "1") == 0
    assert tree.runs[0]["flags"]["external_weight"] == "1"
    manifest = load_bundle(output).manifest
    assert sorted(manifest.files) == [
        "decode.om",
        "prefill.om",
        "tokenizer.json",
        "weight/weight_aa",
        "weight/weight_bb",
        "weight/weight_cc",
    ]
    assert manifest.atc_options == {"external_weight": "1"}


def test_weights_of_a_finished_model_are_kept_with_it(tree: CannTree, source: Path, output: Path):
    tree.acts(prefill={"weights": ["weight_aa"]}, decode={"code": 1, "weights": ["weight_bb"]})
    assert convert(source, output, "--external-weight", "1") == 1
    tree.acts(decode={"weights": ["weight_cc"]})
    assert convert(source, output, "--external-weight", "1") == 0
    weights = [name for name in load_bundle(output).manifest.files if name.startswith("weight/")]
    assert weights == ["weight/weight_aa", "weight/weight_cc"]


def test_weights_that_atc_did_not_leave(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    assert convert(source, output, "--external-weight", "1") == 1
    assert "the weights are external, but atc left none beside the .om" in said(capsys)
    assert [work.contents() for work in kept_for(output)] == [["the export"]]


def test_weights_in_one_file_need_a_release_that_has_it(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    assert convert(source, output, "--external-weight", "2") == 1
    assert "--external_weight=2 is known from CANN 8.5 on; this is 8.1.RC1" in said(capsys)
    assert (left_in(output.parent), tree.runs) == ([], [])
    tree.acts(
        prefill={"weights": ["prefill_weight_combined"]},
        decode={"weights": ["decode_weight_combined"]},
    )
    assert convert(source, output, "--external-weight", "2", "--cann-release", "8.5") == 0
    assert "weight/decode_weight_combined" in load_bundle(output).manifest.files


def test_weights_of_an_exports_own_script(
    tree: CannTree, source: Path, output: Path, tmp_path: Path
):
    export = tmp_path / "export"
    assert convert(source, export, "--export-only", "--external-weight", "1") == 0
    tree.acts(prefill={"weights": ["weight_aa"]}, decode={"weights": ["weight_aa"]})
    path = f"{tree.home}/bin:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(tree.modules)}
    subprocess.run(["sh", export / "atc.sh"], env=env, check=True, stdout=subprocess.DEVNULL)
    assert main([str(export), "--output", str(output), "--from-export"]) == 0
    assert "weight/weight_aa" in load_bundle(output).manifest.files


# --- more options ---------------------------------------------------------------------------------


def test_an_option_of_the_users(tree: CannTree, source: Path, output: Path, tmp_path: Path):
    assert convert(source, output, "--atc-option", "deterministic=1") == 0
    assert tree.runs[0]["flags"]["deterministic"] == "1"
    assert tree.runs[0]["flags"]["precision_mode"] == "must_keep_origin_dtype"
    export = tmp_path / "export"
    assert convert(source, export, "--export-only", "--atc-option", "log=info") == 0
    assert "--log=info" in (export / "atc.sh").read_text()
    assert json.loads((export / "export.json").read_bytes())["atc_options"] == {"log": "info"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("precision_mode=allow_mix_precision_bf16", "is not for Ascend310P3"),
        ("log=loud", "--log=loud is none of debug"),
        ("soc_version=Ascend910A", "--atc-option soc_version: follows from the model"),
    ],
)
def test_options_that_are_refused_before_any_work(
    tree: CannTree,
    source: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    message: str,
):
    assert convert(source, output, "--atc-option", option) == 1
    assert message in said(capsys)
    assert (left_in(output.parent), tree.runs) == ([], [])


def test_a_plan_that_does_not_fit_is_noted_before_the_work(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("--target", "ascend", "--soc-version", "Ascend310B4", "--kv-capacity", "5GiB")
    words += ("--device-memory", "4GiB")
    assert main([str(source), "--output", str(output), *words]) == 0
    told = said(capsys)
    assert "note: 1.3" in told
    assert "too much for Ascend310B4: --kv-capacity" in told
    assert told.index("note: ") < told.index("weights and graph")


def test_jobs_stand_in_the_script_of_an_export(tree: CannTree, source: Path, output: Path):
    assert convert(source, output, "--export-only", "--compile-jobs", "2") == 0
    assert "export MAX_COMPILE_CORE_NUMBER=2\n" in (output / "atc.sh").read_text()


def test_an_older_cann_than_the_table(
    tmp_path: Path, tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    old = CannTree(tmp_path / "old", release="7.0.0")
    assert convert(source, output, "--cann", str(old.home)) == 1
    assert "ATC of CANN 7.0.0 takes is not known here" in said(capsys)
    assert convert(source, output, "--cann", str(old.home), "--cann-release", "8.0") == 0


def test_parts_of_the_compiler_are_told_as_they_come(
    tree: CannTree, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
):
    line = "[INFO] TEFUSION(7,atc.bin):2021-12-09-16:10:22.539.141 [a.cc:52]7 Do: x"
    tree.acts(decode={"lines": [line]})
    assert convert(source, output) == 0
    assert "decode.om: compilation of operators" in said(capsys)
