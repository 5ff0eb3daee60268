"""The whole conversion with the software device's compiler, and its command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

import om_models.cann
import om_models.compiling
from om_models.bundle import load_bundle
from om_models.convert import convert, convert_export, export_only
from om_models.plan import ConvertOptions, Plan
from runtime_cache import LLM
from runtime_cache.errors import BundleError, ConversionError
from tests.support.tiny import BOS, EOS, TINY_OPTIONS, Silent, tiny_spec, write_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf
from tools.convert_model import main

GEARS = "prefill=8@32,64 decode=1,2@32,64"
SMALL = ["--kv-tokens", "256", "--gears", GEARS]


class Recorder(Silent):
    """Remembers stages and the last progress of each."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.last: dict[str, tuple[int, int]] = {}
        self.plan: Plan | None = None

    def planned(self, plan: Plan, spec_name: str) -> None:
        self.plan = plan

    def stage(self, title: str) -> None:
        self.stages.append(title)

    def progress(self, done: int, total: int) -> None:
        self.last[self.stages[-1]] = (done, total)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-llama")


def digest_of(source: Path, output: Path, **options: object) -> str:
    changed = {**vars(TINY_OPTIONS), **options}
    return convert(str(source), output, ConvertOptions(**changed), Silent()).manifest.digest


def test_a_checkpoint_becomes_a_bundle(checkpoint: Path, tmp_path: Path):
    recorder = Recorder()
    made = convert(str(checkpoint), tmp_path / "bundle", TINY_OPTIONS, recorder)
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle == made
    manifest = bundle.manifest
    assert sorted(manifest.files) == ["model.om", "tokenizer.json"]
    assert (manifest.name, manifest.target, manifest.layout) == ("tiny-llama", "sim", "fused")
    assert manifest.model == tiny_spec()
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (BOS, (EOS,))
    assert (manifest.max_model_len, manifest.kv.num_slots) == (128, 1024)
    assert recorder.stages == [
        "tokenizer",
        "weights and graph",
        "compile model.om, 10 gears",
        "manifest",
    ]
    assert recorder.last == {"weights and graph": (2, 2), "compile model.om, 10 gears": (10, 10)}


def test_split_layout_compiles_two_models(checkpoint: Path, tmp_path: Path):
    options = ConvertOptions(**{**vars(TINY_OPTIONS), "layout": "split"})
    recorder = Recorder()
    manifest = convert(str(checkpoint), tmp_path / "bundle", options, recorder).manifest
    assert sorted(manifest.files) == ["decode.om", "prefill.om", "tokenizer.json"]
    assert recorder.stages[2:4] == ["compile prefill.om, 4 gears", "compile decode.om, 6 gears"]
    assert recorder.last["compile prefill.om, 4 gears"] == (4, 4)
    assert recorder.last["compile decode.om, 6 gears"] == (6, 6)


def test_the_digest_is_that_of_weights_and_layout_alone(checkpoint: Path, tmp_path: Path):
    sharded = write_checkpoint(tmp_path / "other name", num_shards=3)
    packed = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec())
    base = digest_of(checkpoint, tmp_path / "b0")
    same = [
        digest_of(sharded, tmp_path / "b1", gears=GEARS, kv_tokens=256),
        digest_of(packed, tmp_path / "b2", layout="split", soc_version="Ascend310B4"),
        digest_of(checkpoint, tmp_path / "b3", index_dtype="int64"),
    ]
    assert set(same) == {base}
    others = [
        digest_of(checkpoint, tmp_path / "b4", dtype="float16"),
        digest_of(checkpoint, tmp_path / "b5", num_kv_groups=2),
        digest_of(write_checkpoint(tmp_path / "seed", seed=1), tmp_path / "b6"),
    ]
    assert len({base, *others}) == 4


@pytest.mark.parametrize("layout", ["fused", "split"])
@pytest.mark.parametrize("where", [1, 2])
def test_external_weights_answer_the_same(
    checkpoint: Path, tmp_path: Path, where: int, layout: Any
):
    answers, sizes = [], []
    for external_weight in (0, where):
        path = tmp_path / f"bundle{external_weight}"
        options = replace(TINY_OPTIONS, external_weight=external_weight, layout=layout)
        bundle = convert(str(checkpoint), path, options, Silent())
        sizes.append(sum(bundle.manifest.files[om.path].num_bytes for om in bundle.manifest.oms))
        # Moved: the weights are found beside the models, wherever these are.
        moved = path.rename(tmp_path / f"moved{external_weight}")
        with LLM(str(moved), device="sim:0") as llm:
            answers.append(llm.generate("hello", max_tokens=8, temperature=0).text)
    assert answers[0] == answers[1]
    assert sizes[1] < sizes[0] / 2, "the weights are no longer in the models"


def test_export_here_compile_there(checkpoint: Path, tmp_path: Path):
    export = tmp_path / "export"
    draft = export_only(str(checkpoint), export, TINY_OPTIONS, Silent())
    assert sorted(path.name for path in export.iterdir()) == [
        "atc.sh",
        "export.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    ]
    script = (export / "atc.sh").read_text()
    assert "atc --framework=5 --model=model.onnx --output=model " in script
    assert sorted(draft.files) == ["model.onnx", "model.onnx.data", "tokenizer.json"]
    moved = export.rename(tmp_path / "moved")
    bundle = convert_export(moved, tmp_path / "bundle", None, Silent())
    direct = convert(str(checkpoint), tmp_path / "direct", TINY_OPTIONS, Silent())
    assert bundle.manifest.digest == draft.digest == direct.manifest.digest
    assert sorted(bundle.manifest.files) == ["model.om", "tokenizer.json"]
    assert moved.is_dir()


def test_an_export_may_be_compiled_for_another_soc(checkpoint: Path, tmp_path: Path):
    export_only(str(checkpoint), tmp_path / "export", TINY_OPTIONS, Silent())
    bundle = convert_export(tmp_path / "export", tmp_path / "bundle", "Ascend310B4", Silent())
    assert bundle.manifest.soc_version == "Ascend310B4"


@pytest.mark.parametrize("name", ["export.json", "model.onnx", "model.onnx.data", "tokenizer.json"])
def test_an_incomplete_export(checkpoint: Path, tmp_path: Path, name: str):
    export_only(str(checkpoint), tmp_path / "export", TINY_OPTIONS, Silent())
    (tmp_path / "export" / name).unlink()
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        convert_export(tmp_path / "export", tmp_path / "bundle", None, Silent())
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_damaged_export(checkpoint: Path, tmp_path: Path, name: str):
    export_only(str(checkpoint), tmp_path / "export", TINY_OPTIONS, Silent())
    path = tmp_path / "export" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name} is damaged: its checksum differs"):
        convert_export(tmp_path / "export", tmp_path / "bundle", None, Silent())


def test_an_export_without_checksums_or_of_another_format(checkpoint: Path, tmp_path: Path):
    export_only(str(checkpoint), tmp_path / "export", TINY_OPTIONS, Silent())
    path = tmp_path / "export" / "export.json"
    draft = json.loads(path.read_text())
    for changes, message in (
        ({"files": {}}, r"gives no checksum for model\.onnx"),
        ({"format": 3}, "has bundle format 3, newer than 2"),
    ):
        path.write_text(json.dumps({**draft, **changes}))
        with pytest.raises(BundleError, match=message):
            convert_export(tmp_path / "export", tmp_path / "bundle", None, Silent())


def test_what_the_script_of_an_export_compiled_is_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = replace(TINY_OPTIONS, target="ascend", soc_version="Ascend310B4", layout="split")
    export = tmp_path / "export"
    export_only(str(checkpoint), export, options, Silent())
    run_script(export, monkeypatch)
    assert (export / "kernel_meta").exists(), "litter of the compiler, which is not to be bundled"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(om_models.cann, "WELL_KNOWN", ())
    recorder = Recorder()
    bundle = convert_export(export, tmp_path / "bundle", "Ascend310B4", recorder)
    assert recorder.stages == ["verify export", "copy prefill.om", "copy decode.om", "manifest"]
    assert sorted(load_bundle(bundle.path).manifest.files) == [
        "decode.om",
        "prefill.om",
        "tokenizer.json",
    ]
    assert (bundle.path / "decode.om").read_text() == "decode, by atc\n"

    with pytest.raises(
        ConversionError, match=r"holds prefill\.om, compiled for Ascend310B4; remove"
    ):
        convert_export(export, tmp_path / "bundle", "Ascend310P3", Silent())
    (export / "prefill_linux_aarch64.om").unlink()
    with pytest.raises(ConversionError, match="atc is not on the PATH"):
        convert_export(export, tmp_path / "bundle", None, Silent())


def run_script(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `atc.sh` with a compiler of ours, which names its output as the real one may."""
    program = export.parent / "bin" / "atc"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nfor flag in "$@"; do case $flag in --output=*) name=${flag#*=};; esac; done\n'
        'echo "$name, by atc" > "${name}_linux_aarch64.om"; touch kernel_meta\n'
    )
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", export / "atc.sh"], env={"PATH": path}, check=True)


def test_the_script_of_the_software_device_runs_its_compiler(checkpoint: Path, tmp_path: Path):
    export = tmp_path / "export"
    export_only(str(checkpoint), export, TINY_OPTIONS, Silent())
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", export / "atc.sh"], env={**os.environ, "PATH": path}, check=True)
    there = convert_export(export, tmp_path / "there", None, Silent())
    here = convert(str(checkpoint), tmp_path / "here", TINY_OPTIONS, Silent())
    assert there.manifest == here.manifest


def test_the_same_conversion_gives_the_same_bytes(checkpoint: Path, tmp_path: Path):
    first, second = (
        convert(str(checkpoint), tmp_path / name / "bundle", TINY_OPTIONS, Silent()).path
        for name in ("one", "another")
    )
    for name in ("manifest.json", "model.om", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_an_unknown_soc_is_found_before_any_work(checkpoint: Path, tmp_path: Path):
    options = replace(TINY_OPTIONS, soc_version="Ascend999")
    recorder = Recorder()
    with pytest.raises(ConversionError, match="Ascend999 is not known to the software device"):
        convert(str(checkpoint), tmp_path / "out" / "bundle", options, recorder)
    assert recorder.stages == []
    assert not (tmp_path / "out").exists()
    export_only(str(checkpoint), tmp_path / "export", TINY_OPTIONS, Silent())
    with pytest.raises(ConversionError, match="Ascend999 is not known"):
        convert_export(tmp_path / "export", tmp_path / "bundle", "Ascend999", Silent())


def test_a_refusing_compiler_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise ConversionError("atc failed")

    monkeypatch.setattr(om_models.compiling, "run_atc", refuse)
    with pytest.raises(ConversionError, match="atc failed"):
        convert(str(checkpoint), tmp_path / "out" / "bundle", TINY_OPTIONS, Silent())
    assert not (tmp_path / "out").exists()


def test_an_ascend_bundle_needs_atc_before_any_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(om_models.cann, "WELL_KNOWN", ())
    options = ConvertOptions(target="ascend", soc_version="Ascend310B4")
    recorder = Recorder()
    with pytest.raises(ConversionError, match="atc is not on the PATH"):
        convert(str(checkpoint), tmp_path / "out" / "bundle", options, recorder)
    assert recorder.stages == []
    assert not (tmp_path / "out").exists()


def test_only_exports_and_bundles_are_replaced(checkpoint: Path, tmp_path: Path):
    with pytest.raises(BundleError, match="not overwritten"):
        convert(str(checkpoint), checkpoint, TINY_OPTIONS, Silent())
    with pytest.raises(BundleError, match="not overwritten"):
        export_only(str(checkpoint), checkpoint, TINY_OPTIONS, Silent())
    assert (checkpoint / "model.safetensors").is_file()


# --- the command ----------------------------------------------------------------------------------


def test_command_in_a_path_with_a_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = write_checkpoint(tmp_path / "my models" / "tiny")
    output = tmp_path / "my bundles" / "tiny"
    assert main([str(checkpoint), "--output", str(output), "--json", *SMALL]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    bundle = load_bundle(output)
    assert summary["digest"] == bundle.manifest.digest
    assert (summary["kv_tokens"], summary["max_model_len"]) == (256, 64)
    assert "256 tokens of 256 bytes" in printed.err
    assert "2 prefill, 4 decode (batch up to 2)" in printed.err


def test_command_makes_the_null_bundle(tmp_path: Path):
    assert main(["null", "--output", str(tmp_path / "null"), "--gears", GEARS]) == 0
    manifest = load_bundle(tmp_path / "null").manifest
    assert (manifest.name, manifest.kv.num_slots, manifest.dtype) == ("null", 65536, "float32")
    assert manifest.kv.row_elements * 2 * 4 == 128


def test_command_makes_a_null_bundle_of_the_longest_context(tmp_path: Path):
    arguments = ["--context", "131072", "--max-batch", "1"]
    assert main(["null", "--output", str(tmp_path / "null"), *arguments]) == 0
    assert load_bundle(tmp_path / "null").manifest.max_model_len == 131072


def test_command_leaves_the_signals_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    seen: list[bool] = []

    def end(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:  # a second one does not disturb what is done here
            signal.raise_signal(signal.SIGTERM)
            seen.append(True)

    monkeypatch.setattr(om_models.compiling, "run_atc", end)
    assert main(["null", "--output", str(tmp_path / "out" / "null"), "--gears", GEARS]) == 130
    assert "interrupted; nothing was changed" in capsys.readouterr().err
    assert (seen, (tmp_path / "out").exists()) == ([True], False)
    assert [signal.getsignal(number) for number in numbers] == before


def test_command_under_nohup_ignores_a_lost_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_model = om_models.compiling.run_atc

    def lose_terminal(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGHUP)
        compile_model(*arguments)

    monkeypatch.setattr(om_models.compiling, "run_atc", lose_terminal)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["null", "--output", str(tmp_path / "null"), "--gears", GEARS]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_command_scales_the_mlp(checkpoint: Path, tmp_path: Path):
    arguments = [str(checkpoint), "--export-only", "--dtype", "fp16", *SMALL]
    drafts, islands = [], []
    for name, scale in (("plain", []), ("scaled", ["--mlp-scale", "16"])):
        export = tmp_path / name
        assert main([*arguments, "--output", str(export), *scale]) == 0
        drafts.append(json.loads((export / "export.json").read_text()))
        graph = onnx.load(export / "model.onnx", load_external_data=False).graph
        islands.append([n.op_type for n in graph.node if n.name.startswith("layer1/mlp_sum/")])
    assert [draft["mlp_scale"] for draft in drafts] == [1, 16]
    assert drafts[0]["digest"] == drafts[1]["digest"]
    assert islands == [["Add"], ["Mul", "Add"]]


def test_command_exports_and_goes_on(checkpoint: Path, tmp_path: Path):
    export, output = str(tmp_path / "export"), str(tmp_path / "bundle")
    assert main([str(checkpoint), "--output", export, "--export-only", *SMALL]) == 0
    assert main([export, "--output", output, "--from-export"]) == 0
    assert load_bundle(Path(output)).manifest.max_model_len == 64


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cut.gguf"
    path.write_bytes(write_tiny_gguf(tmp_path / "m.gguf", tiny_spec()).read_bytes()[:-100])
    assert main([str(path), "--output", str(tmp_path / "bundle")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "cut.gguf is" in printed.err.replace("\n", " ")
    assert "Traceback" not in printed.err


def test_command_names_a_directory_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    assert main(["null", "--output", str(tmp_path / "file" / "bundle"), *SMALL]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "num_slots"), [("64KiB", 256), ("0.125 MiB", 512), ("65536", 256), ("1mb", 3904)]
)
def test_sizes(checkpoint: Path, tmp_path: Path, text: str, num_slots: int):
    arguments = [str(checkpoint), "--output", str(tmp_path / "e"), "--export-only"]
    assert main([*arguments, "--context", "64", "--kv-capacity", text]) == 0
    draft = msgspec.json.decode((tmp_path / "e" / "export.json").read_bytes())
    assert draft["kv"]["num_slots"] == num_slots


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-capacity", "4 apples"],
        ["--kv-capacity", "0"],
        ["--context", "-1"],
        ["--max-batch", "x"],
        ["--export-only", "--from-export"],
        ["--from-export", "--gears", GEARS],
        ["--from-export", "--target", "sim"],
        ["--dtype", "int8"],
        ["--dtype", "bf16"],
        ["--gears"],
        ["--atc-option", "log"],
        ["--atc-option", "=info"],
        ["--compile-jobs", "0"],
        ["--compile-jobs", "33"],
        ["--cann-release", "latest"],
        ["--external-weight", "3"],
        ["--from-export", "--external-weight", "0"],
        ["--from-export", "--atc-option", "log=info"],
    ],
)
def test_wrong_arguments_stop_at_once(tmp_path: Path, arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(["null", "--output", str(tmp_path / "x"), *arguments])
    assert caught.value.code == 2
