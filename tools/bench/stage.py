"""What the benchmarks share: bundles, an engine driven by hand, a daemon process, medians."""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from runtime_cache.config import Config
from runtime_cache.options import load

if TYPE_CHECKING:
    from om_models.plan import Plan


class Quiet:
    """A conversion's reporter that says nothing."""

    def planned(self, plan: Plan, spec_name: str) -> None:
        """Nothing."""

    def stage(self, title: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int) -> None:
        """Nothing."""


@contextmanager
def null_bundle(
    out: Console,
    *,
    kv_tokens: int | None = None,
    context: int | None = None,
    max_batch: int | None = None,
) -> Iterator[Path]:
    """A do-nothing bundle in a temporary directory.

    Args:
        kv_tokens: room in its KV pool; None for the default of a conversion.
        context: the longest sequence [tokens]; None for the default.
        max_batch: the most answers a step writes; None for the default.
    """
    # Imported late: measuring a bundle that exists needs no onnx.
    from om_models.convert import convert
    from om_models.plan import ConvertOptions

    options = ConvertOptions(
        target="sim", kv_tokens=kv_tokens, context=context, max_batch=max_batch
    )
    with tempfile.TemporaryDirectory(prefix="rtcache-bench-") as directory:
        path = Path(directory) / "null"
        with out.status("making the do-nothing bundle"):
            convert("null", path, options, Quiet())
        yield path


def bench_config(bundle: Path, device: str) -> Config:
    """The defaults for this bundle and device, whatever options the environment names."""
    return load(env={}, flags={"model.bundle": str(bundle), "device.device": device}).config


def positive(text: str) -> int:
    """A flag's value: a whole number from 1 on."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def cpu_s(process_id: int) -> float:
    """Processor time that a process has used, all its threads together [seconds]."""
    # Source: the Linux kernel's include/linux/posix-timers.h, MAKE_PROCESS_CPUCLOCK: the clock that
    # clock_getcpuclockid(3) names.
    return time.clock_gettime((~process_id << 3) | 2)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    place = math.ceil(len(values) * percent / 100) - 1
    return sorted(values)[max(0, place)]


def median(values: Sequence[float]) -> float:
    """Median, rounded to three digits after the point."""
    return round(statistics.median(values), 3)


def spread(values: Sequence[float]) -> str:
    """Minimum, median and maximum, for people."""
    return f"{min(values):.1f} … {statistics.median(values):.1f} … {max(values):.1f}"
