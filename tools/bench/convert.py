"""What a conversion takes: peak memory and time for a checkpoint of a billion parameters.

Writes a synthetic checkpoint with the shapes of Llama-3.2-1B and converts it in
a process of its own, as `rtcache-convert` does: by default for a card, up to
where ATC would begin (`--export-only`); with `--target sim` to a whole bundle.
The aim is a peak of resident memory below 2 GiB, however large the model.

The ceiling of the speed is copying the same bytes on the same disk, to the disk
and not just to memory; a conversion moreover reads what it wrote for checksums.

Needs twice the room of the checkpoint (2.5 GB) below `--directory`, five times
with `--target sim`, and leaves nothing there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime_cache.errors import ConversionError
from tools.bench.stage import median, positive, spread

#: Aim for the peak of resident memory [MiB].
AIM_MIB = 2048
DEFAULT_PARAMS = 1_300_000_000
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9}
#: What lies on the disk at a time, in checkpoints: itself, and either a copy or what is converted
#: (for the software device float32, as an export and as an `.om`).
_SIZES = {"ascend": 2, "sim": 5}
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
#: The smallest plan, so that what is measured is the weights' way and not the compiler.
_GEARS = ("--gears", "prefill=16@128 decode=1@128", "--context", "128", "--kv-tokens", "512")


@dataclass(frozen=True, slots=True)
class Run:
    """One conversion.

    Attributes:
        seconds: from starting the process to its end.
        peak_mib: its largest resident memory, or that of a process it waited for.
        output_bytes: what it wrote.
    """

    seconds: float
    peak_mib: float
    output_bytes: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument(
        "--params",
        type=parse_params,
        default=DEFAULT_PARAMS,
        help="at most so many parameters, such as 10M (Llama-3.2-1B: 1.24B)",
    )
    parser.add_argument(
        "--checkpoint-dtype", choices=("bf16", "fp16"), default="bf16", help="of the source (bf16)"
    )
    parser.add_argument("--target", choices=("ascend", "sim"), default="ascend", help="(ascend)")
    parser.add_argument("--runs", type=positive, default=3, help="conversions (3)")
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="where to write (the current directory)"
    )


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; keys `peak_mib`, `seconds`, `mb_per_s`, `copy_mb_per_s`.

    Raises:
        ConversionError: the disk is too small or cannot be written, or a conversion failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rtcache-bench-", dir=args.directory) as name:
            return _measure(args, Path(name), out)
    except OSError as error:
        raise ConversionError(f"cannot write below {args.directory}: {error}") from error


def _measure(args: argparse.Namespace, directory: Path, out: Console) -> dict[str, Any]:
    # Imported late: `--help` needs no tokenizers library.
    from tools.bench.synthetic import VALUE_BYTES, llama_spec, num_params, write_checkpoint

    spec = llama_spec(args.params)
    _check_room(directory, _SIZES[args.target] * VALUE_BYTES * num_params(spec))
    with out.status("") as status:
        weights = write_checkpoint(
            directory / "checkpoint",
            spec,
            args.checkpoint_dtype,
            lambda done, total: status.update(f"writing the checkpoint, {done / total:.0%}"),
        )
        copies, runs = [], []
        for number in range(args.runs + 1):  # the first one warms up
            title = f"run {number} of {args.runs}" if number else "warming up"
            status.update(f"{title}: copying")
            copies.append(_copy_s(weights, directory / "copy"))
            note = _note(status, title)
            runs.append(_convert(weights.parent, directory / "out", args.target, note))
        num_bytes = weights.stat().st_size
    result = {
        "device": "none",
        "bundle": "synthetic",
        "runs": args.runs,
        "target": args.target,
        "checkpoint_dtype": args.checkpoint_dtype,
        "params": num_params(spec),
        "checkpoint_bytes": num_bytes,
        **_figures(copies[1:], runs[1:], num_bytes),
    }
    _show(copies[1:], runs[1:], result, out)
    return result


def parse_params(text: str) -> int:
    """A flag's value: a number above 0, with K, M or B for a thousand, a million, a billion."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    try:
        params = int(float(number) * _SUFFIXES[unit] if unit else int(number))
    except (ValueError, KeyError, OverflowError):
        params = 0
    if params < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters such as 10M")
    return params


def _check_room(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ConversionError(
            f"{directory.parent} has {free_bytes / 1e9:.1f} GB free,"
            f" {needed_bytes / 1e9:.1f} GB are needed; name another --directory or fewer --params"
        )


def _note(status: Any, title: str) -> Callable[[int], None]:
    return lambda num_bytes: status.update(f"{title}: converting, {num_bytes / 1e6:.0f} MB written")


def _copy_s(source: Path, target: Path) -> float:
    """Copy a file through memory, to the disk; removes the copy [seconds]."""
    start_s = time.perf_counter()
    with source.open("rb") as read, target.open("wb") as written:
        # Not the kernel's own copying, which on some file systems copies nothing.
        while chunk := read.read(_CHUNK_BYTES):
            written.write(chunk)
        written.flush()
        os.fsync(written.fileno())
    seconds = time.perf_counter() - start_s
    target.unlink()
    return seconds


def _convert(checkpoint: Path, output: Path, target: str, note: Callable[[int], None]) -> Run:
    """Convert in a process of its own; removes what it wrote.

    Raises:
        ConversionError: the process failed; with the end of what it said.
    """
    kind = ("--export-only", "--soc-version", "Ascend310P3") if target == "ascend" else ()
    command = [sys.executable, "-m", "tools.convert_model", str(checkpoint), *_GEARS, *kind]
    with tempfile.TemporaryFile() as said:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--output", str(output), "--target", target],
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            peak_kib = _wait(process, output.parent, note)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        seconds = time.perf_counter() - start_s
        if process.returncode:
            said.seek(0)
            words = said.read().decode("utf-8", "replace").strip()[-2000:]
            raise ConversionError(f"rtcache-convert ended with {process.returncode}: {words}")
    written = _tree_bytes(output)
    shutil.rmtree(output)
    return Run(seconds, peak_kib / 1024, written)


def _wait(process: subprocess.Popen[bytes], directory: Path, note: Callable[[int], None]) -> int:
    """Wait for the process; returns its peak of resident memory [KiB].

    That is the largest of its own and of the processes it waited for. Linux counts the starting
    process in as well, so this one has to be small.
    """
    before = _tree_bytes(directory)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_maxrss
        note(max(0, _tree_bytes(directory) - before))
        time.sleep(_POLL_S)


def _tree_bytes(directory: Path) -> int:
    """Size of all files; those that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _figures(copies: list[float], runs: list[Run], num_bytes: int) -> dict[str, Any]:
    seconds, copy_s = median([run.seconds for run in runs]), median(copies)
    peak_mib = max(run.peak_mib for run in runs)
    return {
        "peak_mib": round(peak_mib, 1),
        "aim_mib": AIM_MIB,
        "is_within_aim": peak_mib < AIM_MIB,
        "output_bytes": runs[-1].output_bytes,
        "seconds": seconds,
        "mb_per_s": round(num_bytes / 1e6 / seconds, 1),
        "copy_seconds": copy_s,
        "copy_mb_per_s": round(num_bytes / 1e6 / copy_s, 1),
    }


def _show(copies: list[float], runs: list[Run], result: dict[str, Any], out: Console) -> None:
    params, num_bytes = result["params"], result["checkpoint_bytes"]
    out.print(
        f"{params / 1e6:.1f} million parameters, {num_bytes / 1e6:.0f} MB"
        f" ({result['checkpoint_dtype']}), to {result['target']}"
    )
    table = Table("", "min … median … max", "aim, ceiling")
    peaks = spread([run.peak_mib for run in runs])
    table.add_row("peak memory, MiB", peaks, f"aim: below {AIM_MIB}")
    speeds = spread([num_bytes / 1e6 / run.seconds for run in runs])
    table.add_row("conversion, MB/s", speeds, f"copying: {result['copy_mb_per_s']}")
    table.add_row("conversion, s", spread([run.seconds for run in runs]), "")
    table.add_row("copying, s", spread(copies), "")
    out.print(table)
