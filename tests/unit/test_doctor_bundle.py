"""The bundle against the device, and what `rtcache-doctor om` says of a file."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from om_models.bundle import TOKENIZER_NAME, seal
from om_models.manifest import FORMAT, Gear, KvSpec, Manifest, OmFile
from om_models.memory_plan import plan_memory
from runtime_cache.errors import BundleError
from tests.support.real_om import ATTRIBUTES, RealOm, write_real_om
from tests.support.tiny import BASE_SPEC
from tools.doctor import checks_bundle
from tools.doctor.checks_bundle import (
    Memory,
    check_bundle,
    check_memory,
    check_oms,
    check_soc,
    check_target,
)
from tools.doctor.findings import Finding
from tools.doctor.installed import Installed
from tools.doctor.om_file import read_om_file

OM = OmFile(path="model.om", prefill=(Gear(1, 8, 64),), decode=(Gear(1, 1, 64),))
DRAFT = Manifest(
    format=FORMAT,
    name="tiny",
    digest="ab" * 32,
    target="ascend",
    soc_version="Ascend310B4",
    layout="fused",
    dtype="float16",
    index_dtype="int32",
    model=BASE_SPEC,
    kv=KvSpec("float16", num_slots=1 << 20, num_groups=1, layers_per_group=2, row_elements=32),
    oms=(OM,),
    bos_token_id=256,
    eos_token_ids=(257,),
    chat_template=None,
    files={},
    made_by={"runtime-cache": "0"},
)
PLAN = plan_memory(DRAFT, DRAFT.model)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle for a real SoC, by its looks."""
    directory = tmp_path / "bundle"
    directory.mkdir()
    write_real_om(directory / "model.om")
    (directory / TOKENIZER_NAME).write_text("{}")
    seal(directory, DRAFT)
    return directory


def made(**changes: Any) -> Manifest:
    return msgspec.structs.replace(DRAFT, **changes)


def about_om(bundle: Path, toolkit: Installed | None = None) -> Finding:
    (finding,), _ = check_oms(bundle, DRAFT, toolkit, "aarch64")
    return finding


def test_a_whole_bundle(bundle: Path) -> None:
    for has_checksums, how in ((False, "sizes right"), (True, "checksums right")):
        finding, manifest = check_bundle(bundle, has_checksums=has_checksums)
        assert finding.status == "ok"
        assert finding.text.startswith(f"tiny in {bundle}, 2 files, {how}")
        assert manifest is not None


def test_no_bundle(tmp_path: Path) -> None:
    finding, manifest = check_bundle(tmp_path / "none", has_checksums=False)
    assert (finding.status, manifest) == ("problem", None)
    assert "is not a bundle: no such directory" in finding.text
    assert "rtcache-convert" in finding.remedy


def test_a_bundle_of_another_user(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_bundle, "may", lambda path, mode: path.name != "model.om")
    finding, _ = check_bundle(bundle, has_checksums=False)
    assert finding.text == f"This user may not read model.om in {bundle}."
    assert finding.remedy.startswith("Let the daemon's user read it")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    finding, manifest = check_bundle(bundle, has_checksums=False)
    assert manifest is None
    assert finding.text.endswith("cannot read manifest.json: Permission denied.")
    assert finding.remedy.startswith("Let the daemon's user read it")


def test_a_missing_file_and_a_damaged_one(bundle: Path) -> None:
    path = bundle / TOKENIZER_NAME
    path.write_text("[]")
    assert check_bundle(bundle, has_checksums=False)[0].status == "ok"
    finding, manifest = check_bundle(bundle, has_checksums=True)
    assert manifest is not None
    assert f"{path} is damaged: its checksum differs from the manifest's." == finding.text
    path.unlink()
    assert "is missing" in check_bundle(bundle, has_checksums=False)[0].text


@pytest.mark.parametrize(
    ("target", "is_sim", "status"),
    [
        ("ascend", False, "ok"),
        ("sim", True, "ok"),
        ("sim", False, "problem"),
        ("ascend", True, "problem"),
    ],
)
def test_the_target_against_the_device(target: str, is_sim: bool, status: str) -> None:
    finding = check_target(made(target=target), is_sim=is_sim)
    assert finding.status == status
    if status == "problem":
        other = "sim" if is_sim else "ascend"
        assert finding.remedy == f"Convert the model again with --target {other}."


def test_the_soc_against_the_device() -> None:
    assert check_soc(DRAFT, "Ascend310B4", None).text == "Bundle and device are both Ascend310B4."
    finding = check_soc(DRAFT, "Ascend910B3", "910B3")
    assert finding.status == "problem"
    assert "compiled for Ascend310B4, but the device is Ascend910B3" in finding.text
    assert finding.remedy == "Convert the model again with --soc-version Ascend910B3."
    unread = check_soc(DRAFT, None, None)
    assert unread.status == "skipped"
    assert unread.text.endswith("what the device is could not be read.")
    assert (
        "calls it Ascend910, which names more than one" in check_soc(DRAFT, None, "Ascend910").text
    )
    assert check_soc(made(soc_version="Ascend999"), None, None).status == "warning"


def test_models_that_say_what_the_manifest_says(bundle: Path) -> None:
    findings, work_bytes = check_oms(bundle, DRAFT, None, "aarch64")
    assert findings == [Finding("om", "ok", "model.om: Ascend310B4, ATC 7.6.0.1.220.")]
    assert work_bytes == ATTRIBUTES["memory_size"]
    (finding,), work_bytes = check_oms(bundle, made(target="sim"), None, "aarch64")
    assert (finding.status, work_bytes) == ("skipped", None)


@pytest.mark.parametrize("cpu", ["aarch64", "x86_64"])
def test_a_model_with_code_for_another_host(bundle: Path, cpu: str) -> None:
    attributes = {"host_env_os": "linux", "host_env_cpu": cpu}
    write_real_om(bundle / "model.om", RealOm(attributes, needs_host_check=True))
    finding = about_om(bundle)
    assert finding.status == ("ok" if cpu == "aarch64" else "problem")
    if cpu != "aarch64":
        assert finding.text == (
            "model.om carries code for hosts with x86_64, this one has aarch64."
        )
    write_real_om(bundle / "model.om", RealOm(attributes, needs_host_check=False))
    assert about_om(bundle).status == "ok"


def test_work_memory_that_the_models_name(bundle: Path) -> None:
    two = made(oms=(OM, OmFile("second.om", OM.prefill, OM.decode)))
    write_real_om(bundle / "second.om", RealOm({"memory_size": 1000}))
    assert check_oms(bundle, two, None, "aarch64")[1] == 5096
    for attributes in ({}, {"memory_size": 0}, {"memory_size": -1}, {"memory_size": "x"}):
        write_real_om(bundle / "second.om", RealOm(attributes))
        assert check_oms(bundle, two, None, "aarch64")[1] is None
    needed = PLAN.needed_bytes - PLAN.workspace_bytes + 5096
    finding = check_memory(DRAFT, memory(needed), 5096)
    assert finding.status == "ok"
    parts = "KV pool 256 MiB, work memory 5 KiB (as the .om says), staging 11 KiB"
    assert finding.text.endswith(f"{parts}, the system 300 MiB.")
    after = check_memory(DRAFT, replace(memory(needed), is_after_first_use=True), 5096)
    assert after.text.endswith(f"{parts}.")
    assert check_memory(DRAFT, memory(needed - 1), 5096).status == "warning"
    assert check_memory(DRAFT, memory(needed - 5097), 5096).status == "problem"


def test_a_model_for_another_soc(bundle: Path) -> None:
    write_real_om(bundle / "model.om", RealOm({"soc_version": "Ascend910B1"}))
    finding = about_om(bundle)
    assert finding.status == "problem"
    assert finding.text == ("model.om was compiled for Ascend910B1, the manifest says Ascend310B4.")


def test_a_model_that_does_not_say(bundle: Path) -> None:
    write_real_om(bundle / "model.om", RealOm({}))
    finding = about_om(bundle)
    assert finding == Finding(
        "om", "ok", "model.om: a SoC it does not name, ATC of unknown version."
    )


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (bytes(RealOm())[:-1], "is damaged: it ends after"),
        (b"RTCSIMOM" + bytes(400), "is no .om of a real SoC"),
        (None, "No such file or directory"),
    ],
)
def test_a_model_that_is_none(bundle: Path, contents: bytes | None, why: str) -> None:
    (bundle / "model.om").unlink()
    if contents is not None:
        (bundle / "model.om").write_bytes(contents)
    finding = about_om(bundle)
    assert finding.status == "problem"
    assert why in finding.text


@pytest.mark.parametrize(
    ("component", "status"),
    [("7.6.0.1.219", "warning"), ("7.6.0.1.220", "ok"), ("7.6.0.1.221", "ok"), ("", "ok")],
)
def test_a_model_newer_than_cann(bundle: Path, component: str, status: str) -> None:
    finding = about_om(bundle, Installed("/x", "8.0.0", component=component))
    assert finding.status == status
    if status == "warning":
        assert "made by ATC 7.6.0.1.220, and this host's CANN is older (7.6.0.1.219)" in (
            finding.text
        )


def memory(free_bytes: int, *, is_after_first_use: bool = False) -> Memory:
    return Memory(free_bytes, 64 << 30, "npu-smi", is_after_first_use)


@pytest.mark.parametrize(
    ("below", "status"),
    [
        (0, "ok"),
        (1, "warning"),
        (PLAN.workspace_bytes, "warning"),
        (PLAN.workspace_bytes + 1, "problem"),
    ],
)
def test_free_memory_against_the_plan(below: int, status: str) -> None:
    finding = check_memory(DRAFT, memory(PLAN.needed_bytes - below), None)
    assert finding.status == status
    assert "of 64.00 GiB are free (npu-smi); the bundle takes about" in finding.text
    if status != "ok":
        assert "--kv-capacity" in finding.remedy


def test_after_the_first_use_the_systems_share_is_gone() -> None:
    needed = PLAN.needed_bytes - PLAN.system_bytes
    assert check_memory(DRAFT, memory(needed, is_after_first_use=True), None).status == "ok"
    assert (
        check_memory(DRAFT, memory(needed - 1, is_after_first_use=True), None).status == "warning"
    )
    assert check_memory(DRAFT, memory(needed), None).status != "ok"


def test_memory_that_was_not_read() -> None:
    finding = check_memory(DRAFT, None, None)
    assert finding.status == "skipped"
    assert "How much the device has free could not be read" in finding.text


def test_a_plan_that_no_such_device_holds() -> None:
    kv = KvSpec("float16", num_slots=1 << 27, num_groups=1, layers_per_group=2, row_elements=32)
    finding = check_memory(made(kv=kv, soc_version="Ascend310P3"), None, None)
    assert finding.status == "warning"
    assert finding.text.endswith("An Ascend310P3 is known with 24.00 GiB.")


def test_om_of_a_real_soc(tmp_path: Path) -> None:
    report = read_om_file(write_real_om(tmp_path / "m.om"))
    assert report.kind == "ascend"
    assert report.facts["soc_version"] == "Ascend310B4"
    assert report.facts["attributes"] == ATTRIBUTES
    assert report.facts["partitions"][1] == {
        "type": 1,
        "name": "weights",
        "offset": report.facts["partitions"][1]["offset"],
        "num_bytes": 64,
    }
    assert report.lines[0] == "IR model, compiled for Ascend310B4 by ATC 7.6.0.1.220"


def test_om_that_is_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "m.om"
    path.write_bytes(b"PK\x03\x04" + bytes(20))
    assert read_om_file(path).kind == "om2"


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "is no .om: it starts with nothing, as it is empty"),
        (b"#!/bin/sh\n", "is no .om: it starts with b'#!/bin/s'"),
        (b"RTCSIMOM", "is damaged: it ends inside its first 48 bytes"),
        (b"RTCSIMOM\1\0\0\0\xff\xff\xff\x7f" + bytes(32), "a header of 2147483647 bytes does not"),
        (b"RTCSIMOM\1\0\0\0\2\0\0\0" + bytes(32) + b"{}", "the header's checksum differs"),
        (b"IMOD", "is damaged: it ends after 4 bytes"),
    ],
)
def test_om_that_is_none(tmp_path: Path, contents: bytes, why: str) -> None:
    path = tmp_path / "m.om"
    path.write_bytes(contents)
    with pytest.raises(BundleError) as caught:
        read_om_file(path)
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("num_gears", "line", "is_dynamic"),
    [
        (0, "dynamic shape: each run decides, within ranges", True),
        (1, "gears: none, a static model", False),
        (2, "gears: 2", False),
    ],
)
def test_shapes_of_a_model_for_the_software_device(
    tmp_path: Path, num_gears: int, line: str, is_dynamic: bool
) -> None:
    header = {"soc_version": "Ascend310P3", "atc_command": "", "weights": {"length": 0}}
    raw = msgspec.json.encode({**header, "gears": [{}] * num_gears})
    prefix = struct.pack("<8sII32s", b"RTCSIMOM", 1, len(raw), hashlib.sha256(raw).digest())
    (tmp_path / "m.om").write_bytes(prefix + raw)
    report = read_om_file(tmp_path / "m.om")
    assert line in report.lines
    assert report.facts["has_dynamic_shape"] is is_dynamic
