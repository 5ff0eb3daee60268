"""ATC's command line, read and checked as a whole.

Source: option pages of the ATC guide, CANN 8.x and 9.0. What each option may hold by itself is in
`flags`, shapes and gears in `shapes`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from om_models.socs import find_soc
from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.atc.flags import NO_RULES, split_flags
from runtime_cache.aclsim.atc.shapes import (
    Bounds,
    Gears,
    check_gears_fit,
    parse_gears,
    parse_input_shape,
)

__all__ = ["AtcError", "AtcOptions", "parse_options"]

MODE_COMPILE, MODE_JSON, MODE_SHOW = "0", "1", "6"
_REQUIRED = {
    MODE_COMPILE: ("framework", "model", "output", "soc_version"),
    MODE_JSON: ("om", "json"),
    MODE_SHOW: ("om",),
}
_FRAMEWORK_ONNX = "5"
_PATHS = ("model", "output", "om", "json")
_MIXED = ("mixed_float16", "mixed_bfloat16", "mixed_hif8")
_OUT_NODE = re.compile(r"(.+):(\d+)")
#: `CheckOutputPathValid` of hicann/ge: what the resolved path of a model and an output may hold.
_PATH = re.compile("[\u4e00-\u9fa5A-Za-z0-9./_-]+")


@dataclass(frozen=True, slots=True)
class AtcOptions:
    """A checked command line.

    Attributes:
        mode: "0", "1" or "6"; each uses its own fields.
        om, json: of modes 1 and 6.
        input_shape: dims by input name; -1 where gears or runs decide.
        ranges: (least, most) of each dim, of inputs with open dims and no gears.
        gears: compiled shapes to choose from; None for a static model or one with ranges.
        command: the flags as given, files by their names alone: where they lay is no property of
            the model, and would make every compilation another file.
        out_nodes: (node, output index) of the tensors that become outputs; empty: the model's own.
        output_types: type of each of `out_nodes`, or under ("", 0) of all outputs.
        external_weight: 0, 1 or 2.
        host: system and processor that host code is for.
        has_atc_rules: False with `--no-atc-rules`.
        shows_info: whether the new file is described.
    """

    model: Path
    output: Path
    soc_version: str
    command: str
    mode: str = MODE_COMPILE
    om: Path = Path()
    json: Path = Path()
    input_shape: dict[str, list[int]] = field(default_factory=dict)
    ranges: dict[str, list[Bounds]] = field(default_factory=dict)
    gears: Gears | None = None
    input_format: str = "NCHW"
    out_nodes: list[tuple[str, int]] = field(default_factory=list)
    output_types: dict[tuple[str, int], str] = field(default_factory=dict)
    input_fp16_nodes: list[str] = field(default_factory=list)
    external_weight: int = 0
    host: str = ""
    has_atc_rules: bool = True
    shows_info: bool = False

    @property
    def has_plain_paths(self) -> bool:
        """Whether ATC takes the paths: it refuses spaces and most signs (E10001)."""
        paths = (str(self.model.resolve()), str(self.output))
        return all(_PATH.fullmatch(path) for path in paths)


def parse_options(arguments: Sequence[str], soc_versions: Sequence[str]) -> AtcOptions:
    """Reads a command line.

    Raises:
        AtcError: with ATC's code, for the first thing that is wrong.
    """
    flags = split_flags(arguments)
    mode = flags.get("mode", MODE_COMPILE)
    if mode not in _REQUIRED:
        reason = "modes 0, 1 and 6 are what the software device's ATC has"
        raise AtcError("E10001", f"value [{mode}] for parameter [--mode]: {reason}")
    for name in _REQUIRED[mode]:
        if name not in flags:
            raise AtcError("E10007", f"required parameter [--{name}] is missing")
    if flags.get("framework", _FRAMEWORK_ONNX) != _FRAMEWORK_ONNX:
        reason = "the software device's ATC compiles ONNX (5)"
        raise AtcError(
            "E10001", f"value [{flags['framework']}] for parameter [--framework]: {reason}"
        )
    if mode != MODE_COMPILE:
        return _description_options(flags, mode)
    _check_together(flags, soc_versions)
    return _compile_options(flags)


def _description_options(flags: Mapping[str, str], mode: str) -> AtcOptions:
    return AtcOptions(
        model=Path(),
        output=Path(),
        soc_version="",
        command="",
        mode=mode,
        om=Path(flags["om"]),
        json=Path(flags.get("json", "")),
    )


def _check_together(flags: Mapping[str, str], soc_versions: Sequence[str]) -> None:
    """What options have to do with each other and with the SoC."""
    if "precision_mode" in flags and "precision_mode_v2" in flags:
        raise AtcError("E10001", "--precision_mode and --precision_mode_v2 exclude each other")
    if flags["output"].endswith("/") or Path(flags["output"]).name in ("", ".."):
        reason = f"value [{flags['output']}] for parameter [--output] names a directory, no file"
        raise AtcError("E10001", reason)
    soc_version = flags["soc_version"]
    if soc_version not in soc_versions:
        known = ", ".join(soc_versions)
        reason = f"value [{soc_version}] for parameter [--soc_version] is not one of: {known}"
        raise AtcError("E10001", reason)
    precision = flags.get("precision_mode") or flags.get("precision_mode_v2", "")
    soc = find_soc(soc_version)
    if ("bf16" in precision or "bfloat16" in precision) and soc and not soc.has_bfloat16:
        raise AtcError("E10001", f"precision mode [{precision}]: {soc_version} has no bfloat16")
    is_mixed = precision in _MIXED or precision.startswith("allow_mix_precision")
    if "modify_mixlist" in flags and not is_mixed:
        raise AtcError("E10001", "--modify_mixlist needs a mixed precision mode")


def _compile_options(flags: Mapping[str, str]) -> AtcOptions:
    gears = parse_gears(flags)
    soc = find_soc(flags["soc_version"])
    shapes = parse_input_shape(
        flags.get("input_shape", ""),
        has_gears=gears is not None,
        has_dynamic_shape=soc is None or soc.has_dynamic_shape,
    )
    input_format = flags.get("input_format", "NCHW")
    if gears is not None:
        check_gears_fit(shapes.dims, gears, input_format)
    out_nodes = _out_nodes(flags.get("out_nodes", ""))
    return AtcOptions(
        model=Path(flags["model"]),
        output=Path(flags["output"]),
        soc_version=flags["soc_version"],
        command=" ".join(_recorded(name, value) for name, value in flags.items()),
        input_shape=shapes.dims,
        ranges=shapes.ranges,
        gears=gears,
        input_format=input_format,
        out_nodes=out_nodes,
        output_types=_output_types(flags.get("output_type", ""), out_nodes),
        input_fp16_nodes=list(filter(None, flags.get("input_fp16_nodes", "").split(";"))),
        external_weight=int(flags.get("external_weight", "0")),
        host=f"{flags.get('host_env_os', 'linux')}_{flags.get('host_env_cpu', platform.machine())}",
        has_atc_rules=NO_RULES not in flags,
        shows_info=flags.get("display_model_info") == "1",
    )


def _recorded(name: str, value: str) -> str:
    if name == NO_RULES:
        return f"--{name}"
    return f"--{name}={Path(value).name if name in _PATHS else value}"


def _out_nodes(text: str) -> list[tuple[str, int]]:
    """Reads `node:0;other:1`."""
    found = []
    for part in filter(None, text.split(";")):
        match = _OUT_NODE.fullmatch(part)
        if match is None:
            reason = f"[{part}] is not node:index"
            raise AtcError("E10001", f"value [{text}] for parameter [--out_nodes]: {reason}")
        found.append((match[1], int(match[2])))
    return found


def _output_types(text: str, out_nodes: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Reads `FP16`, or `node:0:FP16;other:1:FP32` for outputs that `--out_nodes` names."""
    if not text:
        return {}
    if ":" not in text:
        return {("", 0): _known_type(text)}
    types = {}
    for part in filter(None, text.split(";")):
        node, _, type_name = part.rpartition(":")
        match = _OUT_NODE.fullmatch(node)
        if match is None or (match[1], int(match[2])) not in out_nodes:
            reason = f"[{part}] is not node:index:type of a node in --out_nodes"
            raise AtcError("E10001", f"value [{text}] for parameter [--output_type]: {reason}")
        types[match[1], int(match[2])] = _known_type(type_name)
    return types


#: ONNX `TensorProto.DataType` by ATC's name (page of --output_type).
OUTPUT_TYPES = {
    "FP32": 1,
    "UINT8": 2,
    "INT8": 3,
    "UINT16": 4,
    "INT16": 5,
    "INT32": 6,
    "INT64": 7,
    "FP16": 10,
    "DOUBLE": 11,
    "UINT32": 12,
    "UINT64": 13,
}


def _known_type(name: str) -> str:
    if name not in OUTPUT_TYPES:
        known = ", ".join(OUTPUT_TYPES)
        reason = f"value [{name}] for parameter [--output_type] is not one of: {known}"
        raise AtcError("E10001", reason)
    return name
