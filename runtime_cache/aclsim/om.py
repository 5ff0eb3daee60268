"""The software device's `.om` file: header, graph without weights, weights aligned to pages.

    magic 8 B | version u32 | header length u32 | SHA-256 of the header 32 B
    header (JSON, UTF-8) | graph (ONNX protobuf) | padding | weights

Weights stay where they are: the graph refers to them as ONNX external data, relative to the start
of the weights section, or as files beside the `.om` (`--external_weight`), so that ONNX Runtime
maps them. The format has nothing in common with the `.om` of a real SoC (`IMOD`, or a zip from
CANN 9.2 on), which is refused with what its header tells.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from om_models.om_header import MAGIC as REAL_MAGIC
from om_models.om_header import ZIP_MAGIC, OmHeaderError, origin, read_om_header
from runtime_cache.aclsim import codes
from runtime_cache.aclsim.atc.shapes import GearKind
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.om_check import contradiction

MAGIC = b"RTCSIMOM"
FORMAT_VERSION = 2
#: Version 1 lacks ranges, gear kinds and external weights; what it has means the same.
READABLE_VERSIONS = (1, 2)
WEIGHT_ALIGN_BYTES = 4096
#: As which file the graph refers to the weights section.
SECTION_NAME = "weights"
PREFIX = struct.Struct("<8sII32s")
_MAX_HEADER_BYTES = 64 << 20


class TensorInfo(msgspec.Struct, frozen=True):
    """One model input or output.

    Attributes:
        name: as in the ONNX graph.
        onnx_type: `TensorProto.DataType` number.
        dims: sizes; -1 where gears or the run decide.
    """

    name: str
    onnx_type: int
    dims: list[int]

    @property
    def acl_dtype(self) -> int:
        """Its `aclDataType`."""
        return codes.ACL_DTYPES[self.onnx_type][0]

    def size_bytes(self, dims: list[int]) -> int:
        """Bytes of the tensor at the given concrete dims."""
        count = codes.ACL_DTYPES[self.onnx_type][1]
        for dim in dims:
            count *= dim
        return count


class Gear(msgspec.Struct, frozen=True):
    """One compiled shape.

    Attributes:
        values: what stands for the -1s: for each of them in input order (`dims`), or one number
            for all (`batch`), or height and width (`image`). Empty in a static model.
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


class ExternalFile(msgspec.Struct, frozen=True):
    """Weights in a file of their own.

    Attributes:
        name: relative to the `.om`'s directory.
        length: bytes.
    """

    name: str
    length: int


class OmHeader(msgspec.Struct, frozen=True):
    """All that is known of a compiled model without its graph.

    Attributes:
        gears: one entry for a static model, whose `values` are empty; none for one with ranges.
        workspace_bytes: work memory charged at load; an estimate.
        atc_command: the command line that made the file.
        versions: of the tools that made it.
        gear_kind: what the gears vary; without meaning in other models.
        ranges: (least, most) of each dim of each input of a model with ranges, most -1 if nothing
            bounds it; empty in other models.
        input_format: `--input_format`.
        external: weights beside the file.
        has_atc_rules: whether ATC's parser would take the model; False after `--no-atc-rules`.
        host: system and processor that it needs, such as `linux_x86_64`, or "" for any.
        has_bfloat16: whether a tensor of the graph has that type.
        output_names: what pyACL calls the outputs; empty in older files, which have the graph's.
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
    gear_kind: GearKind = "dims"
    ranges: list[list[tuple[int, int]]] = []
    input_format: str = "ND"
    external: list[ExternalFile] = []
    has_atc_rules: bool = True
    host: str = ""
    has_bfloat16: bool = False
    output_names: list[str] = []

    @property
    def has_gears(self) -> bool:
        """Whether the model has a gear selector input."""
        return bool(self.gears) and bool(self.gears[0].values)

    @property
    def has_ranges(self) -> bool:
        """Whether each run decides the shapes."""
        return not self.gears

    @property
    def largest_gear(self) -> int:
        """Index of the gear with the most input elements: what runs without a selection."""
        totals = [sum(_product(dims) for dims in gear.inputs) for gear in self.gears]
        return totals.index(max(totals))

    @property
    def external_bytes(self) -> int:
        """Bytes of the weights beside the file."""
        return sum(file.length for file in self.external)


@dataclass(frozen=True, slots=True)
class OmFile:
    """A checked `.om`, on disk or in memory.

    Attributes:
        label: how sentences call it.
        graph: the ONNX model, external data relative to the weights section.
        weights_offset: where that section starts.
        path: absolute; None for one in memory.
        image: the whole model in memory, which must stay as long as this object is used; None for
            a file.
        weight_directory: where external weights are looked for; None if nobody said.
    """

    label: str
    header: OmHeader
    graph: bytes
    weights_offset: int
    path: Path | None = None
    image: memoryview | None = None
    weight_directory: Path | None = None


def read_om(path: str) -> OmFile:
    """Opens and checks a file; the weights are only measured, not read.

    Raises:
        AclFailure: 145002 if it cannot be opened; 545001 if it was made for a real SoC, is
            foreign, or its header or graph is damaged or cannot be; 145006 if it is truncated.
    """
    absolute = Path(path).absolute()
    try:
        if absolute.exists() and not absolute.is_file():  # a pipe would be waited for
            raise AclFailure(codes.GE_MODEL_PATH_INVALID, f"cannot read {path}: it is no file")
        with absolute.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # nothing to map
                raise _refused(path, "is not an .om file of the software device: it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with mapped, memoryview(mapped) as view:
                if _is_real(view):
                    raise _refused(path, explain_real(absolute))
                header, graph, offset = _parse(view, path)
    except OSError as error:
        raise AclFailure(codes.GE_MODEL_PATH_INVALID, f"cannot read {path}: {error}") from error
    directory = absolute.parent
    return OmFile(path, header, graph, offset, path=absolute, weight_directory=directory)


def read_om_image(image: memoryview, label: str, weight_directory: Path | None = None) -> OmFile:
    """Checks a model that lies in memory; its weights are neither read nor copied.

    Raises:
        AclFailure: as `read_om`, but for 145002.
    """
    if _is_real(image):
        raise _refused(label, "was compiled for a real SoC" + _NEXT_STEP)
    header, graph, offset = _parse(image, label)
    return OmFile(label, header, graph, offset, image=image, weight_directory=weight_directory)


_NEXT_STEP = (
    "; the software device cannot run it. Compile its ONNX model with"
    " `python -m runtime_cache.aclsim atc`, or convert it again with `rtcache-convert --target sim`"
)


def _is_real(view: memoryview) -> bool:
    return bytes(view[:4]) in (REAL_MAGIC, ZIP_MAGIC)


def explain_real(path: Path) -> str:
    """What a real `.om` was compiled for and what to do, to be read after its path."""
    try:
        header = read_om_header(path)
    except OmHeaderError as error:
        return f"was compiled by ATC for a real SoC and is damaged ({error}){_NEXT_STEP}"
    if header is None:
        return f"was replaced while it was read{_NEXT_STEP}"
    verb = "is" if header.is_om2_zip else "was"
    command = f" ({header.atc_command})" if header.atc_command else ""
    return f"{verb} {origin(header)}{command}{_NEXT_STEP}"


def _parse(view: memoryview, label: str) -> tuple[OmHeader, bytes, int]:
    """Header, graph and the offset of the weights of a whole file."""
    prefix = bytes(view[: PREFIX.size])
    if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC):
        raise _refused(label, "is not an .om file of the software device")
    _, version, header_length, digest = PREFIX.unpack(prefix)
    if version not in READABLE_VERSIONS:
        raise _refused(label, f"has format {version}; this device reads up to {FORMAT_VERSION}")
    if header_length > _MAX_HEADER_BYTES:
        raise _refused(label, f"is damaged: header of {header_length} bytes")
    raw = bytes(view[PREFIX.size : PREFIX.size + header_length])
    if hashlib.sha256(raw).digest() != digest:
        raise _refused(label, "is damaged: the header's checksum differs")
    header = _decode(raw, label)
    graph_offset = PREFIX.size + header_length
    graph_end = graph_offset + header.graph.length
    weights_offset = round_up(graph_end, WEIGHT_ALIGN_BYTES)
    if len(view) != weights_offset + header.weights.length:
        raise AclFailure(codes.GE_MODEL_DATA_SIZE_INVALID, f"{label} is truncated or has a tail")
    graph = bytes(view[graph_offset:graph_end])
    if hashlib.sha256(graph).hexdigest() != header.graph.sha256:
        raise _refused(label, "is damaged: the graph's checksum differs")
    return header, graph, weights_offset


def _decode(raw: bytes, label: str) -> OmHeader:
    try:
        header = msgspec.json.decode(raw, type=OmHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(label, f"has an unreadable header: {error}") from error
    why = contradiction(header)
    if why is not None:
        raise _refused(label, f"has a header that cannot be: {why}")
    return header


def _refused(label: str, why: str) -> AclFailure:
    return AclFailure(codes.GE_LOAD_MODEL, f"{label} {why}")


def _product(dims: list[int]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product
