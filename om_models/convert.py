"""The conversion: source → export (ONNX, tokenizer, draft manifest) → `.om` → bundle.

The two halves may run on different hosts: an export carries all that the second half needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import onnx

import runtime_cache
from om_models.atc import (
    atc_arguments,
    check_arguments,
    check_paths,
    check_soc_version,
    shell_script,
)
from om_models.atc_table import Release
from om_models.bundle import (
    TOKENIZER_NAME,
    Bundle,
    bundle_digest,
    check_files,
    read_manifest,
    seal,
)
from om_models.compiler import (
    Compiler,
    CompilerOptions,
    find_compiled,
    find_compiler,
    job_variables,
)
from om_models.compiling import ONNX_NAME, Compilation
from om_models.graph import GraphOptions
from om_models.manifest import FORMAT, MANIFEST_NAME, Manifest, OmFile
from om_models.memory_plan import plan_memory, warnings
from om_models.plan import ConvertOptions, Plan, Target, make_plan, plan_of
from om_models.socs import check_soc_name
from om_models.sources import ModelSource, open_source, source_defaults
from om_models.spec import ModelSpec
from om_models.staging import staged_directory
from om_models.tokenizer import TokenizerSource
from om_models.work_directory import (
    DRAFT_NAME,
    WorkDirectory,
    fingerprint,
    remove_kept,
    work_directory,
    work_key,
)
from runtime_cache.errors import BundleError, ConversionError

SCRIPT_NAME = "atc.sh"


@dataclass(frozen=True)
class Run:
    """How a conversion is run, as opposed to what it makes.

    Attributes:
        compiler: how it is found.
        is_fresh: throw away what an earlier run has kept for the same output.
        device_bytes: memory of the device, where it is known better than by the table of SoCs.
        on_compiler: told which compiler was found, before any work.
        on_note: told what may go wrong later, before any work; sentences.
    """

    compiler: CompilerOptions = field(default_factory=CompilerOptions)
    is_fresh: bool = False
    device_bytes: int | None = None
    on_compiler: Callable[[Compiler], None] = lambda compiler: None
    on_note: Callable[[str], None] = lambda note: None

    def find_compiler(self, target: Target) -> Compiler:
        """The compiler for a target.

        Raises:
            ConversionError: there is none; the message says what is missing.
        """
        compiler = find_compiler(target, self.compiler)
        self.on_compiler(compiler)
        for note in compiler.notes:
            self.on_note(note)
        return compiler


class Reporter(Protocol):
    """Where progress goes. Stages come one after the other."""

    def planned(self, plan: Plan, spec_name: str) -> None:
        """The numbers are decided, nothing is written yet."""

    def stage(self, title: str) -> None:
        """A new stage begins; the one before it is done."""

    def progress(self, done: int, total: int) -> None:
        """The current stage has come so far."""


def convert(
    source: str,
    output: Path,
    options: ConvertOptions,
    reporter: Reporter,
    run: Run | None = None,
) -> Bundle:
    """Make a bundle of a model; goes on where an earlier call with the same arguments has failed.

    Returns:
        The bundle at `output`, complete and synchronised to disk.

    Raises:
        ConversionError: the source or the options are wrong, or the compiler failed.
        BundleError: `output` is not to be overwritten.
        In both cases `output` is as it was before. For a real SoC the export and each `.om` that
        was finished are kept beside it (`work_directory`).
    """
    run = run or Run()
    # A missing compiler is to be known before minutes of work.
    compiler = run.find_compiler(options.target)
    check_paths(options.target, output)
    if run.is_fresh:
        remove_kept(output)
    key = work_key(runtime_cache.__version__, _known(source), vars(options), str(compiler.release))
    with (
        work_directory(output, key, is_kept=_is_kept(options.target)) as work,
        staged_directory(output, MANIFEST_NAME) as staging,
    ):
        draft = _export_for(source, options, work, reporter, run, compiler.release)
        compilation = Compilation(work.export, draft, work, compiler)
        manifest = _finish(compilation, staging, reporter)
    return Bundle(output, manifest)


def export_only(
    source: str,
    output: Path,
    options: ConvertOptions,
    reporter: Reporter,
    run: Run | None = None,
) -> Manifest:
    """Stop before the compiler: write the export, with the command lines in `atc.sh`.

    Raises:
        ConversionError, BundleError: as `convert`; nothing is kept.
    """
    run = run or Run()
    with staged_directory(output, DRAFT_NAME) as staging:
        draft = _write_export(source, options, staging, reporter, run, run.compiler.release)
        draft = seal(staging, draft, DRAFT_NAME)
        # After the seal: whoever runs the script may well add options of ATC to it.
        (staging / SCRIPT_NAME).write_text(_script(draft, run.compiler.jobs), "utf-8")
    return draft


def convert_export(
    export: Path,
    output: Path,
    soc_version: str | None,
    reporter: Reporter,
    run: Run | None = None,
) -> Bundle:
    """Go on from an export; what its `atc.sh` has compiled is taken as it is.

    Args:
        soc_version: to compile for another SoC than the export names.

    Raises:
        ConversionError: the compiler is missing where it is needed, or failed; or there is an
            `.om` for another SoC.
        BundleError: the export is incomplete or damaged, or `output` is not to be overwritten.
        As with `convert`, an `.om` that was finished is kept beside the output.
    """
    run = run or Run()
    draft = _read_export(export, reporter)
    compiled = [om for om in draft.oms if find_compiled(export, om)]
    if soc_version is not None and soc_version != draft.soc_version:
        draft = _for_soc(draft, soc_version, export, compiled)
    compiler = None
    if len(compiled) < len(draft.oms):
        compiler = run.find_compiler(draft.target)
        check_paths(draft.target, export, output)
        check_soc_version(draft.target, draft.soc_version)
        check_arguments(plan_of(draft), draft.model, compiler.release)
    if run.is_fresh:
        remove_kept(output)
    key = work_key(msgspec.json.encode(draft).decode(), str(compiler and compiler.release))
    with (
        work_directory(output, key, is_kept=_is_kept(draft.target)) as work,
        staged_directory(output, MANIFEST_NAME) as staging,
    ):
        manifest = _finish(Compilation(export, draft, work, compiler), staging, reporter)
    return Bundle(output, manifest)


def _for_soc(
    draft: Manifest, soc_version: str, export: Path, compiled: Sequence[OmFile]
) -> Manifest:
    """The draft for another SoC, for which nothing is compiled yet."""
    check_soc_name(soc_version)
    if compiled:
        raise ConversionError(
            f"{export} holds {compiled[0].path}, compiled for {draft.soc_version}; remove it to"
            f" compile for {soc_version}"
        )
    return msgspec.structs.replace(draft, soc_version=soc_version)


def _export_for(
    source: str,
    options: ConvertOptions,
    work: WorkDirectory,
    reporter: Reporter,
    run: Run,
    release: Release | None,
) -> Manifest:
    """The export in the work directory: an earlier run's if it is whole, or a new one."""
    if work.has_export:
        try:
            draft = _read_export(work.export, reporter)
        except BundleError:
            shutil.rmtree(work.export)
        else:
            reporter.planned(plan_of(draft), draft.name)
            return draft
    fresh = work.root / "new"
    fresh.mkdir()
    draft = _write_export(source, options, fresh, reporter, run, release)
    if _is_kept(options.target):
        seal(fresh, draft, DRAFT_NAME)
    fresh.rename(work.export)
    return draft


def _finish(compilation: Compilation, staging: Path, reporter: Reporter) -> Manifest:
    """Compile what is missing, gather and seal the bundle in `staging`."""
    compilation.run(reporter)
    compilation.gather(staging, reporter)
    reporter.stage("manifest")
    return seal(staging, compilation.draft)


def _is_kept(target: Target) -> bool:
    """Whether work is worth keeping: the software device compiles in seconds."""
    return target == "ascend"


def _known(source: str) -> object:
    """What says that a source is still the same; itself, if it is no file."""
    return fingerprint(source) if Path(source).exists() else source


def _write_export(
    source: str,
    options: ConvertOptions,
    directory: Path,
    reporter: Reporter,
    run: Run,
    release: Release | None,
) -> Manifest:
    with open_source(source, directory) as model:
        plan = make_plan(model.spec, source_defaults(source, options))
        check_soc_version(plan.target, plan.soc_version)
        check_arguments(plan, model.spec, release)
        reporter.planned(plan, model.label)
        for note in _memory_notes(plan, model.spec, run.device_bytes):
            run.on_note(note)
        reporter.stage("tokenizer")
        tokenizer = model.tokenizer()
        tokenizer.save(directory / TOKENIZER_NAME)
        reporter.stage("weights and graph")
        graph_options = GraphOptions(
            plan.dtype, plan.index_dtype, plan.kv, plan.gears.max_model_len, plan.mlp_scale
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
        atc_options=plan.atc_options,
        mlp_scale=plan.mlp_scale,
    )


def _memory_notes(plan: Plan, spec: ModelSpec, device_bytes: int | None) -> list[str]:
    """What the device will not hold, before hours are spent on it."""
    if plan.target == "sim":
        return []
    return warnings(plan_memory(plan, spec, total_bytes=device_bytes))


def _script(draft: Manifest, jobs: int | None) -> str:
    lines = [atc_arguments(draft, om, ONNX_NAME, Path(om.path).stem) for om in draft.oms]
    return shell_script(draft.target, lines, job_variables(jobs))


def _read_export(export: Path, reporter: Reporter) -> Manifest:
    draft = read_manifest(export, DRAFT_NAME, "an export")
    reporter.stage("verify export")
    needed = (ONNX_NAME, f"{ONNX_NAME}.data", TOKENIZER_NAME)
    check_files(export, draft, needed, progress=reporter.progress)
    return draft
