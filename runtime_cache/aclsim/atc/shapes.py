"""The shapes on ATC's command line: inputs, gears, ranges. Pure.

Source: the pages of `--input_shape`, `--dynamic_dims`, `--dynamic_batch_size` and
`--dynamic_image_size` (CANN 9.x), and the pages of the error codes (hicann/ge @ffdcbc9f,
`docs/en/user_guides/error_codes`). Where a page leaves open which code a case gets, the nearest is
taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime_cache.aclsim.atc.error import AtcError

MIN_GEARS = 2
MAX_GEARS = 100
MAX_DYNAMIC_RANK = 4
IMAGE_RANK = 4
_UNBOUNDED = -1
# An open dim may be anything from 0 on (page of --input_shape).
_ANY = (0, _UNBOUNDED)

#: What gears vary: dims anywhere, the first dim, or height and width.
GearKind = Literal["dims", "batch", "image"]
Bounds = tuple[int, int]
GEAR_FLAGS: dict[str, GearKind] = {
    "dynamic_dims": "dims",
    "dynamic_batch_size": "batch",
    "dynamic_image_size": "image",
}


@dataclass(frozen=True, slots=True)
class Gears:
    """Compiled shapes to choose from.

    Attributes:
        kind: what they vary.
        values: of each gear: one for each -1 (`dims`), the batch, or height and width.
    """

    kind: GearKind
    values: list[list[int]]


@dataclass(frozen=True, slots=True)
class InputShapes:
    """`--input_shape`, read.

    Attributes:
        dims: by input name; -1 where gears or runs decide.
        ranges: by input name, (least, most) of each dim; only for inputs with an open dim and no
            gears.
    """

    dims: dict[str, list[int]] = field(default_factory=dict)
    ranges: dict[str, list[Bounds]] = field(default_factory=dict)


def parse_input_shape(text: str, *, has_gears: bool, has_dynamic_shape: bool = True) -> InputShapes:
    """Reads `name:1,-1;other:8;scalar:`.

    Args:
        has_gears: -1 stands for a gear's value, and there must be one.
        has_dynamic_shape: whether the SoC takes ranges.

    Raises:
        AtcError: E10002 syntax or a name given twice, E10011 a size that is not positive (or -1
            where the SoC has no dynamic shape), E10040 ranges or no -1 with gears, E10001 a range
            that is empty or that the SoC does not have.
    """
    shapes = InputShapes()
    for part in filter(None, text.split(";")):
        name, colon, listed = part.rpartition(":")
        if not colon or not name or name in shapes.dims:
            raise AtcError("E10002", f"--input_shape: [{part}] is not name:dim,dim")
        bounds = [_bounds(part, dim) for dim in listed.split(",")] if listed else []
        shapes.dims[name] = [least if least == most else -1 for least, most in bounds]
        if -1 in shapes.dims[name] and not has_gears:
            _check_open(part, has_dynamic_shape=has_dynamic_shape)
            shapes.ranges[name] = bounds
        if has_gears and "~" in listed:
            raise AtcError("E10040", f"--input_shape: [{part}] has a range, with gears beside it")
    if has_gears and not any(-1 in dims for dims in shapes.dims.values()):
        raise AtcError("E10040", "gears need a -1 in --input_shape")
    return shapes


def _bounds(part: str, text: str) -> Bounds:
    """(least, most) of one dim."""
    least, tilde, most = text.partition("~")
    if not tilde:
        dim = _integer(text, lambda: _bad_dim(part, text))
        if dim == -1:
            return _ANY
        if dim <= 0:
            reason = f"--input_shape: [{part}] must hold positive integers, not {dim}"
            raise AtcError("E10011", reason)
        return dim, dim
    low = _integer(least, lambda: _bad_dim(part, text))
    high = _integer(most, lambda: _bad_dim(part, text))
    if low < 0 or (high != _UNBOUNDED and high < max(low, 1)):
        raise AtcError("E10001", f"--input_shape: [{text}] in [{part}] is an empty range")
    return low, high


def _bad_dim(part: str, text: str) -> AtcError:
    return AtcError("E10002", f"--input_shape: [{text}] in [{part}] is no number")


def _check_open(part: str, *, has_dynamic_shape: bool) -> None:
    """Open dims without gears are dynamic shape."""
    if has_dynamic_shape:
        return
    if "~" in part:
        reason = f"--input_shape: [{part}] has a range, which this SoC does not take"
        raise AtcError("E10001", reason)
    reason = f"--input_shape: [{part}] must hold positive integers (-1 takes gears on this SoC)"
    raise AtcError("E10011", reason)


def parse_gears(flags: Mapping[str, str]) -> Gears | None:
    """The gears of a command line, or None.

    Raises:
        AtcError: E10009 several kinds; else as the three below.
    """
    given = [name for name in GEAR_FLAGS if name in flags]
    if len(given) > 1:
        raise AtcError(
            "E10009", f"{' and '.join(f'--{name}' for name in given)} exclude each other"
        )
    if not given:
        return None
    parse = {"dims": parse_dims, "batch": parse_batches, "image": parse_images}
    kind = GEAR_FLAGS[given[0]]
    return Gears(kind, parse[kind](flags[given[0]]))


def parse_dims(text: str) -> list[list[int]]:
    """Reads `1,16;1,64` into gears of equal length.

    Raises:
        AtcError: E10035 under 2 gears, E10036 over 100, E10037 unequal lengths, E10038 a value
            that is not a positive integer, E10039 duplicates.
    """
    return _checked("--dynamic_dims", _split("--dynamic_dims", text))


def parse_batches(text: str) -> list[list[int]]:
    """Reads `1,2,4`.

    Raises:
        AtcError: E10003 other characters than digits and commas; else as `parse_dims`.
    """
    if not re.fullmatch(r"[\d,]+", text, re.ASCII):
        reason = "it can only contain digits and ','"
        raise AtcError("E10003", f"value [{text}] for parameter [--dynamic_batch_size]: {reason}")
    parts = _split("--dynamic_batch_size", text.replace(",", ";"))
    return _checked("--dynamic_batch_size", parts)


def parse_images(text: str) -> list[list[int]]:
    """Reads `224,224;448,448`.

    Raises:
        AtcError: E10020 a gear without two values; else as `parse_dims`.
    """
    parts = list(filter(None, text.split(";")))
    if any(not re.fullmatch(r"-?\d+,-?\d+", part, re.ASCII) for part in parts):
        reason = "each gear is height,width"
        raise AtcError("E10020", f"value [{text}] for parameter [--dynamic_image_size]: {reason}")
    return _checked("--dynamic_image_size", _split("--dynamic_image_size", text))


def _split(flag: str, text: str) -> list[list[int]]:
    return [
        [_gear_value(flag, value) for value in part.split(",")]
        for part in filter(None, text.split(";"))
    ]


def _checked(flag: str, gears: list[list[int]]) -> list[list[int]]:
    if len(gears) < MIN_GEARS:
        raise AtcError("E10035", f"{flag}: {len(gears)} gears, at least {MIN_GEARS}")
    if len(gears) > MAX_GEARS:
        raise AtcError("E10036", f"{flag}: {len(gears)} gears, at most {MAX_GEARS}")
    if len({len(gear) for gear in gears}) != 1:
        raise AtcError("E10037", f"{flag}: gears of unequal length")
    if len({tuple(gear) for gear in gears}) != len(gears):
        raise AtcError("E10039", f"{flag}: a gear is given twice")
    return gears


def _gear_value(flag: str, text: str) -> int:
    error = AtcError("E10038", f"{flag}: [{text}] is not a positive integer")
    value = _integer(text, lambda: error)
    if value <= 0:
        raise error
    return value


def _integer(text: str, error: Callable[[], AtcError]) -> int:
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", text, re.ASCII):  # what 64 bits hold
        raise error()
    return int(text)


def check_gears_fit(shapes: Mapping[str, Sequence[int]], gears: Gears, input_format: str) -> None:
    """Holds gears against the -1s of `--input_shape`.

    Raises:
        AtcError: E10045 and E10046 for another number of -1s than values, E10018 and E10019 for a
            -1 in the wrong place, E10001 for a layout that has no height and width, or more dims
            than gears take.
    """
    if gears.kind == "dims":
        _check_dims_fit(shapes, len(gears.values[0]))
    elif gears.kind == "batch":
        _check_places(shapes, (0,), "E10018", "only the first dim can be -1")
    elif input_format != "NCHW":
        raise AtcError("E10001", "--dynamic_image_size needs --input_format=NCHW")
    else:
        _check_places(shapes, (2, 3), "E10019", "only height and width can be -1")
        _check_images(shapes)


def _check_dims_fit(shapes: Mapping[str, Sequence[int]], num_values: int) -> None:
    counts = {name: list(dims).count(-1) for name, dims in shapes.items()}
    total = sum(counts.values())
    if total != num_values:
        # One input alone has too many, or all inputs together: each has a code.
        is_one_input = max(counts.values(), default=0) > num_values or total < num_values
        code = "E10045" if is_one_input else "E10046"
        reason = f"{total} times -1 in --input_shape, {num_values} values in each gear"
        raise AtcError(code, f"--dynamic_dims: {reason}")
    for name, dims in shapes.items():
        if -1 in dims and len(dims) > MAX_DYNAMIC_RANK:
            reason = f"{name}: gears take inputs of at most {MAX_DYNAMIC_RANK} dims"
            raise AtcError("E10001", reason)


def _check_places(
    shapes: Mapping[str, Sequence[int]], places: Sequence[int], code: str, why: str
) -> None:
    for name, dims in shapes.items():
        if any(dim == -1 and place not in places for place, dim in enumerate(dims)):
            raise AtcError(code, f"--input_shape: [{name}] {list(dims)}: {why}")


def _check_images(shapes: Mapping[str, Sequence[int]]) -> None:
    for name, dims in shapes.items():
        if -1 in dims and (len(dims) != IMAGE_RANK or dims[2] != -1 or dims[3] != -1):
            reason = "both height and width must be -1"
            raise AtcError("E10019", f"--input_shape: [{name}] {list(dims)}: {reason}")


def fill_gear(
    all_dims: Sequence[Sequence[int]], values: Sequence[int], kind: GearKind = "dims"
) -> list[list[int]]:
    """The concrete dims of all inputs in one gear."""
    if kind == "batch":
        return [[values[0] if dim == -1 else dim for dim in dims] for dims in all_dims]
    if kind == "image":
        return [[*dims[:2], *values] if -1 in dims else list(dims) for dims in all_dims]
    rest = iter(values)
    return [[next(rest) if dim == -1 else dim for dim in dims] for dims in all_dims]
