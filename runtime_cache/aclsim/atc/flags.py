"""ATC's options: which exist, what they may hold, and what the software device does with them.

The table is `data/atc_flags.json`. Options that only steer the real compiler are accepted and
recorded; what would change the model and is not modelled is refused with the reason; unknown ones
are refused, since silence would hide a typing error.
"""

from __future__ import annotations

import functools
import importlib.resources
import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import msgspec

from runtime_cache.aclsim.atc.error import AtcError

_HELP_WIDTH = 80
_HELP_INDENT = " " * 34
#: The one option that the real compiler does not have.
NO_RULES = "no-atc-rules"


class Flag(msgspec.Struct, frozen=True):
    """One option.

    Attributes:
        group: under which heading `--help` shows it.
        kind: of its values: any text, one of `values`, 0 or 1, true or false, a list of those, a
            whole number.
        effect: `acts`, `recorded` (without effect), `refused`, or `no_true`: refused unless it is
            false everywhere.
        why: it is refused.
    """

    group: str
    kind: Literal["text", "choice", "flag01", "bool", "bools", "number"]
    help: str
    values: list[str] = []
    effect: Literal["acts", "recorded", "refused", "no_true"] = "recorded"
    why: str = ""


class _FlagTable(msgspec.Struct, frozen=True):
    about: str
    source: str
    flags: dict[str, Flag]


@functools.cache
def known_flags() -> dict[str, Flag]:
    """The packaged table."""
    resource = importlib.resources.files("runtime_cache.aclsim") / "data" / "atc_flags.json"
    return msgspec.json.decode(resource.read_bytes(), type=_FlagTable).flags


def split_flags(arguments: Sequence[str]) -> dict[str, str]:
    """`--name=value` or `--name value` pairs, checked one by one.

    Returns:
        Values by name; `no-atc-rules` stands there with an empty value if it was given.

    Raises:
        AtcError: E10003 unknown or refused, E10004 empty, E10001 given twice, not UTF-8 or not one
            of its values, E10005 neither true nor false, E10006 neither 0 nor 1.
    """
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument, equals, value = rest.pop(0).partition("=")
        if argument == f"--{NO_RULES}" and not equals:
            flags[NO_RULES] = ""
            continue
        name = _known(argument)
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value:
            raise AtcError("E10004", f"value for parameter [--{name}] is empty")
        if name in flags:
            raise AtcError("E10001", f"parameter [--{name}] is given twice")
        _check_value(name, value, known_flags()[name])
        flags[name] = value
    return flags


def _known(argument: str) -> str:
    name = argument.removeprefix("--")
    flag = known_flags().get(name)
    if flag is None or not argument.startswith("--"):
        raise AtcError("E10003", f"parameter [{argument}] is unknown to the software device's ATC")
    if flag.effect == "refused":
        reason = f"the software device's ATC does not take it: {flag.why}"
        raise AtcError("E10003", f"parameter [{argument}]: {reason}")
    return name


def _check_value(name: str, value: str, flag: Flag) -> None:
    if "\0" in value or value != value.encode("utf-8", "replace").decode():
        raise AtcError("E10001", f"value {value!a} for parameter [--{name}] is not UTF-8")
    if flag.kind == "choice" and value not in flag.values:
        raise _invalid("E10001", name, value, f"not one of: {', '.join(flag.values)}")
    if flag.kind == "flag01" and value not in ("0", "1"):
        raise _invalid("E10006", name, value, "neither 1 nor 0")
    if flag.kind == "bool" and value not in ("true", "false"):
        raise _invalid("E10005", name, value, "neither true nor false")
    if flag.kind == "bools" and not set(value.split(",")) <= {"true", "false"}:
        raise _invalid("E10005", name, value, "not true or false for each input or output")
    if flag.kind == "number" and not value.removeprefix("-").isdecimal():
        raise _invalid("E10001", name, value, "not a whole number")
    if flag.effect == "no_true" and "true" in value:
        raise _invalid("E10001", name, value, f"not taken by the software device: {flag.why}")


def _invalid(code: str, name: str, value: str, why: str) -> AtcError:
    return AtcError(code, f"value [{value}] for parameter [--{name}] is {why}")


def help_text() -> str:
    """What `atc --help` prints."""
    lines = [
        "usage: python -m runtime_cache.aclsim atc --framework=5 --model=M.onnx \\",
        "           --output=NAME --soc_version=SOC ...",
        "",
        "The compiler of the software device: takes ATC's command line, refuses what ATC",
        "refuses and writes an .om that runs on the software device only.",
        f"  {'--' + NO_RULES:<32}lift the rules of ATC's parser (operators,",
        f"{_HELP_INDENT}opset, one import) for what ONNX Runtime",
        f"{_HELP_INDENT}executes anyway; no option of the real atc",
    ]
    for group, members in groupby(known_flags().items(), key=lambda item: item[1].group):
        lines += ["", f"{group}:"]
        for name, flag in members:
            lines += _help_lines(name, flag)
    return "\n".join(lines)


def _help_lines(name: str, flag: Flag) -> list[str]:
    words = flag.help
    if flag.kind == "choice":
        words += f" [{' | '.join(flag.values)}]"
    if flag.kind == "flag01":
        words += " [0 | 1]"
    if flag.kind in ("bool", "bools"):
        words += " [true | false]"
    if flag.effect == "recorded":
        words += " (recorded, without effect)"
    if flag.effect in ("refused", "no_true"):
        words += f" (not taken: {flag.why})"
    wrapped = textwrap.wrap(words, _HELP_WIDTH - len(_HELP_INDENT))
    head = f"  --{name}"
    if len(head) >= len(_HELP_INDENT):
        return [head, *(_HELP_INDENT + line for line in wrapped)]
    first = head.ljust(len(_HELP_INDENT)) + wrapped[0]
    return [first, *(_HELP_INDENT + line for line in wrapped[1:])]
