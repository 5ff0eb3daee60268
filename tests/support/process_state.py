"""What the kernel says of a running process: memory, descriptors, threads (Linux)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessState:
    """One look at a process.

    Attributes:
        resident_kib: memory [KiB].
        num_fds: open descriptors.
        num_threads: all of them, those of libraries included.
    """

    resident_kib: int
    num_fds: int
    num_threads: int


def look_at(process_id: int) -> ProcessState:
    """The state now.

    Raises:
        FileNotFoundError: there is no such process.
    """
    directory = Path(f"/proc/{process_id}")
    status = dict(
        line.split(":", 1)
        for line in (directory / "status").read_text().splitlines()
        if ":" in line
    )
    return ProcessState(
        resident_kib=int(status["VmRSS"].split()[0]),
        num_fds=len(os.listdir(directory / "fd")),
        num_threads=int(status["Threads"]),
    )


def is_running(process_id: int) -> bool:
    """Whether the process still runs; one that has ended may wait for its parent."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def open_below(directory: Path) -> list[str]:
    """What this process has open in a directory."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the look itself
            found.append(os.readlink(link))
    return [path for path in found if Path(path).is_relative_to(directory.resolve())]
