"""Reads the table that `npu-smi info` prints. Pure.

Two lines a chip: NPU, name and health; chip, bus and memory. Releases differ in widths, in a second
column of numbers and in whether there is a column of HBM, so cells are found by `|` and numbers by
what they look like. What is read no further than this is reported as unknown, not guessed.

Source: outputs of npu-smi 23.0 to 26.0 for 310B, 310P3, 910B and A3 in public reports
(nvtop#421, 1Panel#9472, vllm-ascend#2534, the quick starts of Orange Pi boards).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from om_models.socs import find_soc

_HEAD = re.compile(r"^\|\s*NPU\s+Name\s*\|\s*Health\b", re.MULTILINE)
_NAME = re.compile(r"(\d+)\s+(\S+)")
_CHIP = re.compile(r"(\d+)(?:\s+(\d+))?")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version:")
_FAILED = re.compile(r"dcmi mod\w+ initialize\w* failed.*?ret is (-\d+)")
#: A family and a number after it, such as `310B4`.
_EXACT = re.compile(r"\d{3}[A-Z]+\d[\w-]*")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip, which is one device of pyACL.

    Attributes:
        npu: number of its card.
        chip: number on its card.
        device: number of its `/dev/davinciN`, if the table has it.
        name: such as `910B4`.
        health: `OK` or what is wrong, in the tool's word.
        used_bytes, total_bytes: of its memory, HBM if it has any; None if the table does not say.
    """

    npu: int
    chip: int
    device: int | None
    name: str
    health: str
    used_bytes: int | None
    total_bytes: int | None

    @property
    def free_bytes(self) -> int | None:
        """What is left of its memory."""
        if self.used_bytes is None or self.total_bytes is None:
            return None
        return max(self.total_bytes - self.used_bytes, 0)

    @property
    def soc_version(self) -> str | None:
        """What ATC calls it, or None: `Ascend910` and `310B` name more than one SoC.

        Source: soc_version is `Ascend` and the name in this table, but on A3.
        """
        name = f"Ascend{self.name}"
        return name if find_soc(name) or _EXACT.fullmatch(self.name) else None


def parse(text: str) -> list[Chip] | None:
    """The chips in the order of the table, or None if it is not such a table."""
    head = _HEAD.search(text)
    if head is None:
        return None
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text[head.end() :].splitlines()
        if line.lstrip().startswith("|")
    ]
    chips = []
    for first, second in pairwise(rows):
        chip = _chip(first, second)
        if chip is not None:
            chips.append(chip)
        elif first[0].startswith("NPU"):  # the table of processes
            break
    return chips


def version(text: str) -> str | None:
    """Of the tool, which is that of the driver."""
    match = _VERSION.search(text)
    return match[1] if match else None


def failure(text: str) -> int | None:
    """The code with which the tool could not reach the driver, or None."""
    match = _FAILED.search(text)
    return int(match[1]) if match else None


def _chip(first: list[str], second: list[str]) -> Chip | None:
    """A chip from its two rows, or None if they are something else."""
    if len(first) < 3 or len(second) < 3:
        return None
    name, chip = _NAME.fullmatch(first[0]), _CHIP.fullmatch(second[0])
    if name is None or chip is None or not first[1] or _USAGE.search(first[1]):
        return None
    used, total = _memory(second[2])
    return Chip(
        npu=int(name[1]),
        chip=int(chip[1]),
        device=int(chip[2]) if chip[2] else None,
        name=name[2],
        health=first[1],
        used_bytes=used,
        total_bytes=total,
    )


def _memory(cell: str) -> tuple[int | None, int | None]:
    """The last usage whose total is not 0: HBM stands after DDR, and is `0 / 0` without HBM."""
    found = [(int(used), int(total)) for used, total in _USAGE.findall(cell)]
    known = [pair for pair in found if pair[1] > 0]
    return (known[-1][0] * _MIB, known[-1][1] * _MIB) if known else (None, None)
