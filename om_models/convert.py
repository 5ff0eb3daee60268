"""The conversion: source → export (ONNX, tokenizer, draft manifest) → `.om` → bundle.

The two halves may run on different hosts: an export carries all that the second half needs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Protocol

import msgspec
import onnx

import runtime_cache
from om_models.atc import atc_arguments, compiled_path, compiler, run_atc, shell_script
from om_models.bundle import TOKENIZER_NAME, Bundle, bundle_digest, seal, staged_directory
from om_models.graph import GraphOptions
from om_models.manifest import FORMAT, Manifest, OmFile
from om_models.plan import ConvertOptions, Plan, make_plan
from om_models.sources import ModelSource, open_source, source_defaults
from om_models.tokenizer import TokenizerSource
from runtime_cache.errors import ConversionError

ONNX_NAME = "model.onnx"
#: The manifest without checksums; by it an export is known.
DRAFT_NAME = "export.json"
SCRIPT_NAME = "atc.sh"

_GEAR_LINE = re.compile(r"gear (\d+)/(\d+)")


class Reporter(Protocol):
    """Where progress goes. Stages come one after the other."""

    def planned(self, plan: Plan, spec_name: str) -> None:
        """The numbers are decided, nothing is written yet."""

    def stage(self, title: str) -> None:
        """A new stage begins; the one before it is done."""

    def progress(self, done: int, total: int) -> None:
        """The current stage has come so far."""


def convert(source: str, output: Path, options: ConvertOptions, reporter: Reporter) -> Bundle:
    """Make a bundle of a model.

    Returns:
        The bundle at `output`, complete and synchronised to disk.

    Raises:
        ConversionError: the source or the options are wrong, or the compiler failed.
        BundleError: `output` is not to be overwritten.
        In both cases `output` is as it was before.
    """
    compiler(options.target)  # a missing compiler is to be known before minutes of work
    with staged_directory(output) as staging:
        export = staging / "export"
        export.mkdir()
        draft = _write_export(source, options, export, reporter)
        manifest = _compile(export, draft, staging, reporter)
    return Bundle(output, manifest)


def export_only(source: str, output: Path, options: ConvertOptions, reporter: Reporter) -> Manifest:
    """Stop before the compiler: write the export, with the command lines in `atc.sh`.

    Raises:
        ConversionError, BundleError: as `convert`.
    """
    with staged_directory(output, DRAFT_NAME) as staging:
        return _write_export(source, options, staging, reporter)


def convert_export(
    export: Path, output: Path, soc_version: str | None, reporter: Reporter
) -> Bundle:
    """Go on from an export.

    Args:
        soc_version: to compile for another SoC than the export names.

    Raises:
        ConversionError: the export is incomplete, or the compiler failed.
        BundleError: `output` is not to be overwritten.
    """
    draft = _read_draft(export)
    if soc_version is not None:
        draft = msgspec.structs.replace(draft, soc_version=soc_version)
    compiler(draft.target)
    with staged_directory(output) as staging:
        manifest = _compile(export, draft, staging, reporter)
    return Bundle(output, manifest)


def _write_export(
    source: str, options: ConvertOptions, directory: Path, reporter: Reporter
) -> Manifest:
    with open_source(source) as model:
        plan = make_plan(model.spec, source_defaults(source, options))
        reporter.planned(plan, model.label)
        reporter.stage("tokenizer")
        tokenizer = model.tokenizer()
        tokenizer.save(directory / TOKENIZER_NAME)
        reporter.stage("weights and graph")
        graph_options = GraphOptions(plan.dtype, plan.index_dtype, plan.kv, plan.max_model_len)
        weights_digest = model.write_graph(graph_options, directory / ONNX_NAME, reporter.progress)
        draft = _draft(model, plan, tokenizer, weights_digest)
    (directory / DRAFT_NAME).write_bytes(msgspec.json.encode(draft))
    (directory / SCRIPT_NAME).write_text(_script(draft), "utf-8")
    return draft


def _draft(
    model: ModelSource, plan: Plan, tokenizer: TokenizerSource, weights_digest: str
) -> Manifest:
    return Manifest(
        format=FORMAT,
        name=model.label,
        digest=bundle_digest(weights_digest, model.spec, plan.kv),
        target=plan.target,
        soc_version=plan.soc_version,
        layout=plan.layout,
        dtype=plan.dtype,
        index_dtype=plan.index_dtype,
        model=model.spec,
        kv=plan.kv,
        oms=plan.oms,
        max_model_len=plan.max_model_len,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        chat_template=tokenizer.chat_template,
        files={},
        made_by={"runtime-cache": runtime_cache.__version__, "onnx": onnx.__version__},
    )


def _script(draft: Manifest) -> str:
    return shell_script(
        [atc_arguments(draft, om, ONNX_NAME, Path(om.path).stem) for om in draft.oms]
    )


def _read_draft(export: Path) -> Manifest:
    try:
        draft = msgspec.json.decode((export / DRAFT_NAME).read_bytes(), type=Manifest)
    except OSError as error:
        raise ConversionError(f"{export} is not an export: {error}") from error
    except msgspec.DecodeError as error:
        raise ConversionError(f"{export / DRAFT_NAME} is damaged: {error}") from error
    for name in (ONNX_NAME, f"{ONNX_NAME}.data", TOKENIZER_NAME):
        if not (export / name).is_file():
            raise ConversionError(f"{export} is incomplete: {name} is missing")
    return draft


def _compile(export: Path, draft: Manifest, staging: Path, reporter: Reporter) -> Manifest:
    """Run the compiler for each `.om`, then gather and seal the bundle in `staging`."""
    for om in draft.oms:
        reporter.stage(f"compile {om.path}")
        _compile_one(export.absolute(), draft, om, staging, reporter)
    reporter.stage("manifest")
    (staging / TOKENIZER_NAME).write_bytes((export / TOKENIZER_NAME).read_bytes())
    if export.parent == staging:
        shutil.rmtree(export)
    return seal(staging, draft)


def _compile_one(
    export: Path, draft: Manifest, om: OmFile, staging: Path, reporter: Reporter
) -> None:
    output = str(staging / om.path).removesuffix(".om")
    arguments = atc_arguments(draft, om, str(export / ONNX_NAME), output)

    def on_line(line: str) -> None:
        if match := _GEAR_LINE.search(line):
            reporter.progress(int(match[1]), int(match[2]))

    run_atc(draft.target, arguments, on_line)
    compiled_path(staging, om).rename(staging / om.path)
