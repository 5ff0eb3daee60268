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

from runtime_cache.errors import RuntimeCacheError
from tools.convert_arguments import DTYPES, parse_arguments

if TYPE_CHECKING:
    from om_models.compiler import Compiler, CompilerOptions
    from om_models.manifest import Manifest
    from om_models.plan import ConvertOptions, Plan

#: All of them act like Ctrl-C: nothing half-written stays.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 if nothing was converted, 130 if interrupted."""
    args = parse_arguments(arguments)
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
        # A write that finds the disk full does not name its file.
        where = "" if error.filename or args.output is None else f", at or beside {args.output}"
        console.print(f"rtcache-convert: {error}{where}", style="red", markup=False)
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

    kept = kept_for(args.output)
    for work in kept:
        console.print(f"kept: {', '.join(work.contents())} in {work.root}", markup=False)
    if kept:
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
        """Print which one will be called."""
        self._console.print(f"  {'compiler':<14}{compiler.name}", markup=False)

    def note(self, note: str) -> None:
        """Print what may go wrong later."""
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
        run = convert.Run(
            compiler=_compiler_options(args),
            is_fresh=args.fresh,
            device_bytes=args.device_memory,
            on_compiler=reporter.compiler,
            on_note=reporter.note,
        )
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
        dtype=DTYPES[args.dtype] if args.dtype else None,  # type: ignore[arg-type]
        gears=args.gears,
        layout=args.layout or "fused",
        index_dtype=args.index_dtype or "int32",
        external_weight=args.external_weight or 0,
        atc_options=dict(args.atc_option or ()),
        mlp_scale=args.mlp_scale or 1,
    )


def _decisions(plan: Plan, spec_name: str) -> dict[str, str]:
    from om_models.memory_plan import size

    kv = plan.kv
    row_bytes = kv.row_elements * np.dtype(kv.dtype).itemsize
    token_bytes = 2 * kv.num_groups * kv.layers_per_group * row_bytes
    return {
        "model": spec_name,
        "target": f"{plan.target}, SoC {plan.soc_version}",
        "dtype": f"{plan.dtype}, indices {plan.index_dtype}"
        + (f", MLPs scaled down by {plan.mlp_scale}" if plan.mlp_scale > 1 else ""),
        "context": f"{plan.gears.max_model_len} tokens",
        "KV pool": f"{kv.num_slots} tokens of {token_bytes} bytes"
        f" ({size(kv.num_slots * token_bytes)}), {kv.num_groups} group(s)",
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


if __name__ == "__main__":
    sys.exit(main())
