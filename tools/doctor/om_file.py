"""`rtcache-doctor om FILE`: what an `.om` is, whatever it was made for.

The software device's own format is read here by its header alone, so that no device is loaded to
look at a file (format: the docstring of `runtime_cache/aclsim/om.py`).
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from om_models.memory_plan import size
from om_models.om_header import OmFileHeader, describe, read_om_header
from runtime_cache.errors import BundleError

_SIM_MAGIC = b"RTCSIMOM"
_SIM_PREFIX = struct.Struct("<8sII32s")
_MAX_HEADER_BYTES = 64 << 20


class _Section(msgspec.Struct):
    length: int


class _SimHeader(msgspec.Struct):
    """The fields that are told; others are passed over."""

    soc_version: str
    atc_command: str
    gears: list[Any]
    weights: _Section
    versions: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class OmReport:
    """What was found.

    Attributes:
        kind: `ascend`, `om2` (a zip archive) or `sim`.
        lines: for people.
        facts: for programs.
    """

    kind: str
    lines: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


def read_om_file(path: Path) -> OmReport:
    """What the file is.

    Raises:
        BundleError: it is no `.om`, or a damaged one; the sentence says why.
        OSError: it cannot be opened or read.
    """
    header = read_om_header(path)
    if header is not None:
        return _real(header)
    with path.open("rb") as file:
        prefix = file.read(_SIM_PREFIX.size)
        if not prefix.startswith(_SIM_MAGIC):
            raise BundleError(f"{path} is no .om: it starts with {_shown(prefix[:8])}")
        return _software(_read_software(path, file, prefix))


def _real(header: OmFileHeader) -> OmReport:
    if header.is_om2_zip:
        return OmReport("om2", describe(header))
    facts = {
        "soc_version": header.soc_version,
        "atc_version": header.atc_version,
        "atc_command": header.atc_command,
        "model_type": header.model_type,
        "name": header.name,
        "platform_version": header.platform_version,
        "num_models": header.num_models,
        "is_encrypted": header.is_encrypted,
        "has_dynamic_shape": header.has_dynamic_shape,
        "needs_host_check": header.needs_host_check,
        "host_os": header.host_os,
        "host_cpu": header.host_cpu,
        "partitions": [part._asdict() for part in header.partitions],
        "attributes": header.attributes,
    }
    return OmReport("ascend", describe(header), facts)


def _read_software(path: Path, file: BinaryIO, prefix: bytes) -> _SimHeader:
    if len(prefix) < _SIM_PREFIX.size:
        raise BundleError(f"{path} is damaged: it ends inside its first {_SIM_PREFIX.size} bytes")
    _, _, length, digest = _SIM_PREFIX.unpack(prefix)
    file_bytes = os.fstat(file.fileno()).st_size
    if length > min(_MAX_HEADER_BYTES, file_bytes - _SIM_PREFIX.size):
        raise BundleError(f"{path} is damaged: a header of {length} bytes does not fit into it")
    raw = file.read(length)
    if hashlib.sha256(raw).digest() != digest:
        raise BundleError(f"{path} is damaged: the header's checksum differs")
    try:
        return msgspec.json.decode(raw, type=_SimHeader)
    except msgspec.DecodeError as error:
        raise BundleError(f"{path} is damaged: unreadable header: {error}") from error


def _software(header: _SimHeader) -> OmReport:
    gears = len(header.gears)
    lines = [
        f"made for the software device, standing for {header.soc_version}; no card runs it",
        _shapes(gears),
        f"weights: {size(header.weights.length)}",
        *(f"{name}: {version}" for name, version in header.versions.items()),
        f"command: {header.atc_command}",
    ]
    facts = {
        "soc_version": header.soc_version,
        "atc_command": header.atc_command,
        "num_gears": gears,
        "has_dynamic_shape": gears == 0,
        "weights_bytes": header.weights.length,
        "versions": header.versions,
    }
    return OmReport("sim", lines, facts)


def _shapes(num_gears: int) -> str:
    """A model without gears has ranges, a static one has one that chooses nothing."""
    if num_gears == 0:
        return "dynamic shape: each run decides, within ranges"
    return f"gears: {num_gears}" if num_gears > 1 else "gears: none, a static model"


def _shown(start: bytes) -> str:
    return repr(start) if start else "nothing, as it is empty"
