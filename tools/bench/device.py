"""The 15-minute checklist for a host with a card: what the project does not know of real devices.

Waits, copies in each direction, many small copies of token rows, the time of a
step in every gear of a bundle (its past scattered over the pool or in a row), and
the time to the first token with and without a known prefix, all through the
driver alone. There is no ceiling to hold it against: these figures are to become
one. Prints a line a figure and writes all of it to two files, made to be sent
back (docs/ascend.md says where).

Without --bundle a software device gets the do-nothing model, and a card is asked
for waits and copies only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from om_models.bundle import Bundle, load_bundle
from om_models.manifest import Gear, Manifest
from runtime_cache.config import CacheConfig
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.select import load_acl, parse_device
from runtime_cache.engine.executor import Executor
from runtime_cache.engine.gears import Role
from runtime_cache.errors import RuntimeCacheError
from tools.bench.device_probes import SMALLEST_COPY_BYTES, MemoryProbe, Prompt, StepProbe
from tools.bench.device_report import Report
from tools.bench.stage import null_bundle, positive

#: A title, and what measures for so many seconds.
Work = tuple[str, Callable[[float], None]]
T = TypeVar("T")

_KIB, _MIB = 1 << 10, 1 << 20
#: Sizes of single copies [bytes].
COPY_BYTES = (4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB)
#: How many small copies are queued before one wait.
NUM_COPIES = (1, 8, 64, 512)
#: A row that is copied if there is no bundle: a token of Llama-3.2-1B in float16 [bytes].
DEFAULT_ROW_BYTES = 32 * _KIB
#: Parts of the time: waits and copies, first tokens, steps. The last loses what runs over.
_SHARES = (0.25, 0.2, 0.55)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--device", default="sim:0", help="device, such as npu:0 (sim:0)")
    parser.add_argument("--bundle", type=Path, help="bundle whose model is run")
    parser.add_argument(
        "--seconds", type=positive, default=900, help="time for it all, but for loading (900)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where the two files go (here)"
    )


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; see `device_report.Report` for the keys. What was measured before an error is kept.

    Raises:
        RuntimeCacheError: the bundle, or the device; the files tell what was measured before it.
    """
    kind, _ = parse_device(args.device)
    report = Report(args.device, out)
    with _bundle(args, kind, out) as bundle, _progress(out) as progress:
        try:
            _Checklist(args, report, progress).run(bundle)
        except RuntimeCacheError as error:
            report.failed = str(error)
            raise
        finally:
            report.write(args.output)
    return report.result()


@contextmanager
def _bundle(args: argparse.Namespace, kind: str, out: Console) -> Iterator[Bundle | None]:
    if args.bundle is None and kind == "npu":
        yield None
        return
    with null_bundle(out) if args.bundle is None else nullcontext(args.bundle) as path:
        yield load_bundle(path, verify=False)


@contextmanager
def _progress(out: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    is_hidden = not out.is_terminal
    with Progress(*columns, console=out, transient=True, disable=is_hidden) as progress:
        yield progress


class _Checklist:
    """All of it, in order, on one device."""

    def __init__(self, args: argparse.Namespace, report: Report, progress: Progress) -> None:
        self._args = args
        self._report = report
        self._progress = progress
        self._task = progress.add_task(args.device)
        self._end_s = time.perf_counter() + args.seconds

    def run(self, bundle: Bundle | None) -> None:
        options = _sim_options(self._args.device, bundle)
        acl, device_id = load_acl(self._args.device, options)
        device = AclDevice.open(acl, device_id)
        try:
            self._report.note_host(device, bundle, getattr(acl, "__file__", None))
            self._measure_memory(device, _row_bytes(bundle))
            if bundle is None:
                self._report.skip("steps and first tokens: no --bundle")
            else:
                self._measure_model(device, bundle)
        finally:
            device.close()

    def _measure_memory(self, device: AclDevice, row_bytes: int) -> None:
        report = self._report
        probe = MemoryProbe(device, max(*COPY_BYTES, max(NUM_COPIES) * row_bytes))
        ways = {"upload": probe.upload, "download": probe.download, "move": probe.move}
        work = [("wait", _noted(partial(report.add_latency, "wait"), probe.wait))]
        for name, copy in ways.items():
            add = partial(report.add_latency, name)
            work.append((f"short {name}", _noted(add, partial(copy, SMALLEST_COPY_BYTES))))
        for size in COPY_BYTES:
            for name, copy in ways.items():
                add = partial(report.add_copy, name, size)
                work.append((f"{name} of {size}", _noted(add, partial(copy, size))))
        for count in NUM_COPIES:
            many = partial(probe.many_moves, count, row_bytes)
            work.append(
                (f"{count} moves", _noted(partial(report.add_moves, count, row_bytes), many))
            )
        try:
            self._work_off(work, _SHARES[0])
        finally:
            probe.close()

    def _measure_model(self, device: AclDevice, bundle: Bundle) -> None:
        start_s = time.perf_counter()
        block_size = CacheConfig().block_size
        executor = Executor.open(device, bundle.manifest, bundle.path, block_size=block_size)
        try:
            load_s = time.perf_counter() - start_s
            self._end_s += load_s
            self._report.note_load(load_s, device)
            probe = StepProbe(executor, bundle.manifest)
            self._measure_first_tokens(probe)
            self._measure_steps(probe, bundle.manifest)
        finally:
            executor.close()

    def _measure_steps(self, probe: StepProbe, manifest: Manifest) -> None:
        work = []
        roles: dict[Role, tuple[Gear, ...]] = {
            "prefill": manifest.prefill_gears,
            "decode": manifest.decode_gears,
        }
        for role, gear in corners_first(roles):
            is_longest = gear.past == max(each.past for each in roles[role])
            for is_scattered in (True, False) if is_longest else (True,):
                step = partial(probe.step, role, gear, is_scattered=is_scattered)
                add = partial(self._report.add_step, role, gear, is_scattered=is_scattered)
                title = f"{role} {gear.batch}×{gear.chunk}, past {gear.past}"
                work.append((title, _noted(add, step)))
        self._work_off(work, _SHARES[2])
        self._report.note_gather()

    def _measure_first_tokens(self, probe: StepProbe) -> None:
        prompt = Prompt.fitting(probe.max_tokens)
        work = []
        for name, num_known in (("cold", 0), ("hit", prompt.num_shared)):
            add = partial(self._report.add_first_token, name, prompt)
            first_token = partial(probe.first_token, prompt, num_known)
            work.append((f"first token, {name}", _noted(add, first_token)))
        self._work_off(work, _SHARES[1])

    def _work_off(self, work: list[Work], share: float) -> None:
        """Each gets the same part of the share; when all time is over, the rest is left out."""
        seconds = self._args.seconds * share / len(work)
        self._progress.reset(self._task, total=len(work))
        for title, measure in work:
            self._progress.update(self._task, description=f"{self._args.device} {title}")
            if time.perf_counter() < self._end_s:
                measure(seconds)
            else:
                self._report.skip(f"{title}: out of time")
            self._progress.advance(self._task)


def corners_first(roles: Mapping[Role, Sequence[Gear]]) -> list[tuple[Role, Gear]]:
    """All gears, those with the fewest and most rows and past before the others.

    A slow device may have no time for all of them, and these tell the most.
    """

    def is_corner(role: Role, gear: Gear) -> bool:
        rows = [each.batch * each.chunk for each in roles[role]]
        pasts = [each.past for each in roles[role]]
        has_end_rows = gear.batch * gear.chunk in (min(rows), max(rows))
        return has_end_rows and gear.past in (min(pasts), max(pasts))

    gears = [(role, gear) for role in roles for gear in sorted(set(roles[role]))]
    return sorted(gears, key=lambda each: not is_corner(*each))


def _noted(add: Callable[[T], None], measure: Callable[[float], T]) -> Callable[[float], None]:
    """Measures for so many seconds, and reports what came of it."""
    return lambda seconds: add(measure(seconds))


def _sim_options(device: str, bundle: Bundle | None) -> dict[str, int | str | bool]:
    """The software device is of the SoC that the bundle was made for."""
    if bundle is None or not device.startswith("sim:"):
        return {}
    return {"soc_name": bundle.manifest.soc_version}


def _row_bytes(bundle: Bundle | None) -> int:
    """KV of one token, of one layer group: what an append copies for each token."""
    if bundle is None:
        return DEFAULT_ROW_BYTES
    return KvLayout.from_spec(bundle.manifest.kv, CacheConfig().block_size).group_token_bytes
