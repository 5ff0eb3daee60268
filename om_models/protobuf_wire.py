"""Protobuf's wire format, read field by field out of a part of a file. Pure.

For files that nobody vouches for: nothing is read but tags and what the caller asks for, every
length is held against the end of the part, and the number of fields is limited. No schema, no
packed fields, no groups (GE's messages have none).

Source: protobuf's encoding page; the field numbers are the caller's business.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10
MAX_FIELDS = 100_000


class WireError(ValueError):
    """What was read is no protobuf message, or one larger than anybody makes."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message.

    Attributes:
        number: as in the schema.
        wire_type: VARINT, FIXED64, BYTES or FIXED32.
        value: of a VARINT, unsigned; 0 otherwise.
        offset: in the file, where the contents of a BYTES or fixed field start.
        num_bytes: of those contents; 0 for a VARINT.
    """

    number: int
    wire_type: int
    value: int
    offset: int
    num_bytes: int


def read_fields(file: BinaryIO, start: int, num_bytes: int) -> Iterator[Field]:
    """The fields of one message, in order; contents are skipped, not read.

    The file may be moved between two fields.

    Raises:
        WireError: the bytes are no message.
    """
    position, end = start, start + num_bytes
    for _ in range(MAX_FIELDS):
        if position == end:
            return
        field, position = _read_field(file, position, end)
        yield field
    if position != end:
        raise WireError(f"it has more than {MAX_FIELDS} fields")


def parse_fields(message: bytes) -> Iterator[tuple[Field, bytes]]:
    """The fields of a message in memory, with the contents of each.

    Raises:
        WireError: the bytes are no message.
    """
    for field in read_fields(io.BytesIO(message), 0, len(message)):
        yield field, message[field.offset : field.offset + field.num_bytes]


def signed(value: int) -> int:
    """An `int64` of the schema from its varint."""
    return value - (1 << 64) if value >> 63 else value


def _read_field(file: BinaryIO, position: int, end: int) -> tuple[Field, int]:
    """The field that starts at `position`, and where the next one starts."""
    tag, offset = _read_varint(file, position, end)
    number, wire_type = tag >> 3, tag & 7
    if number == 0:
        raise WireError(f"field number 0 at byte {position}")
    if wire_type == VARINT:
        value, after = _read_varint(file, offset, end)
        return Field(number, wire_type, value, after, 0), after
    if wire_type == BYTES:
        num_bytes, offset = _read_varint(file, offset, end)
    elif wire_type in _FIXED_BYTES:
        num_bytes = _FIXED_BYTES[wire_type]
    else:
        raise WireError(f"unknown wire type {wire_type} at byte {position}")
    if num_bytes > end - offset:
        raise WireError(f"field {number} at byte {position} goes past the end of its message")
    return Field(number, wire_type, 0, offset, num_bytes), offset + num_bytes


def _read_varint(file: BinaryIO, position: int, end: int) -> tuple[int, int]:
    """A varint of at most 64 bits, and where the next byte is."""
    file.seek(position)
    raw = file.read(min(_MAX_VARINT_BYTES, end - position))
    value = 0
    for index, byte in enumerate(raw):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >> 64:
                raise WireError(f"the number at byte {position} has more than 64 bits")
            return value, position + index + 1
    raise WireError(f"the number at byte {position} does not end")
