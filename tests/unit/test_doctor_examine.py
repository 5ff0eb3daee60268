"""A whole examination: what is looked at on which host, and what one check tells the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from om_models.bundle import TOKENIZER_NAME, seal
from runtime_cache.errors import ConfigError
from tests.support.ascend_host import SMI_310B4, SMI_910B4, SMI_A3, HostMaker, said
from tests.support.real_om import RealOm, write_real_om
from tests.unit.test_doctor_bundle import made
from tools.doctor.examine import Examined, Request, examine
from tools.doctor.findings import Finding
from tools.doctor.host import Host, Ran

CHECKS = {
    *("python", "numpy", "sim", "npu", "cann", "driver", "versions", "acl", "nodes", "groups"),
    *("container", "npu-smi", "health", "device", "config", "bundle", "target", "om", "soc"),
    *("memory", "socket", "directory", "logs"),
}


@pytest.fixture
def maker(tmp_path: Path) -> HostMaker:
    return HostMaker(tmp_path / "host")


def make_bundle(directory: Path, soc: str = "Ascend910B4", target: str = "ascend") -> Path:
    directory.mkdir()
    write_real_om(directory / "model.om", RealOm({"soc_version": soc}))
    (directory / TOKENIZER_NAME).write_text("{}")
    seal(directory, made(soc_version=soc, target=target))
    return directory


def by_check(found: Examined) -> dict[str, Finding]:
    """The findings by their check; the last of a name."""
    return {finding.check: finding for finding in found.findings}


def statuses(found: Examined) -> set[str]:
    return {finding.status for finding in found.findings}


def test_a_host_in_order(maker: HostMaker, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    config = tmp_path / "rtcached.toml"
    (maker.root / "run/rtcached").mkdir(parents=True)
    config.write_text(f'[model]\nbundle = "{bundle}"\n[device]\ndevice = "npu:0"\n')
    found = examine(maker.host(), Request(config=str(config)))
    assert found.device == "npu:0"
    assert [finding.check for finding in found.findings] == [
        *("python", "numpy", "npu", "cann", "driver", "versions", "acl", "nodes", "groups"),
        *("container", "npu-smi", "device", "config", "bundle", "target", "om", "soc", "memory"),
        *("socket", "socket", "directory", "logs"),
    ]
    assert statuses(found) == {"ok", "skipped"}
    assert set(by_check(found)) == CHECKS - {"sim", "health"}
    assert by_check(found)["memory"].text.startswith("30.00 GiB of 32.00 GiB are free (pyACL)")
    assert ", staging " in by_check(found)["memory"].text
    assert by_check(found)["soc"].text == "Bundle and device are both Ascend910B4."


def test_the_document_names_every_check() -> None:
    text = (Path(__file__).parents[2] / "docs/doctor.md").read_text("utf-8")
    named = {name for name in CHECKS if f"| `{name}` |" in text}
    assert named == CHECKS


def test_without_pyacl_npu_smi_says_what_there_is(maker: HostMaker, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    maker.answers.importing = Ran(None, "", "")
    found = by_check(examine(maker.host(), Request(device="npu:1", bundle=bundle)))
    assert found["device"].text == "The device was not used: pyACL cannot be imported."
    assert found["soc"].text == "Bundle and device are both Ascend910B4."
    assert found["memory"].text.startswith("3.33 GiB of 32.00 GiB are free (npu-smi)")


@pytest.mark.parametrize(
    ("request_", "node", "why"),
    [
        (Request(device="npu:0", may_probe=False), "", "--no-probe"),
        (Request(device="npu:0"), "/dev/devmm_svm", "its nodes are not in order"),
    ],
)
def test_when_the_device_is_left_alone(
    maker: HostMaker, request_: Request, node: str, why: str
) -> None:
    if node:
        maker.remove(node)
    found = by_check(examine(maker.host(), request_))
    assert found["device"].status == "skipped"
    assert why in found["device"].text
    assert all(command[-1] != "0" for command in maker.answers.commands)


def test_a_bundle_for_another_soc(maker: HostMaker, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", "Ascend310P3")
    found = by_check(examine(maker.host(), Request(device="npu:0", bundle=bundle)))
    assert found["soc"].status == "problem"
    assert "compiled for Ascend310P3, but the device is Ascend910B4" in found["soc"].text


def test_a_die_whose_name_says_too_little(maker: HostMaker, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", "Ascend910_9391")
    maker.answers.smi = Ran(0, SMI_A3, "")
    maker.answers.probe = said(soc="Ascend910_9391")
    asked = Request(device="npu:0", bundle=bundle)
    assert by_check(examine(maker.host(), asked))["soc"].status == "ok"
    found = by_check(examine(maker.host(), replace(asked, may_probe=False)))
    assert found["soc"].status == "skipped"
    assert "npu-smi calls it Ascend910, which names more than one" in found["soc"].text


def test_visible_devices_choose_the_row_of_npu_smi(maker: HostMaker, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    asked = Request(device="npu:0", bundle=bundle, may_probe=False)
    maker.answers.smi = Ran(0, SMI_910B4, "")
    first = by_check(examine(maker.host(), asked))["memory"].text
    maker.env["ASCEND_RT_VISIBLE_DEVICES"] = "1"
    second = by_check(examine(maker.host(), asked))["memory"].text
    assert first.startswith("29.23 GiB of 32.00 GiB")
    assert second.startswith("3.33 GiB of 32.00 GiB")


def test_a_boards_container(maker: HostMaker) -> None:
    maker.add("/.dockerenv")
    maker.answers.smi = Ran(0, SMI_310B4, "")
    found = by_check(examine(maker.host(), Request(device="npu:0")))
    assert "/etc/hdcBasic.cfg" in found["container"].text


def test_a_bundle_for_a_board_makes_no_board_of_a_card(maker: HostMaker, tmp_path: Path) -> None:
    maker.add("/.dockerenv")
    bundle = make_bundle(tmp_path / "bundle", "Ascend310B4")
    asked = Request(device="npu:0", bundle=bundle)
    assert "hdcBasic" not in by_check(examine(maker.host(), asked))["container"].text
    maker.answers.smi = Ran(1, "", "")
    assert "hdcBasic" in by_check(examine(maker.host(), asked))["container"].text


def bare(tmp_path: Path, maker: HostMaker) -> Host:
    """A host that never saw an NPU; its Python finds no `acl`."""
    maker.answers.importing = said(
        pip={}, error="No module named 'acl'", kind="ModuleNotFoundError", missing="acl"
    )
    (tmp_path / "bare/home").mkdir(parents=True)
    env = {"HOME": "/home", "PATH": "/usr/bin"}
    return Host(root=tmp_path / "bare", env=env, cwd="/home", runner=maker.answers)


def test_a_host_without_an_npu(maker: HostMaker, tmp_path: Path) -> None:
    found = examine(bare(tmp_path, maker), Request())
    assert found.device == "npu:0"
    assert statuses(found) == {"ok", "skipped"}
    assert [f.check for f in found.findings] == [
        *("python", "numpy", "npu", "config", "bundle", "socket", "directory")
    ]
    about = by_check(found)["npu"]
    assert about.status == "skipped"
    assert about.text.startswith("There is no sign of an Ascend NPU")
    assert about.text.endswith("--device sim:0")


def test_a_host_without_an_npu_that_should_have_one(maker: HostMaker, tmp_path: Path) -> None:
    found = examine(bare(tmp_path, maker), Request(device="npu:0"))
    about = by_check(found)["npu"]
    assert about.status == "problem"
    assert "Install driver and CANN, or choose the software device" in about.remedy


def test_a_stranger_is_named_without_an_npu_too(maker: HostMaker, tmp_path: Path) -> None:
    host = bare(tmp_path, maker)
    maker.answers.importing = said(pip={"acl": "0.2"}, file="/v/acl.py", is_pyacl=False)
    assert by_check(examine(host, Request()))["acl"].remedy == "Run: pip uninstall acl"


def test_the_software_device(maker: HostMaker, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", target="sim")
    for asked in (Request(device="sim:0", bundle=bundle), Request(bundle=bundle)):
        found = examine(maker.host(), asked)
        assert found.device == "sim:0"
        assert statuses(found) == {"ok", "skipped"}
        assert [f.check for f in found.findings] == [
            *("python", "numpy", "sim", "config", "bundle", "target", "om", "socket", "directory")
        ]
    assert "It needs no card" in by_check(found)["sim"].text
    assert maker.answers.commands == []


def test_a_configuration_that_is_wrong(maker: HostMaker, tmp_path: Path) -> None:
    config = tmp_path / "rtcached.toml"
    config.write_text("[cache]\nblock_sise = 1\n")
    found = by_check(examine(maker.host(), Request(config=str(config))))
    assert found["config"].status == "problem"
    assert "did you mean cache.block_size?" in found["config"].text
    assert f"rtcached --config {config} --check-config" in found["config"].remedy
    assert found["socket"].status == "skipped"


def test_each_fault_of_a_configuration_is_a_finding(maker: HostMaker, tmp_path: Path) -> None:
    config = tmp_path / "rtcached.toml"
    config.write_text("foo = 1\n[cache]\nblock_sise = 1\n")
    found = examine(maker.host(), Request(config=str(config))).findings
    first, second = (f.text for f in found if f.check == "config")
    assert first.startswith(f"{config}: unknown section [foo]; known: model,")
    assert second == f"{config}: unknown key cache.block_sise; did you mean cache.block_size?"


def test_a_configuration_without_a_name_is_none(maker: HostMaker) -> None:
    """As the daemon has it: `--config ""`."""
    found = by_check(examine(maker.host(), Request(config="")))
    assert (found["config"].status, found["socket"].status) == ("skipped", "skipped")


def test_mounts_that_a_working_device_lacks_are_no_problem(maker: HostMaker) -> None:
    maker.add("/.dockerenv")
    found = by_check(examine(maker.host(), Request()))
    assert (found["device"].status, found["container"].status) == ("ok", "warning")
    assert "The device works without them" in found["container"].text
    found = by_check(examine(maker.host(), Request(may_probe=False)))
    assert found["container"].status == "problem"


def test_a_device_that_is_no_name(maker: HostMaker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'gpu' is unknown"):
        examine(maker.host(), Request(device="gpu"))
    maker.env["RTCACHE_DEVICE_DEVICE"] = "gpu"
    found = by_check(examine(maker.host(), Request()))
    assert found["config"].status == "problem"
    assert found["config"].text.startswith("Device 'gpu' is unknown")
