"""What an `.om` is made of: `--mode=1` (as JSON), `--mode=6` and `--display_model_info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import onnx
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from om_models.om_header import OmHeaderError, describe, read_om_header
from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.atc.graph import read_model
from runtime_cache.aclsim.external_data import all_initializers, refer_to
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.om import OmFile, OmHeader, read_om

_FRAMEWORK_ONNX = 5
_MIN_SHOWN_BYTES = 1024


def show(path: Path) -> list[str]:
    """The lines of `--mode=6`.

    Raises:
        AtcError: E10014 for a file that is not there or no `.om`.
    """
    real = _real_lines(path)
    return real if real is not None else info_lines(_read(path))


def info_lines(om: OmFile) -> list[str]:
    """What an `.om` of the software device takes and what it was made from."""
    header = om.header
    version = header.versions.get("runtime-cache", "unknown")
    return [
        "============ Display Model Info start ============",
        f"Original Atc command line: atc {header.atc_command}",
        f"system   info: atc_version[software device, runtime-cache {version}], "
        f"soc_version[{header.soc_version}], framework_type[{_FRAMEWORK_ONNX}].",
        f"resource info: memory_size[{header.workspace_bytes} B], "
        f"weight_size[{header.weights.length + header.external_bytes} B].",
        f"om       info: modeldef_size[{header.graph.length} B], "
        f"weight_data_size[{header.weights.length} B], "
        f"external_weight_size[{header.external_bytes} B].",
        f"shapes   info: {_shapes(header)}.",
        f"rules    info: {_rules(header)}.",
        "============ Display Model Info end   ============",
    ]


def _shapes(header: OmHeader) -> str:
    if header.has_ranges:
        return f"dynamic, host code for {header.host}"
    if header.has_gears:
        return f"{len(header.gears)} gears of {header.gear_kind}"
    return "static"


def _rules(header: OmHeader) -> str:
    if header.has_atc_rules:
        return "the rules of ATC's ONNX parser are kept"
    return "the rules of ATC's ONNX parser are broken (--no-atc-rules): the real ATC refuses it"


def _real_lines(path: Path) -> list[str] | None:
    """What the header of a real `.om` tells, or None if it is none."""
    try:
        header = read_om_header(path)
    except OSError as error:
        raise AtcError("E10014", f"cannot read [{path}]: {error}") from error
    except OmHeaderError as error:
        raise AtcError("E10014", str(error)) from error
    if header is None:
        return None
    return [
        f"{path} is the .om of a real SoC; only its header is read here:",
        *(f"  {line}" for line in describe(header)),
    ]


def write_json(source: Path, target: Path) -> None:
    """`--mode=1`: an `.om` of the software device, or an ONNX model, as JSON without weights.

    Raises:
        AtcError: E10014 for a file that cannot be read, E10001 for the `.om` of a real SoC and for
            a target that cannot be written.
    """
    if _is_real(source):
        reason = f"[{source}] is the .om of a real SoC: its JSON takes the atc of CANN"
        raise AtcError("E10001", f"--om: {reason}")
    content = _onnx_content(source) if source.suffix == ".onnx" else _om_content(_read(source))
    try:
        target.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise AtcError("E10001", f"--json: cannot write [{target}]: {error}") from error


def _is_real(path: Path) -> bool:
    return _real_lines(path) is not None


def _om_content(om: OmFile) -> dict[str, Any]:
    try:
        model = onnx.load_model_from_string(om.graph)
    except DecodeError as error:
        raise AtcError("E10014", f"[{om.label}] is damaged: {error}") from error
    return {"om": msgspec.to_builtins(om.header), "model": _graph_dict(model)}


def _onnx_content(path: Path) -> dict[str, Any]:
    return {"model": _graph_dict(read_model(path))}


def _graph_dict(model: onnx.ModelProto) -> dict[str, Any]:
    for tensor in all_initializers(model.graph):
        size = len(tensor.raw_data)
        if size >= _MIN_SHOWN_BYTES:
            refer_to(tensor, "left out", 0, size)
    found: dict[str, Any] = MessageToDict(model, preserving_proto_field_name=True)
    return found


def _read(path: Path) -> OmFile:
    try:
        return read_om(str(path))
    except AclFailure as failure:
        raise AtcError("E10014", failure.sentence) from failure
