"""The surface of pyACL as its own source has it, and the same functions of the software device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_cache.aclsim.module import acl_functions, acl_modules

ROOT = Path(__file__).parents[2]
MODULES = acl_modules()
PARTS = ("acl", "acl.rt", "acl.mdl", "acl.util")


@dataclass(frozen=True)
class RealFunction:
    """One function as tests/data/pyacl_surface.json has it."""

    name: str
    format: str
    args: tuple[str, ...]
    returns: tuple[str, ...]
    is_async: bool
    releases_gil: bool

    @property
    def codes(self) -> str:
        """One parse code an argument."""
        return self.format.replace("|", "")

    @property
    def num_required(self) -> int:
        """Arguments that must be there."""
        return len(self.format.partition("|")[0])

    @property
    def complaint(self) -> str:
        """What the TypeError of wrong arguments says."""
        return f"{self.name} args parse failed"


def _real() -> dict[str, RealFunction]:
    document = json.loads((ROOT / "tests/data/pyacl_surface.json").read_text())
    return {
        name: RealFunction(
            name,
            entry["format"],
            tuple(entry["args"]),
            tuple(entry["returns"]),
            entry["async"],
            entry["gil_released"],
        )
        for name, entry in document["functions"].items()
    }


REAL = _real()

#: A value of each code that every function takes apart from its meaning.
PLAIN: dict[str, Any] = {
    **dict.fromkeys("kKiIhHl", 0),
    "s": "",
    "f": 0.0,
    "d": 0.0,
    "O": {},
}


def simulated() -> dict[str, Callable[..., Any]]:
    """Every function of the software device by its full pyACL name."""
    return {
        f"{part}.{name}": function
        for part in PARTS
        for name, function in acl_functions(MODULES[part]).items()
    }


def plain_args(function: RealFunction) -> list[Any]:
    """Null pointers, zeros, empty texts; for `O` an empty dict."""
    return [PLAIN[code] for code in function.codes]
