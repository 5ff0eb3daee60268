"""The header of a real `.om`: both forms of the table, the attributes, and every kind of damage."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from om_models.om_header import (
    MAX_PARTITIONS,
    OmHeaderError,
    Partition,
    describe,
    origin,
    read_om_header,
)
from tests.support.real_om import (
    ATTRIBUTES,
    RealOm,
    attribute,
    bytes_field,
    model_definition,
    varint,
    write_real_om,
)

FORMS = pytest.mark.parametrize("is_wide", [True, False])


def damage(path: Path, contents: bytes) -> str:
    """What the reader says of a damaged file, without its name."""
    path.write_bytes(contents)
    with pytest.raises(OmHeaderError) as caught:
        read_om_header(path)
    start = f"{path} is damaged: "
    assert caught.value.message.startswith(start)
    return caught.value.message.removeprefix(start)


@FORMS
def test_a_whole_file(tmp_path: Path, is_wide: bool) -> None:
    om = RealOm(is_wide=is_wide, name=b"llama", needs_host_check=True, has_dynamic_shape=True)
    header = read_om_header(write_real_om(tmp_path / "m.om", om))
    assert header is not None
    assert not header.is_om2_zip
    assert (header.version, header.model_type, header.name) == (0x10000000, "IR model", "llama")
    assert (header.platform_version, header.num_models) == ("1.1.0.0", 1)
    assert (header.needs_host_check, header.has_dynamic_shape) == (True, True)
    assert header.attributes == ATTRIBUTES
    assert header.soc_version == "Ascend310B4"
    assert header.atc_version == "7.6.0.1.220"
    assert header.atc_command == ATTRIBUTES["atc_cmdline"]
    assert (header.work_bytes, header.weights_bytes) == (4096, 64)


@FORMS
def test_partitions_lie_where_their_contents_are(tmp_path: Path, is_wide: bool) -> None:
    om = RealOm(is_wide=is_wide, partitions=((1, b"weights"), (99, b""), (3, b"kernels")))
    path = write_real_om(tmp_path / "m.om", om)
    header = read_om_header(path)
    assert header is not None
    definition, *rest = header.partitions
    table_bytes = 8 + 4 * 24 if is_wide else 4 + 4 * 12
    size = len(model_definition(ATTRIBUTES))
    assert definition == Partition(0, "model definition", 256 + table_bytes, size)
    raw = path.read_bytes()
    found = {p.name: raw[p.offset : p.offset + p.num_bytes] for p in rest}
    assert found == {
        "weights": b"weights",
        "partition of unknown type 99": b"",
        "TBE kernels": b"kernels",
    }


@pytest.mark.parametrize("contents", [b"", b"IMO", b"RTCSIMOM" + bytes(300), b"#!/bin/sh\n"])
def test_other_files_are_none(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "m.om"
    path.write_bytes(contents)
    assert read_om_header(path) is None


def test_a_zip_is_taken_for_an_om2(tmp_path: Path) -> None:
    path = tmp_path / "m.om"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    header = read_om_header(path)
    assert header is not None
    assert header.is_om2_zip
    (line,) = describe(header)
    assert "a zip archive, as the OM2 models of CANN 9.2 are" in line


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, Path("/dev/zero")):
        with pytest.raises(OmHeaderError, match=f"{path} is not a regular file"):
            read_om_header(path)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_om_header(tmp_path / "none.om")


@pytest.mark.parametrize("size", [4, 255, 256])
def test_a_file_that_ends_in_its_header(tmp_path: Path, size: int) -> None:
    text = damage(tmp_path / "m.om", bytes(RealOm())[:size])
    assert text == f"it ends after {size} bytes, inside or right after its header"


@FORMS
def test_a_file_that_is_cut_short_or_has_a_tail(tmp_path: Path, is_wide: bool) -> None:
    whole = bytes(RealOm(is_wide=is_wide))
    size = len(whole)
    path = tmp_path / "m.om"
    assert damage(path, whole[:-1]) == f"it ends after {size - 1} of {size} bytes"
    assert damage(path, whole[:257]) == f"it ends after 257 of {size} bytes"
    assert damage(path, whole + b"x") == (f"it has {size + 1} bytes, but should end after {size}")


def test_a_header_of_another_size(tmp_path: Path) -> None:
    text = damage(tmp_path / "m.om", bytes(RealOm(header_bytes=255)))
    assert text == "its header says that it has 255 bytes, not 256"


@FORMS
def test_tables_that_do_not_fit(tmp_path: Path, is_wide: bool) -> None:
    om = RealOm(is_wide=is_wide)

    def with_body(body: bytes) -> bytes:
        return om.header(len(body)) + body

    path = tmp_path / "m.om"
    assert damage(path, with_body(b"abc")) == (
        "its partition table at byte 256 lies outside the file"
    )
    count = om.table([])
    assert damage(path, with_body(count)) == "its partition table at byte 256 has 0 entries"
    many = struct.pack("<I", MAX_PARTITIONS + 1) + bytes(8)
    assert damage(path, with_body(many)) == "its partition table at byte 256 has 4097 entries"
    three = struct.pack("<I", 3) + bytes(20)
    assert damage(path, with_body(three)) == (
        "its partition table of 3 entries goes past the end of the file"
    )


@FORMS
def test_partitions_outside_the_file(tmp_path: Path, is_wide: bool) -> None:
    om = RealOm(is_wide=is_wide)
    body = bytearray(om.table([(0, b""), (1, b"weights")]))
    form, place = ("<Q", 8 + 24 + 16) if is_wide else ("<I", 4 + 12 + 8)
    offset_place = place - struct.calcsize(form)
    path = tmp_path / "m.om"

    def patched(at: int, value: int) -> bytes:
        changed = bytearray(body)
        struct.pack_into(form, changed, at, value)
        return om.header(len(body)) + changed

    assert damage(path, patched(place, 8)) == (
        "its weights of 8 bytes goes past the end of the file"
    )
    largest = 2 ** (8 * struct.calcsize(form)) - 1
    assert f"its weights of {largest} bytes" in damage(path, patched(place, largest))
    start = 256 + len(body) - len(b"weights")
    assert damage(path, patched(offset_place, 1)) == (
        f"its weights at byte {start + 1} lies outside the file"
    )


def test_further_models_are_checked_too(tmp_path: Path) -> None:
    om = RealOm(num_models=2)
    first, second = om.table([(0, model_definition(ATTRIBUTES))]), om.table([(0, b""), (2, b"t")])
    path = tmp_path / "m.om"
    path.write_bytes(om.header(len(first + second)) + first + second)
    header = read_om_header(path)
    assert header is not None
    assert header.num_models == 2
    assert [part.name for part in header.partitions] == ["model definition"]
    assert damage(path, om.header(len(first)) + first) == (
        f"its partition table at byte {256 + len(first)} lies outside the file"
    )
    assert damage(path, bytes(RealOm(num_models=4097))) == "it names 4097 models"


def test_no_models_means_one(tmp_path: Path) -> None:
    header = read_om_header(write_real_om(tmp_path / "m.om", RealOm(num_models=0)))
    assert header is not None
    assert header.num_models == 1


def test_a_bundle_of_models_has_the_wide_table_and_no_definition(tmp_path: Path) -> None:
    om = RealOm(model_type=5, num_models=3)
    body = om.table([(24, b"info"), (25, b"vars")])
    path = tmp_path / "m.om"
    path.write_bytes(om.header(len(body)) + body)
    header = read_om_header(path)
    assert header is not None
    assert (header.model_type, header.num_models) == ("bundle of models", 3)
    assert origin(header) == (
        "compiled for a SoC that its header does not name by an ATC of unknown version"
    )


def test_an_encrypted_file_tells_little(tmp_path: Path) -> None:
    om = RealOm(is_encrypted=True)
    path = tmp_path / "m.om"
    path.write_bytes(om.header(9) + b"encrypted")
    header = read_om_header(path)
    assert header is not None
    assert (header.partitions, header.attributes) == ((), {})
    assert "encrypted: what it was compiled for cannot be read" in describe(header)


def test_the_description(tmp_path: Path) -> None:
    attributes = {**ATTRIBUTES, "host_env_os": "linux", "host_env_cpu": "aarch64"}
    om = RealOm(attributes, name=b"llama", needs_host_check=True, has_dynamic_shape=True)
    header = read_om_header(write_real_om(tmp_path / "m.om", om))
    assert header is not None
    assert describe(header) == [
        "IR model, compiled for Ascend310B4 by ATC 7.6.0.1.220",
        "name: llama",
        "platform: 1.1.0.0",
        "shapes: dynamic",
        "host code: runs only under linux on aarch64",
        "work memory: 4096 bytes",
        f"model definition: {len(model_definition(attributes))} bytes",
        "weights: 64 bytes",
        "task info: 8 bytes",
        f"command: {ATTRIBUTES['atc_cmdline']}",
    ]


def test_attributes_that_are_missing_are_said_to_be(tmp_path: Path) -> None:
    om = RealOm({}, needs_host_check=True, model_type=77)
    header = read_om_header(write_real_om(tmp_path / "m.om", om))
    assert header is not None
    assert header.work_bytes is None
    assert describe(header)[0] == (
        "model of unknown type 77, compiled for a SoC that its header does not name"
        " by an ATC of unknown version"
    )
    assert "host code: runs only under an unnamed system on an unnamed CPU" in describe(header)


def test_attributes_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    a_list = bytes_field(1, bytes_field(2, b"x"))
    a_float = b"\x25" + struct.pack("<f", 1.5)
    definition = b"".join(
        [
            bytes_field(11, bytes_field(1, b"list") + bytes_field(2, a_list)),
            bytes_field(11, bytes_field(1, b"float") + bytes_field(2, a_float)),
            bytes_field(11, bytes_field(1, b"empty")),
            bytes_field(11, bytes_field(1, b"large") + bytes_field(2, bytes(1 << 18))),
            b"\x58\x07",  # number 11, but a varint
            attribute("soc_version", "Ascend910B3"),
            attribute("memory_size", -1),
        ]
    )
    header = read_om_header(write_real_om(tmp_path / "m.om", RealOm(definition=definition)))
    assert header is not None
    assert header.attributes == {"soc_version": "Ascend910B3", "memory_size": -1}


def test_texts_cannot_steer_a_terminal(tmp_path: Path) -> None:
    om = RealOm({"soc_version": "\x1b[2JAscend\n"}, name=b"\xff\x07n\0hidden")
    header = read_om_header(write_real_om(tmp_path / "m.om", om))
    assert header is not None
    assert header.soc_version == "\N{REPLACEMENT CHARACTER}[2JAscend\N{REPLACEMENT CHARACTER}"
    assert header.name == "\N{REPLACEMENT CHARACTER}" * 2 + "n"


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        (b"\x0a\x05abcd", "field 1 at byte 336 goes past the end of its message"),
        (b"\x0a\x80", "the number at byte 337 does not end"),
        (b"\x10" + b"\xff" * 10, "the number at byte 337 does not end"),
        (b"\x10" + b"\xff" * 9 + b"\x02", "the number at byte 337 has more than 64 bits"),
        (b"\x00\x01", "field number 0 at byte 336"),
        (b"\x0b", "unknown wire type 3 at byte 336"),
        (b"\x10\x01" * 100_001, "it has more than 100000 fields"),
        (bytes_field(11, b"\x0a\x05k"), "field 1 at byte 0 goes past the end of its message"),
        (
            b"".join(attribute("a", "x" * 250_000) for _ in range(34)),
            "it has more than 8388608 bytes of attributes",
        ),
    ],
)
def test_a_definition_that_is_no_message(tmp_path: Path, definition: bytes, why: str) -> None:
    text = damage(tmp_path / "m.om", bytes(RealOm(definition=definition)))
    assert text == f"its model definition cannot be read: {why}"


def test_a_message_of_the_most_fields_is_read(tmp_path: Path) -> None:
    definition = b"\x10\x01" * 99_999 + attribute("soc_version", "Ascend310P3")
    header = read_om_header(write_real_om(tmp_path / "m.om", RealOm(definition=definition)))
    assert header is not None
    assert header.soc_version == "Ascend310P3"


def test_neither_weights_nor_graphs_are_read(tmp_path: Path) -> None:
    """A sparse file of 1 TiB, whose definition has a graph of 1 GiB, takes no time."""
    graph_bytes, weights_bytes = 1 << 30, 1 << 40
    tail = attribute("soc_version", "Ascend910B3")
    graph = b"\x3a" + varint(graph_bytes)
    definition_bytes = len(graph) + graph_bytes + len(tail)
    table = struct.pack("<I4x", 2) + struct.pack("<I4xQQ", 0, 0, definition_bytes)
    table += struct.pack("<I4xQQ", 1, definition_bytes, weights_bytes)
    total = len(table) + definition_bytes + weights_bytes
    path = tmp_path / "m.om"
    with path.open("wb") as file:
        file.write(RealOm().header(total) + table + graph)
        file.seek(graph_bytes, os.SEEK_CUR)
        file.write(tail)
        try:
            file.truncate(256 + total)
        except OSError:
            pytest.skip("this file system takes no such file")
    header = read_om_header(path)
    assert header is not None
    assert (header.soc_version, header.weights_bytes) == ("Ascend910B3", weights_bytes)


def test_any_change_is_read_or_refused(tmp_path: Path) -> None:
    """Hostile files: never another exception, whatever a few bytes are changed to."""
    seed = 20261130
    chance = random.Random(seed)
    wholes = [bytes(RealOm(is_wide=wide)) for wide in (True, False)]
    path = tmp_path / "m.om"
    outcomes = {"read": 0, "damaged": 0}
    for _ in range(1500):
        changed = bytearray(chance.choice(wholes))
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(4, len(changed))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        path.write_bytes(
            changed[: chance.randint(4, len(changed))] if chance.random() < 0.1 else changed
        )
        try:
            header = read_om_header(path)
        except OmHeaderError:
            outcomes["damaged"] += 1
        else:
            assert header is not None
            assert describe(header)
            outcomes["read"] += 1
    assert min(outcomes.values()) > 100, (seed, outcomes)
