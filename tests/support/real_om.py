"""Makes files with the header, table and attributes of a real `.om`, by the published layout.

There is no such file of a real ATC at hand; this writer and the reader share its sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from om_models.om_header import COUNT, ENTRY, HEADER, HEADER_BYTES, WIDE_COUNT, WIDE_ENTRY

ATTRIBUTES: dict[str, str | int] = {
    "soc_version": "Ascend310B4",
    "atc_version": "7.6.0.1.220",
    "atc_cmdline": "atc --framework=5 --model=m.onnx --soc_version=Ascend310B4",
    "memory_size": 4096,
}


def varint(value: int) -> bytes:
    """A protobuf varint of an unsigned number, or of an `int64`."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def bytes_field(number: int, contents: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(contents)) + contents


def attribute(key: str, value: str | int) -> bytes:
    """One entry of a ModelDef's attributes."""
    plain = bytes_field(2, value.encode()) if isinstance(value, str) else b"\x18" + varint(value)
    return bytes_field(11, bytes_field(1, key.encode()) + bytes_field(2, plain))


def model_definition(attributes: Mapping[str, str | int], graph: bytes = b"\x0a\x01g") -> bytes:
    """A ModelDef: a name, a version, one graph (skipped by the reader), the attributes."""
    front = bytes_field(1, b"model") + b"\x10\x01" + bytes_field(7, graph)
    return front + b"".join(attribute(key, value) for key, value in attributes.items())


@dataclass(frozen=True)
class RealOm:
    """What a file is to contain; `bytes(…)` of it is the file.

    Attributes:
        is_wide: 64-bit lengths, as newer releases write them.
        partitions: (type, contents) beside the model definition, which comes first.
        header_bytes, length, num_models: what the header says, if not the truth.
    """

    attributes: Mapping[str, str | int] = field(default_factory=lambda: dict(ATTRIBUTES))
    is_wide: bool = True
    partitions: Sequence[tuple[int, bytes]] = ((1, b"w" * 64), (2, b"t" * 8))
    definition: bytes | None = None
    name: bytes = b""
    platform_version: bytes = b"1.1.0.0"
    model_type: int = 0
    is_encrypted: bool = False
    needs_host_check: bool = False
    has_dynamic_shape: bool = False
    num_models: int = 1
    header_bytes: int = HEADER_BYTES
    length: int | None = None

    def __bytes__(self) -> bytes:
        definition = self.definition
        if definition is None:
            definition = model_definition(self.attributes)
        body = self.table([(0, definition), *self.partitions])
        return self.header(len(body) if self.length is None else self.length) + body

    def table(self, partitions: Sequence[tuple[int, bytes]]) -> bytes:
        """A partition table and what it names."""
        count, entry = (WIDE_COUNT, WIDE_ENTRY) if self.is_wide else (COUNT, ENTRY)
        raw, offset = count.pack(len(partitions)), 0
        for number, contents in partitions:
            raw += entry.pack(number, offset, len(contents))
            offset += len(contents)
        return raw + b"".join(contents for _, contents in partitions)

    def header(self, length: int) -> bytes:
        """The first 256 bytes."""
        return HEADER.pack(
            *(b"IMOD", self.header_bytes, 0x10000000, b"", 0 if self.is_wide else length),
            *(self.is_encrypted, 1, self.model_type, 0, self.name, 0, b"", 0, self.num_models),
            *(self.platform_version, 0, length if self.is_wide else 0),
            *(self.needs_host_check, self.has_dynamic_shape, b""),
        )


def write_real_om(path: Path, om: RealOm | None = None) -> Path:
    """Writes the file and returns its path."""
    path.write_bytes(bytes(om or RealOm()))
    return path
