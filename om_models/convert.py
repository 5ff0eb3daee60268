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
from om_models.atc import (
    atc_arguments,
    check_soc_version,
    compiler,
    find_compiled,
    run_atc,
    shell_script,
)
from om_models.bundle import (
    TOKENIZER_NAME,
    Bundle,
    bundle_digest,
    check_files,
    read_manifest,
    seal,
)
from om_models.graph import GraphOptions
from om_models.manifest import FORMAT, MANIFEST_NAME, Manifest, OmFile
from om_models.plan import ConvertOptions, Plan, make_plan
from om_models.sources import ModelSource, open_source, source_defaults
from om_models.staging import staged_directory
from om_models.tokenizer import TokenizerSource
from runtime_cache.errors import ConversionError

ONNX_NAME = "model.onnx"
#: The manifest, with the checksums of the export's files; by it an export is known.
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
    with staged_directory(output, MANIFEST_NAME) as staging:
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
        draft = seal(staging, _write_export(source, options, staging, reporter), DRAFT_NAME)
        # After the seal: whoever runs the script may well add options of ATC to it.
        (staging / SCRIPT_NAME).write_text(_script(draft), "utf-8")
    return draft


def convert_export(
    export: Path, output: Path, soc_version: str | None, reporter: Reporter
) -> Bundle:
    """Go on from an export; what its `atc.sh` has compiled is taken as it is.

    Args:
        soc_version: to compile for another SoC than the export names.

    Raises:
        ConversionError: the compiler is missing where it is needed, or failed; or there is an
            `.om` for another SoC.
        BundleError: the export is incomplete or damaged, or `output` is not to be overwritten.
    """
    draft = _read_export(export, reporter)
    compiled = [om for om in draft.oms if find_compiled(export, om)]
    if soc_version not in (None, draft.soc_version):
        if compiled:
            raise ConversionError(
                f"{export} holds {compiled[0].path}, compiled for {draft.soc_version}; remove it to"
                f" compile for {soc_version}"
            )
        draft = msgspec.structs.replace(draft, soc_version=soc_version)
    if len(compiled) < len(draft.oms):
        compiler(draft.target)
        check_soc_version(draft.target, draft.soc_version)
    with staged_directory(output, MANIFEST_NAME) as staging:
        manifest = _compile(export, draft, staging, reporter)
    return Bundle(output, manifest)


def _write_export(
    source: str, options: ConvertOptions, directory: Path, reporter: Reporter
) -> Manifest:
    with open_source(source, directory) as model:
        plan = make_plan(model.spec, source_defaults(source, options))
        check_soc_version(plan.target, plan.soc_version)
        reporter.planned(plan, model.label)
        reporter.stage("tokenizer")
        tokenizer = model.tokenizer()
        tokenizer.save(directory / TOKENIZER_NAME)
        reporter.stage("weights and graph")
        graph_options = GraphOptions(
            plan.dtype, plan.index_dtype, plan.kv, plan.gears.max_model_len
        )
        weights_digest = model.write_graph(graph_options, directory / ONNX_NAME, reporter.progress)
        return _draft(model, plan, tokenizer, weights_digest)


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
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        chat_template=tokenizer.chat_template,
        files={},
        made_by={"runtime-cache": runtime_cache.__version__, "onnx": onnx.__version__},
    )


def _script(draft: Manifest) -> str:
    lines = [atc_arguments(draft, om, ONNX_NAME, Path(om.path).stem) for om in draft.oms]
    return shell_script(draft.target, lines)


def _read_export(export: Path, reporter: Reporter) -> Manifest:
    draft = read_manifest(export, DRAFT_NAME, "an export")
    reporter.stage("verify export")
    needed = (ONNX_NAME, f"{ONNX_NAME}.data", TOKENIZER_NAME)
    check_files(export, draft, needed, progress=reporter.progress)
    return draft


def _compile(export: Path, draft: Manifest, staging: Path, reporter: Reporter) -> Manifest:
    """Run the compiler for each missing `.om`, then gather and seal the bundle in `staging`."""
    for om in draft.oms:
        if compiled := find_compiled(export, om):
            reporter.stage(f"copy {om.path}")
            shutil.copyfile(compiled, staging / om.path)
        else:
            reporter.stage(f"compile {om.path}")
            _compile_one(export.absolute(), draft, om, staging, reporter)
    reporter.stage("manifest")
    shutil.copyfile(export / TOKENIZER_NAME, staging / TOKENIZER_NAME)
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

    run_atc(draft.target, arguments, staging, on_line)
    compiled = find_compiled(staging, om)
    if compiled is None:
        raise ConversionError(f"atc reported success but wrote no {om.path}")
    compiled.rename(staging / om.path)
