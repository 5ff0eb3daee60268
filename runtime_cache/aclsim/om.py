"""The software device's `.om` file: header, graph without weights, weights aligned to pages.

    magic 8 B | version u32 | header length u32 | SHA-256 of the header 32 B
    header (JSON, UTF-8) | graph (ONNX protobuf) | padding | weights

Weights stay in the file: the graph refers to them as ONNX external data, relative to the start of
the weights section, so that ONNX Runtime maps them. The format has nothing in common with the `.om`
of a real SoC (`IMOD`, or a zip from CANN 9.2 on), which is refused by name.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.mapping import round_up

MAGIC = b"RTCSIMOM"
FORMAT_VERSION = 1
WEIGHT_ALIGN_BYTES = 4096
_PREFIX = struct.Struct("<8sII32s")
_MAX_HEADER_BYTES = 64 << 20
_REAL_MAGICS = (b"IMOD", b"PK\x03\x04")


class TensorInfo(msgspec.Struct, frozen=True):
    """One model input or output.

    Attributes:
        name: as in the ONNX graph.
        onnx_type: `TensorProto.DataType` number.
        dims: sizes; -1 where gears decide.
    """

    name: str
    onnx_type: int
    dims: list[int]

    def size_bytes(self, dims: list[int]) -> int:
        """Bytes of the tensor at the given concrete dims."""
        count = codes.ACL_DTYPES[self.onnx_type][1]
        for dim in dims:
            count *= dim
        return count


class Gear(msgspec.Struct, frozen=True):
    """One compiled shape.

    Attributes:
        values: what stands for each -1, in input order.
        inputs, outputs: full dims of every input and output.
    """

    values: list[int]
    inputs: list[list[int]]
    outputs: list[list[int]]

    @property
    def flat_dims(self) -> list[int]:
        """All dims of all inputs, as `set_input_dynamic_dims` takes them."""
        return [dim for dims in self.inputs for dim in dims]


class Section(msgspec.Struct, frozen=True):
    """A part of the file."""

    length: int
    sha256: str


class OmHeader(msgspec.Struct, frozen=True):
    """All that is known of a compiled model without its graph.

    Attributes:
        gears: one entry for a static model, whose `values` are empty.
        workspace_bytes: work memory charged at load; an estimate.
        atc_command: the command line that made the file.
        versions: of the tools that made it.
    """

    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    gears: list[Gear]
    soc_version: str
    atc_command: str
    versions: dict[str, str]
    workspace_bytes: int
    graph: Section
    weights: Section

    @property
    def has_gears(self) -> bool:
        """Whether the model has a gear selector input."""
        return bool(self.gears[0].values)

    @property
    def largest_gear(self) -> int:
        """Index of the gear with the most input elements: what runs without a selection."""
        totals = [sum(_product(dims) for dims in gear.inputs) for gear in self.gears]
        return totals.index(max(totals))


@dataclass(frozen=True, slots=True)
class OmFile:
    """A checked `.om`.

    Attributes:
        path: absolute.
        graph: the ONNX model, external data relative to the weights section.
        weights_offset: where that section starts.
    """

    path: Path
    header: OmHeader
    graph: bytes
    weights_offset: int


def read_om(path: str) -> OmFile:
    """Opens and checks a file; the weights are only measured, not read.

    Raises:
        AclFailure: 145002 if it cannot be opened; 545001 if it was made for a real SoC, is
            foreign, or its header or graph is damaged; 145006 if it is truncated.
    """
    absolute = Path(path).absolute()
    try:
        with absolute.open("rb") as file:
            return _read(file, absolute)
    except OSError as error:
        raise AclFailure(codes.GE_MODEL_PATH_INVALID, f"cannot read {path}: {error}") from error


def _read(file: BinaryIO, path: Path) -> OmFile:
    prefix = file.read(_PREFIX.size)
    if prefix.startswith(_REAL_MAGICS):
        raise _refused(
            path, "was compiled by ATC for a real SoC; the software device cannot run it"
        )
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise _refused(path, "is not an .om file of the software device")
    _, version, header_length, digest = _PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        raise _refused(path, f"has format {version}; this device reads {FORMAT_VERSION}")
    if header_length > _MAX_HEADER_BYTES:
        raise _refused(path, f"is damaged: header of {header_length} bytes")
    raw = file.read(header_length)
    if hashlib.sha256(raw).digest() != digest:
        raise _refused(path, "is damaged: the header's checksum differs")
    header = _decode(raw, path)
    graph = file.read(header.graph.length)
    weights_offset = round_up(
        _PREFIX.size + header_length + header.graph.length, WEIGHT_ALIGN_BYTES
    )
    if os.fstat(file.fileno()).st_size != weights_offset + header.weights.length:
        raise AclFailure(codes.GE_MODEL_DATA_SIZE_INVALID, f"{path} is truncated or has a tail")
    if hashlib.sha256(graph).hexdigest() != header.graph.sha256:
        raise _refused(path, "is damaged: the graph's checksum differs")
    return OmFile(path, header, graph, weights_offset)


def _decode(raw: bytes, path: Path) -> OmHeader:
    try:
        return msgspec.json.decode(raw, type=OmHeader)
    except msgspec.DecodeError as error:
        raise _refused(path, f"has an unreadable header: {error}") from error


def _refused(path: Path, why: str) -> AclFailure:
    return AclFailure(codes.GE_LOAD_MODEL, f"{path} {why}")


def write_om(
    path: Path,
    header: OmHeader,
    graph: bytes,
    weights: Iterable[bytes],
    verify: Callable[[Path], None] = lambda path: None,
) -> OmHeader:
    """Writes a file atomically, streaming the weights.

    Args:
        header: complete but for the checksums, which are filled in; section lengths must be right.
        weights: chunks, together as long as `header.weights.length`.
        verify: called with the finished file before it takes its name; may raise to refuse it.

    Returns:
        The header as written.

    Raises:
        OSError: the directory cannot be written; nothing is left behind.
        ValueError: the weights have another length than the header says.
    """
    draft = _with_digests(header, hashlib.sha256(graph).hexdigest(), "0" * 64)
    weights_offset = round_up(
        _PREFIX.size + len(msgspec.json.encode(draft)) + len(graph), WEIGHT_ALIGN_BYTES
    )
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = _write_weights(file, weights_offset, weights, header.weights.length)
            final = _with_digests(draft, draft.graph.sha256, digest)
            _write_front(file, msgspec.json.encode(final), graph)
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        verify(Path(temporary))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return final


def _with_digests(header: OmHeader, graph: str, weights: str) -> OmHeader:
    return msgspec.structs.replace(
        header,
        graph=Section(header.graph.length, graph),
        weights=Section(header.weights.length, weights),
    )


def _write_weights(file: BinaryIO, offset: int, chunks: Iterable[bytes], length: int) -> str:
    """Writes the weights section and returns its SHA-256."""
    digest = hashlib.sha256()
    file.seek(offset)
    for chunk in chunks:
        digest.update(chunk)
        file.write(chunk)
    if file.tell() != offset + length:
        raise ValueError(f"weights are {file.tell() - offset} bytes, not {length}")
    if length == 0:
        file.truncate(offset)
    return digest.hexdigest()


def _write_front(file: BinaryIO, header: bytes, graph: bytes) -> None:
    file.seek(0)
    file.write(_PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), hashlib.sha256(header).digest()))
    file.write(header)
    file.write(graph)


def _product(dims: list[int]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product
