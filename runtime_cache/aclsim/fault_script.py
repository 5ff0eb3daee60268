"""Fault scripts: a JSON file that says which calls of a program fail, come late or hang.

{"seed": 1, "faults": [
    {"function": "acl.mdl.execute_async", "when": "run", "call": 3, "code": 507015},
    {"function": "acl.rt.memcpy_async", "when": "run", "probability": 0.01, "hang_ms": 2000}
]}
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from runtime_cache.aclsim.faults import Fault

_NUMBERS = {"call": int, "every": int, "code": int, "delay_ms": int, "hang_ms": int}
_FIELDS = {"function", "when", "probability", *_NUMBERS}


def read_script(path: str) -> list[Fault]:
    """Reads a fault script. One seed (0 without one) makes all chances repeatable.

    Raises:
        ValueError: the file cannot be read, is no JSON, or says something that is not understood;
            with the place.
    """
    try:
        return _faults(json.loads(Path(path).read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"fault script {path}: {why}") from error


def _faults(document: Any) -> list[Fault]:
    _check_keys(document, {"seed", "faults"}, "the script")
    entries = document.get("faults", [])
    seed = document.get("seed", 0)
    if not isinstance(entries, list) or type(seed) is not int:
        raise ValueError("`faults` is a list and `seed` an integer")
    random = Random(seed)
    faults = []
    for number, entry in enumerate(entries, 1):
        try:
            faults.append(_fault(entry, random))
        except ValueError as error:
            raise ValueError(f"fault {number}: {error}") from error
    return faults


def _fault(entry: Any, random: Random) -> Fault:
    _check_keys(entry, _FIELDS, "a fault")
    if "function" not in entry:
        raise ValueError("it names no function")
    for name, value in entry.items():
        _check_value(name, value)
    if not {"call", "every", "probability"} & entry.keys():
        entry = {**entry, "call": 1}
    return Fault(
        entry["function"],
        entry.get("code", 0),
        entry.get("when", "call"),
        call=entry.get("call", 0),
        every=entry.get("every", 0),
        probability=float(entry.get("probability", 0)),
        wait_ms=entry.get("delay_ms", 0) + entry.get("hang_ms", 0),
        random=random,
    )


def _check_keys(found: Any, known: set[str], what: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not an object")
    unknown = sorted(found.keys() - known)
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _check_value(name: str, value: Any) -> None:
    if name in _NUMBERS and type(value) is not int:
        raise ValueError(f"{name} is an integer, not {value!r}")
    if name == "probability" and type(value) not in (int, float):
        raise ValueError(f"probability is a number, not {value!r}")
    if name == "function" and not isinstance(value, str):
        raise ValueError(f"function is a name, not {value!r}")
    if name == "when" and value not in ("call", "run"):
        raise ValueError(f"when is call or run, not {value!r}")
