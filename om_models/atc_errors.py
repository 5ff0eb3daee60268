"""What ATC's error codes mean for somebody who converts a model, and what to do next. Pure.

Source: error code pages of GE (hicann/ge ffdcbc9f, docs/en/user_guides/error_codes) and its parser
sources; the look of the lines (`E10007: [PID: 1] time text`, after "ATC run failed") from outputs
that users of 7.0 to 8.2 published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CODE = re.compile(r"\b(E[0-9A-Z]\d{4}|507\d{3}|1450\d{2})\b")
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)'?")
_OUR_BUG = "the converter writes this itself, so it is our error: please report it"
_OPTION = "if it stands in --atc-option, correct it; else " + _OUR_BUG
_GEARS = "choose other --gears; without them, " + _OUR_BUG
_OLDER_GRAPH = "convert anew with the CANN release you compile with, and report the operator"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One code.

    Attributes:
        meaning: what ATC found.
        advice: what to do next.
    """

    meaning: str
    advice: str


def _several(codes: str, meaning: str, advice: str) -> dict[str, Explanation]:
    return dict.fromkeys(codes.split(), Explanation(meaning, advice))


EXPLANATIONS: dict[str, Explanation] = {
    **_several(
        "E10001 E10003",
        "an option has a value that ATC does not take",
        f"read the reason it gives; {_OPTION}",
    ),
    **_several(
        "E10014",
        "an option has a value that ATC does not take, often a path",
        "use paths of letters, digits, `-`, `_`, `.`; ATC reads as the user who runs it",
    ),
    **_several("E10002", "--input_shape does not read as name:size,size", _OPTION),
    **_several(
        "E10011",
        "--input_shape has a size that is not above 0 (-1 is for gears alone)",
        _OPTION,
    ),
    **_several("E10004", "an option has no value", _OPTION),
    **_several("E10005", "an option must be true or false", _OPTION),
    **_several("E10006", "an option must be 1 or 0", _OPTION),
    **_several(
        "E10007 E10054",
        "an option that ATC needs is missing, or the shell has cut the command line",
        "in atc.sh keep the quotes: a `;` ends the command without them",
    ),
    **_several(
        "E10016",
        "--input_shape or --out_nodes names what the model does not have",
        "model.onnx and the command line are of different exports: use both of one",
    ),
    **_several("E10035", "--dynamic_dims has fewer than 2 gears", _GEARS),
    **_several("E10036", "--dynamic_dims has more than 100 gears", "choose fewer: --gears small"),
    **_several("E10037", "the gears of --dynamic_dims differ in length", _GEARS),
    **_several("E10038", "a gear of --dynamic_dims holds a size that is not above 0", _GEARS),
    **_several("E10039", "a gear stands in --dynamic_dims twice", _GEARS),
    **_several(
        "E10040",
        "--dynamic_dims without a -1 in --input_shape, or with a range in it",
        _GEARS,
    ),
    **_several(
        "E10045 E10046",
        "--dynamic_dims has not one value for each -1 of --input_shape",
        _GEARS,
    ),
    **_several(
        "E10049",
        "--input_shape gives an input another number of dimensions than the model",
        "model.onnx and the command line are of different exports: use both of one",
    ),
    **_several(
        "E10050",
        "--input_shape gives a dimension outside the range that the model declares",
        "model.onnx and the command line are of different exports: use both of one",
    ),
    **_several(
        "E10501",
        "an operator is not registered with the graph compiler",
        "ASCEND_OPP_PATH is usually wrong: source set_env.sh of the CANN whose atc you run (or name"
        " it by --cann), and install its operator package",
    ),
    **_several("E16001", "the model lacks a node that another one needs", _OLDER_GRAPH),
    **_several("E16004", "the model holds no graph", "model.onnx is cut off: export it again"),
    **_several(
        "E16002 E19010",
        "ATC has no parser for an operator at the model's opset",
        f"this CANN is older than 8.0, or its operator package is missing; else {_OLDER_GRAPH}",
    ),
    **_several(
        "E16005",
        "the model imports more than one operator set",
        f"CANN up to 8.1 takes one; {_OUR_BUG}",
    ),
    **_several(
        "E20001",
        "an operator cannot be compiled for these shapes",
        "smaller gears need less of the core's own memory: --gears small, a smaller --max-batch;"
        " a newer CANN may do it as well",
    ),
    **_several(
        "EZ3003",
        "no kernel for an operator on this SoC",
        "install the operator package of exactly this SoC (from 8.5 on it is a package of its own)"
        " and check --soc-version",
    ),
    **_several(
        "EC0010",
        "ATC's Python lacks a module",
        "install it into the Python that CANN was installed for (docs/conversion.md has the list)",
    ),
    **_several(
        "E40021",
        "an operator failed to compile in ATC's Python",
        "a missing Python package (decorator, sympy, scipy), no C++ headers, or too little memory:"
        " --compile-jobs 1 needs the least",
    ),
    **_several(
        "E19999 EZ9999 EH9999",
        "an inner error of the compiler",
        "the reason is in its log (plog)",
    ),
    **_several(
        "507011 507015 507018",
        "a run on the device failed (AI Core or AI CPU)",
        "this is no error of compiling: the device's own log has the reason",
    ),
}
#: By the first letters, for codes that are not named above.
_FAMILIES = {
    "E4": EXPLANATIONS["E40021"],
    "1450": Explanation(
        "a model was given inputs that do not suit it",
        "this is no error of compiling: bundle and program are of different exports",
    ),
}
#: Words that say more than any code, or come without one.
_SIGNS = (
    (
        "libascend_hal.so",
        "atc does not find the driver's library: on a host without a card, LD_LIBRARY_PATH needs"
        " CANN's <arch>-linux/devlib (set by --cann if it is there)",
    ),
    (
        "The path can only contain",
        "ATC takes paths of letters, digits, `-`, `_` and `.` only, links followed: move the files",
    ),
    ("No space left on device", "the disk is full: where ATC works, or the directory for --output"),
    ("Cannot allocate memory", "the host has too little memory: --compile-jobs 1 needs the least"),
)
#: Codes behind which only the log helps.
_IN_LOG = {"E19999", "EZ9999", "EH9999"}


def explain(lines: Iterable[str], log_directory: str) -> list[str]:
    """What the compiler's output says, each finding once, in the order of its lines.

    Args:
        log_directory: where plog files of the compiler lie.

    Returns:
        Sentences; empty if there is neither a code nor a known sign.
    """
    found = dict.fromkeys(text for line in lines for text in _of_line(line, log_directory))
    return list(found)


def explanation_of(code: str) -> Explanation | None:
    """The explanation of one code, by itself or by its family; None if it is not known here."""
    by_family = next((text for start, text in _FAMILIES.items() if code.startswith(start)), None)
    return EXPLANATIONS.get(code, by_family)


def _of_line(line: str, log_directory: str) -> Iterator[str]:
    for code in _CODE.findall(line):
        found = explanation_of(code)
        if found is None:
            yield f"{code}: not known here; ATC's own words are above"
        else:
            where = f": {log_directory}/plog-*.log" if code in _IN_LOG else ""
            yield f"{code}: {found.meaning}. Next: {found.advice}{where}"
    for sign, text in _SIGNS:
        if sign in line:
            yield text
    if missing := _MISSING_MODULE.search(line):
        yield f"ATC's Python lacks the module {missing[1]}: install it there"
