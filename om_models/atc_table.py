"""Which options ATC has, by CANN release and SoC: a table made from its pages, not from our `atc`.

A command line is held against it before a compiler that may run for an hour is started. What the
table cannot know (file contents, the model) the compiler says itself.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from om_models.socs import Soc, find_soc

#: Source: `--dynamic_dims` and its errors E10035, E10036.
MIN_GEARS, MAX_GEARS = 2, 100

_RELEASE = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, order=True, slots=True)
class Release:
    """A CANN release, compared by its first two numbers: 8.1.RC1 and 8.1.0 take the same options.

    Attributes:
        text: as the installation names it.
    """

    major: int
    minor: int
    text: str = field(compare=False, default="")

    @classmethod
    def parse(cls, text: str) -> Release | None:
        """`8.1.RC1`, `8.5.0`, `9.0.0-beta1`; None if it begins with no two numbers."""
        found = _RELEASE.match(text.strip())
        return cls(int(found[1]), int(found[2]), text.strip()) if found else None

    def __str__(self) -> str:
        return self.text or f"{self.major}.{self.minor}"


class AtcOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One option.

    Attributes:
        first: the first release it is known in; 8.0 stands for all before as well.
        source: the page.
        last: the last release, or None if it is still there.
        values: what it takes, or None for free text.
        families: of SoCs that have it; None for all.
        excludes: options that must not stand beside it.
        value_first: values that came later.
        value_families: values that only some families have.
        note: what the pages leave open.
    """

    first: str
    source: str
    last: str | None = None
    values: list[str] | None = None
    families: list[str] | None = None
    excludes: list[str] = []
    value_first: dict[str, str] = {}
    value_families: dict[str, list[str]] = {}
    note: str = ""


class AtcTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table.

    Attributes:
        releases: those whose pages were read.
        options: by name, without the dashes.
    """

    about: str
    releases: list[str]
    options: dict[str, AtcOption]


@functools.cache
def atc_table() -> AtcTable:
    """The packaged table."""
    resource = importlib.resources.files("om_models") / "data" / "atc_options.json"
    return msgspec.json.decode(resource.read_bytes(), type=AtcTable)


def known_releases() -> tuple[Release, ...]:
    """The releases of the table, ascending."""
    found = (Release.parse(text) for text in atc_table().releases)
    return tuple(sorted(release for release in found if release))


def complaints(arguments: Sequence[str], release: Release | None) -> list[str]:
    """What ATC of that release, for the SoC the arguments name, would refuse; whole sentences.

    Args:
        arguments: `--name=value` words.
        release: None if it is not known: then only what no release of the table takes.
    """
    if release is None:
        tries = [complaints(arguments, known) for known in known_releases()]
        return [text for text in tries[-1] if all(text in found for found in tries)]
    if release < known_releases()[0]:
        return [
            f"what ATC of CANN {release} takes is not known here, only from"
            f" {known_releases()[0]} on; --cann-release {known_releases()[0]} tries all the same"
        ]
    options = split_options(arguments)
    soc = find_soc(options.get("soc_version", ""))
    return [
        *(text for name, value in options.items() for text in _option(name, value, release, soc)),
        *_exclusions(options),
        *_shapes(options, soc),
    ]


def split_options(arguments: Sequence[str]) -> dict[str, str]:
    """`--name=value` words, by name."""
    pairs = (word.removeprefix("--").partition("=") for word in arguments)
    return {name: value for name, _, value in pairs}


def _option(name: str, value: str, release: Release, soc: Soc | None) -> Iterator[str]:
    option = atc_table().options.get(name)
    if option is None:
        yield f"--{name}: no such option of ATC is known here"
        return
    if not value:
        yield f"--{name} has no value (ATC: E10004)"
    yield from _release(f"--{name}", option.first, option.last, release)
    yield from _family(f"--{name}", option.families, soc)
    if option.values is not None and value and value not in option.values:
        yield f"--{name}={value} is none of {', '.join(option.values)} (ATC: E10001)"
    yield from _release(f"--{name}={value}", option.value_first.get(value), None, release)
    yield from _family(f"--{name}={value}", option.value_families.get(value), soc)


def _release(what: str, first: str | None, last: str | None, release: Release) -> Iterator[str]:
    begins, ends = Release.parse(first or ""), Release.parse(last or "")
    if begins and release < begins:
        yield f"{what} is known from CANN {first} on; this is {release}"
    if ends and release > ends:
        yield f"{what} is known up to CANN {last}; this is {release}"


def _family(what: str, families: Sequence[str] | None, soc: Soc | None) -> Iterator[str]:
    if families is not None and soc is not None and soc.family not in families:
        only = ", ".join(families) or "none of the SoCs known here"
        yield f"{what} is not for {soc.name}; families that have it: {only}"


def _exclusions(options: Mapping[str, str]) -> Iterator[str]:
    names = list(options)
    for place, name in enumerate(names):
        option = atc_table().options.get(name)
        for other in names[place + 1 :]:
            its = atc_table().options.get(other)
            if (option and other in option.excludes) or (its and name in its.excludes):
                yield f"--{name} and --{other} exclude each other"


def _shapes(options: Mapping[str, str], soc: Soc | None) -> Iterator[str]:
    """Gears and ranges. Source: pages `--input_shape` and `--dynamic_dims`, their errors."""
    shapes = [part.rpartition(":")[2] for part in options.get("input_shape", "").split(";")]
    has_range = any("~" in dims for dims in shapes)
    num_free = sum(dim.strip() == "-1" for dims in shapes for dim in dims.split(","))
    if "dynamic_dims" in options:
        if has_range or not num_free:
            yield "--dynamic_dims needs a -1 in --input_shape, and no range (ATC: E10040)"
        yield from _gears(options["dynamic_dims"], num_free)
    elif (has_range or num_free) and soc is not None and not soc.has_dynamic_shape:
        yield (
            f"--input_shape: {soc.name} has no dynamic shape, so neither ranges nor a -1 without"
            " --dynamic_dims"
        )


def _gears(text: str, num_free: int) -> Iterator[str]:
    gears = [gear.split(",") for gear in text.split(";")]
    if not MIN_GEARS <= len(gears) <= MAX_GEARS:
        yield (
            f"--dynamic_dims: {len(gears)} gears; ATC takes {MIN_GEARS} to {MAX_GEARS}"
            " (E10035, E10036)"
        )
    if len({tuple(gear) for gear in gears}) < len(gears):
        yield "--dynamic_dims: a gear stands there twice (ATC: E10039)"
    if any(len(gear) != num_free for gear in gears):
        yield f"--dynamic_dims: {num_free} times -1 need {num_free} values a gear (ATC: E10045)"
    if any(not value.isdecimal() or int(value) == 0 for gear in gears for value in gear):
        yield "--dynamic_dims: values are whole numbers above 0 (ATC: E10038)"
