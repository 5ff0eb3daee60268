"""ATC's command line: which flags exist here, what they may hold, what gears they describe. Pure.

Source: option pages of the ATC guide, CANN 8.x and 9.0. Flags that only steer the real compiler are
accepted and recorded; unknown ones are refused, since silence would hide a typing error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIN_GEARS = 2
MAX_GEARS = 100
MAX_DYNAMIC_RANK = 4
_REQUIRED = ("framework", "model", "output", "soc_version")
_PRECISION_V1 = (
    "force_fp16",
    "force_fp32",
    "cube_fp16in_fp32out",
    "allow_fp32_to_fp16",
    "must_keep_origin_dtype",
    "allow_mix_precision",
    "allow_mix_precision_fp16",
    "allow_mix_precision_bf16",
)
_PRECISION_V2 = (
    "fp16",
    "origin",
    "mixed_float16",
    "mixed_bfloat16",
    "cube_fp16in_fp32out",
    "mixed_hif8",
    "cube_hif8",
)
_CHOICES = {
    "framework": ("5",),
    "input_format": ("ND", "NCHW"),
    "log": ("debug", "info", "warning", "error", "null"),
    "precision_mode": _PRECISION_V1,
    "precision_mode_v2": _PRECISION_V2,
    "external_weight": ("0",),
    "deterministic": ("0", "1"),
    "op_compiler_cache_mode": ("enable", "disable", "force"),
}
# Accepted with any value: they change how the real compiler works, not what the model computes.
_RECORDED = frozenset(
    (
        "debug_dir",
        "host_env_cpu",
        "host_env_os",
        "jit_compile",
        "modify_mixlist",
        "op_compiler_cache_dir",
        "op_debug_level",
        "op_precision_mode",
        "op_select_implmode",
        "optypelist_for_implmode",
    )
)
_FREE = frozenset(("model", "output", "soc_version", "input_shape", "dynamic_dims"))


class AtcError(Exception):
    """The compiler refuses.

    Attributes:
        code: ATC's code, such as E10016.
        reason: for a person.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AtcOptions:
    """A checked command line.

    Attributes:
        input_shape: dims by input name; -1 where gears decide.
        gears: one value for each -1, in input order; empty for a static model.
        command: the flags as given, files by their names alone: where they lay is no property of
            the model, and would make every compilation another file.
    """

    model: Path
    output: Path
    soc_version: str
    command: str
    input_shape: dict[str, list[int]] = field(default_factory=dict)
    gears: list[list[int]] = field(default_factory=list)


def parse_options(arguments: Sequence[str], soc_versions: Sequence[str]) -> AtcOptions:
    """Reads a command line.

    Raises:
        AtcError: with ATC's code, for the first thing that is wrong.
    """
    flags = _split_flags(arguments)
    for name in _REQUIRED:
        if name not in flags:
            raise AtcError("E10007", f"required parameter [--{name}] is missing")
    for name, choices in _CHOICES.items():
        _check_choice(name, flags.get(name), choices)
    if "precision_mode" in flags and "precision_mode_v2" in flags:
        raise AtcError("E10001", "--precision_mode and --precision_mode_v2 exclude each other")
    _check_choice("soc_version", flags["soc_version"], soc_versions)
    gears = parse_gears(flags["dynamic_dims"]) if "dynamic_dims" in flags else []
    shapes = parse_input_shape(flags.get("input_shape", ""), has_gears=bool(gears))
    _check_gear_width(shapes, gears)
    return AtcOptions(
        model=Path(flags["model"]),
        output=Path(flags["output"]),
        soc_version=flags["soc_version"],
        command=" ".join(f"--{name}={_recorded(name, value)}" for name, value in flags.items()),
        input_shape=shapes,
        gears=gears,
    )


def _recorded(name: str, value: str) -> str:
    return Path(value).name if name in ("model", "output") else value


def _split_flags(arguments: Sequence[str]) -> dict[str, str]:
    """`--name=value` or `--name value` pairs."""
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        name = _known_flag(name)
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value:
            raise AtcError("E10004", f"value for parameter [--{name}] is empty")
        if name in flags:
            raise AtcError("E10001", f"parameter [--{name}] is given twice")
        flags[name] = value
    return flags


def _known_flag(argument: str) -> str:
    name = argument.removeprefix("--")
    known = name in _CHOICES or name in _FREE or name in _RECORDED
    if not argument.startswith("--") or not known:
        raise AtcError("E10003", f"parameter [{argument}] is unknown to the software device's ATC")
    return name


def _check_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        known = ", ".join(choices)
        raise AtcError("E10001", f"value [{value}] for parameter [--{name}] is not one of: {known}")


def parse_input_shape(text: str, *, has_gears: bool) -> dict[str, list[int]]:
    """Reads `name:1,-1;other:8`. An empty dims list is a scalar.

    Raises:
        AtcError: E10002 syntax or a name given twice, E10011 a size that is not positive (or -1
            without gears), E10040 ranges with gears, E10001 ranges without.
    """
    shapes: dict[str, list[int]] = {}
    for part in filter(None, text.split(";")):
        name, colon, dims = part.rpartition(":")
        if not colon or not name or name in shapes:
            raise AtcError("E10002", f"--input_shape: [{part}] is not name:dim,dim")
        if "~" in dims:
            code = "E10040" if has_gears else "E10001"
            raise AtcError(code, f"--input_shape: range [{part}] is not supported")
        shapes[name] = [
            _dim(part, dim, has_gears=has_gears) for dim in filter(None, dims.split(","))
        ]
    if has_gears and not any(-1 in dims for dims in shapes.values()):
        raise AtcError("E10040", "--dynamic_dims needs a -1 in --input_shape")
    return shapes


def _dim(part: str, text: str, *, has_gears: bool) -> int:
    dim = _integer(text, lambda: AtcError("E10002", f"--input_shape: [{text}] in [{part}]"))
    if dim > 0 or (dim == -1 and has_gears):
        return dim
    raise AtcError("E10011", f"--input_shape: [{part}] must hold positive integers (-1 with gears)")


def parse_gears(text: str) -> list[list[int]]:
    """Reads `1,16;1,64` into gears of equal length.

    Raises:
        AtcError: E10035 under 2 gears, E10036 over 100, E10037 unequal lengths, E10038 a value
            that is not a positive integer, E10039 duplicates.
    """
    gears = [
        [_gear_value(value) for value in part.split(",")] for part in filter(None, text.split(";"))
    ]
    if len(gears) < MIN_GEARS:
        raise AtcError("E10035", f"--dynamic_dims: {len(gears)} gears, at least {MIN_GEARS}")
    if len(gears) > MAX_GEARS:
        raise AtcError("E10036", f"--dynamic_dims: {len(gears)} gears, at most {MAX_GEARS}")
    if len({len(gear) for gear in gears}) != 1:
        raise AtcError("E10037", "--dynamic_dims: gears of unequal length")
    if len({tuple(gear) for gear in gears}) != len(gears):
        raise AtcError("E10039", "--dynamic_dims: a gear is given twice")
    return gears


def _gear_value(text: str) -> int:
    error = AtcError("E10038", f"--dynamic_dims: [{text}] is not a positive integer")
    value = _integer(text, lambda: error)
    if value <= 0:
        raise error
    return value


def _integer(text: str, error: Callable[[], AtcError]) -> int:
    try:
        return int(text)
    except ValueError:
        raise error() from None


def _check_gear_width(shapes: dict[str, list[int]], gears: list[list[int]]) -> None:
    num_dynamic = sum(dims.count(-1) for dims in shapes.values())
    if gears and len(gears[0]) != num_dynamic:
        reason = f"{num_dynamic} times -1 in --input_shape, {len(gears[0])} values in each gear"
        raise AtcError("E10045", f"--dynamic_dims: {reason}")
    for name, dims in shapes.items():
        if -1 in dims and len(dims) > MAX_DYNAMIC_RANK:
            raise AtcError(
                "E10001", f"{name}: gears take inputs of at most {MAX_DYNAMIC_RANK} dims"
            )
