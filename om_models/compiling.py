"""From an export to the files of a bundle: what is compiled already is used, the rest compiled.

Files of a compilation take their place when it has succeeded, weights first and the `.om` last; so
an `.om` that is there is whole, and the next conversion can go on behind it.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from om_models.atc import atc_arguments
from om_models.atc_log import AtcLog
from om_models.bundle import TOKENIZER_NAME
from om_models.compiler import Compiler, find_compiled, run_atc
from om_models.gears import model_gears
from om_models.manifest import Manifest, OmFile
from om_models.staging import sync
from om_models.work_directory import WorkDirectory, link_or_copy
from runtime_cache.errors import ConversionError

ONNX_NAME = "model.onnx"
#: Where ATC leaves external weights, seen from the `.om`; loading finds them by these names.
#: Source: page `--external_weight` (hiascend atlasatcparam_16_0045), which has both kinds in
#: `weight/`; the one file of 2 is looked for beside the `.om` as well.
WEIGHT_PATTERNS = ("weight/*", "*_weight_combined")


class StageReporter(Protocol):
    """What is told of compiling."""

    def stage(self, title: str) -> None:
        """A new stage begins; the one before it is done."""

    def progress(self, done: int, total: int) -> None:
        """The current stage has come so far."""


@dataclass(frozen=True)
class Compilation:
    """The `.om` files of one export.

    Attributes:
        export: its directory; it may hold `.om` files that its `atc.sh` has made.
        work: where this program's own finished ones are kept.
        compiler: None if all are there already.
    """

    export: Path
    draft: Manifest
    work: WorkDirectory
    compiler: Compiler | None

    def run(self, reporter: StageReporter) -> None:
        """Compile every `.om` that is not there yet.

        Raises:
            ConversionError: the compiler failed or wrote no file; what was finished stays.
        """
        for om in self.draft.oms:
            if find_compiled(self.export, om) is None and not self._place(om).is_file():
                self._compile(om, reporter)

    def gather(self, bundle: Path, reporter: StageReporter) -> None:
        """Bring tokenizer, `.om` files and external weights into the bundle's directory.

        Raises:
            ConversionError: weights are external, and there are none.
        """
        for om in self.draft.oms:
            compiled = find_compiled(self.export, om)
            if compiled is not None:
                reporter.stage(f"copy {om.path}")
            self._bring(compiled or self._place(om), bundle / om.path)
        for directory in (self.export, self.work.compiled):
            for name in weight_files(directory):
                if not (bundle / name).exists():
                    self._bring(directory / name, bundle / name)
        self._check_weights(bundle)
        self._bring(self.export / TOKENIZER_NAME, bundle / TOKENIZER_NAME)

    def _bring(self, source: Path, target: Path) -> None:
        """A file of the work directory, which goes, is linked; a user's own file is copied."""
        target.parent.mkdir(exist_ok=True)
        if self.work.root in source.parents:
            link_or_copy(source, target)
        else:
            shutil.copyfile(source, target)

    def _place(self, om: OmFile) -> Path:
        return self.work.compiled / om.path

    def _compile(self, om: OmFile, reporter: StageReporter) -> None:
        assert self.compiler is not None
        num_gears = len(model_gears(om.prefill, om.decode))
        # The real compiler may say nothing until it ends; then this and the clock are all there is.
        reporter.stage(f"compile {om.path}, {num_gears} gear{'s' * (num_gears > 1)}")

        def on_part(part: str) -> None:
            reporter.stage(f"{om.path}: {part}")

        with tempfile.TemporaryDirectory(dir=self.work.root, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch)
            output = str(made / om.path).removesuffix(".om")
            onnx_path = str((self.export / ONNX_NAME).absolute())
            arguments = atc_arguments(self.draft, om, onnx_path, output)
            run_atc(self.compiler, arguments, made, AtcLog(reporter.progress, on_part))
            self._keep(om, made)

    def _keep(self, om: OmFile, made: Path) -> None:
        """Move what one run made to its place, all of it on disk."""
        compiled = find_compiled(made, om)
        if compiled is None:
            raise ConversionError(f"atc reported success but wrote no {om.path}")
        self._check_weights(made)
        kept = self.work.compiled
        kept.mkdir(exist_ok=True)
        for path in (compiled, *(made / name for name in weight_files(made))):
            # ATC may leave them to their owner alone, and the daemon's user may be another.
            shutil.copymode(self.export / TOKENIZER_NAME, path)
        for name in weight_files(made):
            sync(made / name)
            (kept / name).parent.mkdir(exist_ok=True)
            (made / name).replace(kept / name)
        sync(compiled)
        compiled.replace(self._place(om))
        sync(kept)

    def _check_weights(self, directory: Path) -> None:
        is_external = self.draft.atc_options.get("external_weight", "0") != "0"
        if is_external and not weight_files(directory):
            raise ConversionError("the weights are external, but atc left none beside the .om")


def weight_files(directory: Path) -> list[Path]:
    """External weights of the `.om` files in a directory, by their path inside it."""
    found = (path for pattern in WEIGHT_PATTERNS for path in sorted(directory.glob(pattern)))
    return [path.relative_to(directory) for path in found]
