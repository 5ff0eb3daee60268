"""What `rtcache-bench device` has found: lines for people, and the same for programs.

Every line begins with the device's name, so that a line that is passed on alone still says where
it comes from.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from om_models.bundle import Bundle
from om_models.manifest import Gear
from runtime_cache import __version__
from runtime_cache.device.acl_api import RunMode
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.engine.gears import Role
from tools.bench.device_probes import CopyTimes, Prompt
from tools.doctor.host import this_host
from tools.doctor.installed import find_driver, find_toolkit

#: Names of the files, without their endings.
FILE_NAME = "rtcache-device-report"
_MICRO, _MILLI = 1e6, 1e3

Figure = dict[str, float]


def figure(times_s: list[float], unit: float, divisor: float = 1.0) -> Figure:
    """Median, least, most and number of runs, in a unit (1e3: milliseconds), per `divisor`."""
    values = [time_s * unit / divisor for time_s in times_s]
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }


class Report:
    """One run of the checklist.

    Attributes:
        failed: why it ended early, or None.
    """

    def __init__(self, device: str, out: Console) -> None:
        """Args:
        out: where lines go as soon as they are known.
        """
        self.failed: str | None = None
        self._device = device
        self._soc = ""
        self._out = out
        self._lines: list[str] = []
        self._found: dict[str, Any] = {
            "device": device,
            "bundle": None,
            "host": {},
            "latency_us": {},
            "copies": [],
            "small_copies": [],
            "load_s": None,
            "steps": [],
            "gather": [],
            "first_token": {},
            "not_measured": [],
        }

    def result(self) -> dict[str, Any]:
        """All that was found, for JSON."""
        return self._found | ({"failed": self.failed} if self.failed else {})

    def write(self, directory: Path) -> None:
        """Write both files, if anything was found."""
        if not self._lines:
            return
        if self.failed:
            self._say(f"ended early: {self.failed}")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        path.with_suffix(".json").write_text(json.dumps(self.result(), indent=1) + "\n", "utf-8")
        path.with_suffix(".txt").write_text("\n".join(self._lines) + "\n", "utf-8")
        said = f"written: {path}.json and {path.name}.txt"
        self._out.print(said, markup=False, highlight=False, soft_wrap=True)

    def note_host(self, device: AclDevice, bundle: Bundle | None, acl_path: str | None) -> None:
        """What runs where."""
        self._soc = device.soc_name
        facts = _host_facts(device, acl_path)
        self._found["host"] = facts
        if self._device.startswith("sim:"):
            self._say("the software device: a host's CPU, whose times say nothing of a card")
        for name, value in facts.items():
            self._say(f"{name}: {value}")
        if bundle is not None:
            manifest = bundle.manifest
            self._found["bundle"] = manifest.name
            self._found["bundle_digest"] = manifest.digest
            self._say(f"bundle: {manifest.name}, made for {manifest.soc_version}")

    def note_load(self, seconds: float, device: AclDevice) -> None:
        """How long pool and models took, and what memory is left."""
        self._found["load_s"] = round(seconds, 3)
        memory = device.memory_info()
        left = "" if memory is None else f", {memory.free_bytes / 2**30:.2f} GiB left"
        self._say(f"KV pool made and models loaded in {seconds:.1f} s{left}")

    def skip(self, what: str) -> None:
        """Something was not measured, and why."""
        self._found["not_measured"].append(what)
        self._say(f"not measured: {what}")

    def add_latency(self, name: str, times_s: list[float]) -> None:
        """A wait alone, or the shortest copy in one direction and the wait for it."""
        found = figure(times_s, _MICRO)
        self._found["latency_us"][name] = found
        what = "wait for an idle stream" if name == "wait" else f"{name} of 64 bytes and wait"
        self._say_figure(what, found, "µs")

    def add_copy(self, direction: str, num_bytes: int, times_s: list[float]) -> None:
        """A copy of one size: its time, and the bandwidth of the median."""
        found = figure(times_s, _MICRO)
        gb_per_s = round(num_bytes / statistics.median(times_s) / 1e9, 3)
        entry = {"direction": direction, "bytes": num_bytes, "us": found, "gb_per_s": gb_per_s}
        self._found["copies"].append(entry)
        self._say_figure(f"{direction} of {num_bytes} bytes: {gb_per_s:.2f} GB/s,", found, "µs")

    def add_moves(self, count: int, row_bytes: int, times: CopyTimes) -> None:
        """Many small copies on the device: each one's part of queueing, and of all of it."""
        queued, done = (figure(times_s, _MICRO, count) for times_s in times)
        entry = {"copies": count, "bytes": row_bytes, "queued_us": queued, "done_us": done}
        self._found["small_copies"].append(entry)
        what = f"moves of {row_bytes} bytes, {count} before a wait: each"
        self._say_figure(f"{what} queued in", queued, "µs")
        self._say_figure(f"{what} done in", done, "µs")

    def add_step(self, role: Role, gear: Gear, times_s: list[float], *, is_scattered: bool) -> None:
        """Full steps of one gear."""
        slots = "scattered" if is_scattered else "in a row"
        entry = {"role": role, "batch": gear.batch, "chunk": gear.chunk, "past": gear.past}
        self._found["steps"].append(entry | {"slots": slots, "ms": figure(times_s, _MILLI)})
        what = f"{role} {gear.batch}×{gear.chunk}, past {gear.past} {slots}:"
        self._say_figure(what, figure(times_s, _MILLI), "ms")

    def note_gather(self) -> None:
        """What a past slot costs: the difference between the shortest and the longest past."""
        groups: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
        for step in self._found["steps"]:
            if step["slots"] == "scattered":
                key = (step["role"], step["batch"], step["chunk"])
                groups[key][step["past"]] = step["ms"]["median"]
        for (role, batch, chunk), by_past in groups.items():
            low, high = min(by_past), max(by_past)
            if low < high:
                slots = batch * (high - low)
                cost_us = round((by_past[high] - by_past[low]) * 1e6 / slots, 3)
                entry = {"role": role, "batch": batch, "chunk": chunk, "us_per_1000_slots": cost_us}
                self._found["gather"].append(entry)
                self._say(f"{role} {batch}×{chunk}: {cost_us:.1f} µs for 1000 past slots more")

    def add_first_token(self, name: str, prompt: Prompt, times_s: list[float]) -> None:
        """All steps of a prefill, cold or with a known prefix."""
        found = self._found["first_token"]
        found |= {"prompt_tokens": prompt.num_tokens, "shared_tokens": prompt.num_shared}
        found[f"{name}_ms"] = figure(times_s, _MILLI)
        known = 0 if name == "cold" else prompt.num_shared
        what = f"first token of {prompt.num_tokens}, {known} of them known:"
        self._say_figure(what, found[f"{name}_ms"], "ms")
        if name == "hit" and "cold_ms" in found:
            ratio = found["cold_ms"]["median"] / found["hit_ms"]["median"]
            found["ratio"] = round(ratio, 3)
            self._say(f"a hit is {ratio:.1f} times faster")

    def _say_figure(self, what: str, found: Figure, unit: str) -> None:
        low, high = (f"{found[name]:.1f}" for name in ("min", "max"))
        self._say(f"{what} {found['median']:.1f} {unit} ({low} … {high}, {found['runs']} runs)")

    def _say(self, text: str) -> None:
        line = f"{self._device} {self._soc}: {text}" if self._soc else f"{self._device}: {text}"
        self._lines.append(line)
        self._out.print(line, markup=False, highlight=False, soft_wrap=True)


def _host_facts(device: AclDevice, acl_path: str | None) -> dict[str, Any]:
    host = this_host()
    toolkit, driver = find_toolkit(host), find_driver(host)
    memory = device.memory_info()
    return {
        "soc": device.soc_name,
        "run_mode": "card" if device.run_mode is RunMode.HOST else "board",
        "memory_free_bytes": None if memory is None else memory.free_bytes,
        "memory_total_bytes": None if memory is None else memory.total_bytes,
        "cann": None if toolkit is None else toolkit.version,
        "driver": None if driver is None else driver.version,
        "acl": acl_path,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "runtime_cache": __version__,
    }
