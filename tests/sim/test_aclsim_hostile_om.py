"""`.om` files that somebody tampered with: a code and a sentence, no crash, no wait."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim.atc import show
from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.om import FORMAT_VERSION, MAGIC, PREFIX, WEIGHT_ALIGN_BYTES
from tests.support.aclsim import GEARS, STATIC, compile_om, ok

pytestmark = pytest.mark.usefixtures("fresh_device")

BAD_PATH, BAD_MODEL = 145002, 545001
RANGES = ("--input_shape=x:1~4,3;bias:3",)
Header = dict[str, Any]
TOO_BIG = 1 << 63


def tampered(path: Path, change: Callable[[Header], object], graph: bytes | None = None) -> Path:
    """The file with another header, whose checksums are right."""
    content = path.read_bytes()
    length = PREFIX.unpack(content[: PREFIX.size])[2]
    start = PREFIX.size + length
    header = msgspec.json.decode(content[PREFIX.size : start])
    if graph is None:
        graph = content[start : start + header["graph"]["length"]]
    header["graph"] = {"length": len(graph), "sha256": hashlib.sha256(graph).hexdigest()}
    weights = content[len(content) - header["weights"]["length"] :]
    change(header)
    raw = msgspec.json.encode(header)
    prefix = PREFIX.pack(MAGIC, FORMAT_VERSION, len(raw), hashlib.sha256(raw).digest())
    front = prefix + raw + graph
    path.write_bytes(front + bytes(-len(front) % WEIGHT_ALIGN_BYTES) + weights)
    return path


def refused(path: Path, why: str) -> None:
    for load in (acl.mdl.load_from_file, acl.mdl.query_size):
        assert load(str(path))[-1] == BAD_MODEL
        assert why in acl.get_recent_err_msg()


def test_a_header_of_ones_own_with_right_checksums_loads(tmp_path: Path) -> None:
    path = tampered(compile_om(tmp_path), lambda header: None)
    ok(acl.mdl.load_from_file(str(path)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda h: h.update(workspace_bytes=-1), "a size"),
        (lambda h: h.update(workspace_bytes=TOO_BIG), "a size"),
        (lambda h: h["weights"].update(length=-1), "a size"),
        (lambda h: h["graph"].update(length=TOO_BIG), "a size"),
        (lambda h: h.update(external=[{"name": "w", "length": -1}]), "a size"),
        (lambda h: h.update(external=[{"name": "../w", "length": 1}]), "beside"),
        (lambda h: h.update(external=[{"name": "/w", "length": 1}]), "beside"),
        (lambda h: h.update(external=[{"name": "", "length": 1}]), "beside"),
        (lambda h: h["inputs"][0].update(onnx_type=99), "a tensor"),
        (lambda h: h["inputs"][0].update(dims=[-2, 3]), "a tensor"),
        (lambda h: h["outputs"][0].update(dims=[TOO_BIG, 3]), "a tensor"),
        (lambda h: h.update(output_names=["a", "b"]), "names"),
        (lambda h: h["inputs"].pop(), "inputs of a gear"),
        (lambda h: h["gears"][0]["inputs"][0].pop(), "inputs of a gear"),
        (lambda h: h["gears"][0]["inputs"].__setitem__(0, [2, 4]), "inputs of a gear"),
        (lambda h: h["gears"][0]["inputs"].__setitem__(0, [2, -3]), "inputs of a gear"),
        (lambda h: h["gears"][0].update(outputs=[]), "outputs of a gear"),
        (lambda h: h["gears"][0].update(outputs=[[-1, 3]]), "outputs of a gear"),
        (lambda h: h["gears"][0].update(outputs=[[0, TOO_BIG]]), "outputs of a gear"),
        (lambda h: h["gears"].append(h["gears"][0]), "without values"),
        (lambda h: h.update(gears=[]), "ranges"),
        (lambda h: h.update(inputs="many"), "unreadable header"),
    ],
)
def test_headers_that_cannot_be(
    tmp_path: Path, change: Callable[[Header], object], why: str
) -> None:
    refused(tampered(compile_om(tmp_path, STATIC), change), why)


@pytest.mark.parametrize("values", [[0, 1, 1], [-1, 1, 1], [1 << 31, 1, 1], [1, 1]])
def test_gears_that_cannot_be(tmp_path: Path, values: list[int]) -> None:
    def change(header: Header) -> None:
        header["gears"][1]["values"] = values

    refused(tampered(compile_om(tmp_path, GEARS), change), "the values of a gear")


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([[[1, 4], [3, 3]]], "ranges as inputs"),
        ([[[1, 4]], [[3, 3]]], "range of a dim"),
        ([[[4, 1], [3, 3]], [[3, 3]]], "range of a dim"),
        ([[[-1, 4], [3, 3]], [[3, 3]]], "range of a dim"),
        ([[[1, TOO_BIG], [3, 3]], [[3, 3]]], "beyond 63 bits"),
    ],
)
def test_ranges_that_cannot_be(tmp_path: Path, ranges: list[Any], why: str) -> None:
    path = compile_om(tmp_path, RANGES)
    refused(tampered(path, lambda header: header.update(ranges=ranges)), why)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_header_that_names_other_tensors_than_the_graph(tmp_path: Path, side: str) -> None:
    def rename(header: Header) -> None:
        header[side][0]["name"] = "z"

    path = tampered(compile_om(tmp_path), rename)
    assert acl.mdl.load_from_file(str(path)) == (0, BAD_MODEL)
    assert "its header names" in acl.get_recent_err_msg()


@pytest.mark.parametrize("graph", [b"", b"\xff" * 9, b"\x3a\x02\x0a\x00"])
def test_a_graph_that_is_none(
    tmp_path: Path, graph: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tampered(compile_om(tmp_path), lambda header: None, graph)
    capsys.readouterr()
    assert acl.mdl.load_from_file(str(path)) == (0, BAD_MODEL)
    assert "does not load" in acl.get_recent_err_msg()
    assert capsys.readouterr() == ("", "")


def test_the_compiler_shows_no_graph_that_is_none(tmp_path: Path) -> None:
    path = tampered(compile_om(tmp_path), lambda header: None, b"\xff" * 9)
    with pytest.raises(AtcError, match="is damaged") as refused:
        show.write_json(path, tmp_path / "out.json")
    assert refused.value.code == "E10014"
    assert not (tmp_path / "out.json").exists()


def test_a_directory_whose_name_is_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compile_om(tmp_path)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    odd.mkdir()
    model.rename(odd / "model.om")
    monkeypatch.chdir(odd)
    assert acl.mdl.load_from_file("model.om") == (0, BAD_PATH)
    assert "is not UTF-8" in acl.get_recent_err_msg()
    with pytest.raises(AtcError, match="is not UTF-8"):
        compile_om(odd)
    assert sorted(path.name for path in odd.iterdir()) == ["model.om", "model.onnx"]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path in (pipe, loop, tmp_path, Path("/dev/zero")):
        assert acl.mdl.load_from_file(str(path)) == (0, BAD_PATH), path
        assert str(path) in acl.get_recent_err_msg()
    assert acl.mdl.load_from_file("/proc/self/status") == (0, BAD_MODEL)
