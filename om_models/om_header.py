"""What the header of a real `.om` tells: for which SoC it was compiled, by what and how.

Reads the file header, the partition table and, of the model definition, its attributes: a few
kilobytes of a file of gigabytes. Runs nothing and needs neither CANN nor protobuf. It does not read
the `.om` of the software device, which is another format (`runtime_cache.aclsim.om`).

Source: hicann/ge @ffdcbc9f, `framework_types_internal.h` and `om_file_helper.cc` (header, table);
Ascend/metadef @6cbc88f2 `proto/ge_ir.proto` (ModelDef: `attr` = 11; AttrDef: `s` = 2, `i` = 3;
netron's reader has the same numbers); names of the attributes from GE's `ge_attr_define` and
`ge_generator.cc`. Never held against a file that a real ATC wrote: none is at hand.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from om_models.protobuf_wire import (
    BYTES,
    VARINT,
    Field,
    WireError,
    parse_fields,
    read_fields,
    signed,
)
from runtime_cache.errors import BundleError

MAGIC = b"IMOD"
ZIP_MAGIC = b"PK\x03\x04"
HEADER_BYTES = 256

#: magic, header size, version, checksum, length (32 bits), encrypted, checked, model type, mode,
#: name, operators, user's text, IR version, models, platform version, platform type, length (64
#: bits), needs a check of OS and CPU, dynamic shape, reserved.
HEADER = struct.Struct("<4sII64sIBBBB32sI32sII20sB3xQBB62s")
COUNT = struct.Struct("<I")
WIDE_COUNT = struct.Struct("<I4x")
ENTRY = struct.Struct("<III")
WIDE_ENTRY = struct.Struct("<I4xQQ")

#: GE refuses more in a flow model, and far fewer elsewhere.
MAX_PARTITIONS = 4096
_MAX_MODELS = 4096
#: A command line with a hundred gears has some ten kilobytes.
_MAX_ATTRIBUTE_BYTES = 1 << 18
#: Of all that are read.
_MAX_ATTRIBUTES_BYTES = 1 << 23

_FLOW, _BUNDLE = 3, 5
MODEL_TYPES = {
    0: "IR model",
    1: "standard model",
    2: "tiny model",
    _FLOW: "flow model",
    4: "lite model",
    _BUNDLE: "bundle of models",
}
MODEL_DEFINITION, WEIGHTS = 0, 1
PARTITION_NAMES = {
    MODEL_DEFINITION: "model definition",
    WEIGHTS: "weights",
    2: "task info",
    3: "TBE kernels",
    4: "custom AI CPU kernels",
    5: "host libraries",
    6: "flow model",
    7: "flow submodel",
    8: "input and output info",
    9: "static task descriptions",
    10: "dynamic task descriptions",
    11: "task parameters",
    12: "tiling data",
    20: "prebuilt model description",
    21: "prebuilt tasks",
    22: "prebuilt kernel arguments",
    23: "prebuilt data",
    24: "bundle info",
    25: "bundle variables",
    26: "custom operators",
}
#: Fields of GE's messages.
_MODEL_ATTR, _ENTRY_KEY, _ENTRY_VALUE, _ATTR_STRING, _ATTR_INT = 11, 1, 2, 2, 3


class OmHeaderError(BundleError):
    """A real `.om` is damaged, or what was named is no regular file. Nothing was loaded."""


class Partition(NamedTuple):
    """One part of the file.

    Attributes:
        type: GE's number.
        name: in words.
        offset: where it starts, from the start of the file [bytes].
        num_bytes: its size.
    """

    type: int
    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OmFileHeader:
    """What a file says of itself. All texts may be empty: nothing makes ATC fill them.

    Attributes:
        is_om2_zip: a zip archive, as an OM2 model (CANN 9.2) is; nothing else of it is read.
        version: of the format.
        model_type: in words.
        platform_version: of the tools, as they wrote it.
        num_models: 1, or more if the file has submodels.
        is_encrypted: neither partitions nor attributes can be read.
        has_dynamic_shape: it takes shapes that are not compiled in.
        needs_host_check: it carries code for one operating system and CPU.
        partitions: of the first model.
        attributes: those of the model definition that are a text or a whole number.
    """

    is_om2_zip: bool = False
    version: int = 0
    model_type: str = ""
    name: str = ""
    platform_version: str = ""
    num_models: int = 1
    is_encrypted: bool = False
    has_dynamic_shape: bool = False
    needs_host_check: bool = False
    partitions: tuple[Partition, ...] = ()
    attributes: dict[str, str | int] = field(default_factory=dict)

    @property
    def soc_version(self) -> str:
        """As `--soc_version` had it; empty if the file does not say."""
        return self._text("soc_version")

    @property
    def atc_version(self) -> str:
        """Of the compiler's package."""
        return self._text("atc_version")

    @property
    def atc_command(self) -> str:
        """The command line it was made with."""
        return self._text("atc_cmdline")

    @property
    def host_os(self) -> str:
        """The operating system its host code is for."""
        return self._text("host_env_os")

    @property
    def host_cpu(self) -> str:
        """The CPU its host code is for."""
        return self._text("host_env_cpu")

    @property
    def weights_bytes(self) -> int:
        """Of the weights inside the file; small or 0 if they lie beside it."""
        return sum(part.num_bytes for part in self.partitions if part.type == WEIGHTS)

    @property
    def work_bytes(self) -> int | None:
        """Device memory for intermediate results, or None if the file does not say."""
        value = self.attributes.get("memory_size")
        return value if isinstance(value, int) else None

    def _text(self, key: str) -> str:
        value = self.attributes.get(key, "")
        return value if isinstance(value, str) else ""


def read_om_header(path: Path) -> OmFileHeader | None:
    """What the header of a file tells, or None if it is no `.om` of a real SoC.

    Raises:
        OmHeaderError: it is one, but damaged (the sentence says where), or no regular file.
        OSError: it cannot be opened or read.
    """
    with _open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        magic = file.read(len(MAGIC))
        if magic == ZIP_MAGIC:
            return OmFileHeader(is_om2_zip=True)
        if magic != MAGIC:
            return None
        try:
            return _read(file, num_bytes)
        except _Damaged as error:
            raise OmHeaderError(f"{path} is damaged: {error}") from error


def origin(header: OmFileHeader) -> str:
    """For whom and by what it was made, to be read after `the file is` or `was`."""
    if header.is_om2_zip:
        return "a zip archive, as the OM2 models of CANN 9.2 are"
    soc = header.soc_version or "a SoC that its header does not name"
    by = f"ATC {header.atc_version}" if header.atc_version else "an ATC of unknown version"
    return f"compiled for {soc} by {by}"


def describe(header: OmFileHeader) -> list[str]:
    """The header in words, one fact a line."""
    if header.is_om2_zip:
        return [f"This is {origin(header)}. What it was made for is not read from it."]
    lines = [f"{header.model_type}, {origin(header)}"]
    lines += _named("name", header.name) + _named("platform", header.platform_version)
    if header.num_models > 1:
        lines.append(f"models: {header.num_models}")
    if header.has_dynamic_shape:
        lines.append("shapes: dynamic")
    if header.needs_host_check:
        host = f"{header.host_os or 'an unnamed system'} on {header.host_cpu or 'an unnamed CPU'}"
        lines.append(f"host code: runs only under {host}")
    if header.work_bytes is not None:
        lines.append(f"work memory: {header.work_bytes} bytes")
    lines += [f"{part.name}: {part.num_bytes} bytes" for part in header.partitions]
    if header.is_encrypted:
        lines.append("encrypted: what it was compiled for cannot be read")
    return lines + _named("command", header.atc_command)


class _Damaged(Exception):
    """What is wrong with the file, to be read after `is damaged:`."""


def _named(name: str, value: str) -> list[str]:
    return [f"{name}: {value}"] if value else []


def _open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading; neither waits for a pipe's writer nor reads a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OmHeaderError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _read(file: BinaryIO, file_bytes: int) -> OmFileHeader:
    """The header of a file that has the magic."""
    if file_bytes <= HEADER_BYTES:
        raise _Damaged(f"it ends after {file_bytes} bytes, inside or right after its header")
    file.seek(0)
    values = HEADER.unpack(_read_exactly(file, HEADER_BYTES))
    (_, header_bytes, version, _, length_32, encrypted, _, kind, _, name, _, _, _) = values[:13]
    num_models, platform, _, length_64, host_check, dynamic, _ = values[13:]
    if header_bytes != HEADER_BYTES:
        raise _Damaged(f"its header says that it has {header_bytes} bytes, not {HEADER_BYTES}")
    _check_length(length_64 or length_32, file_bytes)
    # What these two hold are whole files, each with a header of its own.
    is_container = kind in (_FLOW, _BUNDLE)
    partitions: tuple[Partition, ...] = ()
    if not encrypted:
        num_tables = 1 if is_container else max(num_models, 1)
        is_wide = length_64 != 0 or is_container
        partitions = _read_tables(file, file_bytes, num_tables, is_wide=is_wide)
    return OmFileHeader(
        version=version,
        model_type=MODEL_TYPES.get(kind, f"model of unknown type {kind}"),
        name=_text(name),
        platform_version=_text(platform),
        num_models=max(num_models, 1),
        is_encrypted=encrypted != 0,
        has_dynamic_shape=dynamic != 0,
        needs_host_check=host_check != 0,
        partitions=partitions,
        attributes=_read_attributes(file, partitions),
    )


def _check_length(length_bytes: int, file_bytes: int) -> None:
    """Holds the length in the header against the file's."""
    expected = HEADER_BYTES + length_bytes
    if file_bytes < expected:
        raise _Damaged(f"it ends after {file_bytes} of {expected} bytes")
    if file_bytes > expected:
        raise _Damaged(f"it has {file_bytes} bytes, but should end after {expected}")


def _read_tables(
    file: BinaryIO, file_bytes: int, num_tables: int, *, is_wide: bool
) -> tuple[Partition, ...]:
    """The partitions of the first model; those of further models are only checked."""
    if num_tables > _MAX_MODELS:
        raise _Damaged(f"it names {num_tables} models")
    first, position = _read_table(file, HEADER_BYTES, file_bytes, is_wide=is_wide)
    for _ in range(1, num_tables):
        _, position = _read_table(file, position, file_bytes, is_wide=is_wide)
    return tuple(first)


def _read_table(
    file: BinaryIO, start: int, file_bytes: int, *, is_wide: bool
) -> tuple[list[Partition], int]:
    """One model's partitions, and where what follows them starts."""
    count_form, entry_form = (WIDE_COUNT, WIDE_ENTRY) if is_wide else (COUNT, ENTRY)
    if start + count_form.size > file_bytes:
        raise _Damaged(f"its partition table at byte {start} lies outside the file")
    file.seek(start)
    (count,) = count_form.unpack(_read_exactly(file, count_form.size))
    if not 0 < count <= MAX_PARTITIONS:
        raise _Damaged(f"its partition table at byte {start} has {count} entries")
    position = start + count_form.size + count * entry_form.size
    if position > file_bytes:
        raise _Damaged(f"its partition table of {count} entries goes past the end of the file")
    raw = _read_exactly(file, count * entry_form.size)
    return _place(entry_form.iter_unpack(raw), position, file_bytes)


def _place(
    entries: Iterator[tuple[int, int, int]], data_start: int, file_bytes: int
) -> tuple[list[Partition], int]:
    """Where each partition lies: the runtime reads them end to end, whatever the offsets say."""
    partitions, position = [], data_start
    for number, offset, num_bytes in entries:
        name = PARTITION_NAMES.get(number, f"partition of unknown type {number}")
        if num_bytes > file_bytes - position:
            raise _Damaged(f"its {name} of {num_bytes} bytes goes past the end of the file")
        if data_start + offset + num_bytes > file_bytes:
            raise _Damaged(f"its {name} at byte {data_start + offset} lies outside the file")
        partitions.append(Partition(number, name, position, num_bytes))
        position += num_bytes
    return partitions, position


def _read_attributes(file: BinaryIO, partitions: tuple[Partition, ...]) -> dict[str, str | int]:
    """Texts and whole numbers among the model's attributes; the graphs are skipped."""
    definition = next((p for p in partitions if p.type == MODEL_DEFINITION), None)
    if definition is None:
        return {}
    attributes: dict[str, str | int] = {}
    budget = _MAX_ATTRIBUTES_BYTES
    try:
        for found in read_fields(file, definition.offset, definition.num_bytes):
            if _is_small_attribute(found):
                budget -= found.num_bytes
                if budget < 0:
                    raise WireError(f"it has more than {_MAX_ATTRIBUTES_BYTES} bytes of attributes")
                file.seek(found.offset)
                attributes.update(_entry(_read_exactly(file, found.num_bytes)))
    except WireError as error:
        raise _Damaged(f"its model definition cannot be read: {error}") from error
    return attributes


def _is_small_attribute(found: Field) -> bool:
    return (
        found.number == _MODEL_ATTR
        and found.wire_type == BYTES
        and found.num_bytes <= _MAX_ATTRIBUTE_BYTES
    )


def _entry(message: bytes) -> dict[str, str | int]:
    """A map entry as {name: value}; empty if the value is of another kind."""
    key, value = "", b""
    for found, contents in parse_fields(message):
        if (found.number, found.wire_type) == (_ENTRY_KEY, BYTES):
            key = contents.decode("utf-8", "replace")
        elif (found.number, found.wire_type) == (_ENTRY_VALUE, BYTES):
            value = contents
    plain = _plain_value(value)
    return {} if plain is None else {key: plain}


def _plain_value(message: bytes) -> str | int | None:
    for found, contents in parse_fields(message):
        if (found.number, found.wire_type) == (_ATTR_STRING, BYTES):
            return _printable(contents.decode("utf-8", "replace"))
        if (found.number, found.wire_type) == (_ATTR_INT, VARINT):
            return signed(found.value)
    return None


def _text(raw: bytes) -> str:
    """A text of fixed length, up to its first zero byte."""
    return _printable(raw.partition(b"\0")[0].decode("utf-8", "replace"))


def _printable(text: str) -> str:
    """Without what could steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _read_exactly(file: BinaryIO, num_bytes: int) -> bytes:
    raw = file.read(num_bytes)
    if len(raw) != num_bytes:
        raise _Damaged("it was cut short while it was read")
    return raw
