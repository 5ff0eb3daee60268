"""The device is chosen by name, and a module that cannot be had is explained."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime_cache.aclsim import settings
from runtime_cache.device.select import load_acl
from runtime_cache.errors import ConfigError


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a module `acl` can be put; no other one is found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "acl", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "acl.py"
    sys.modules.pop("acl", None)


@pytest.mark.parametrize(
    "name", ["", "sim", "npu", "sim:", "npu:x", "sim:-1", "cpu:0", "SIM:0", "sim:0 ", "npu:01"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"it is sim:N or npu:N"):
        load_acl(name)


def test_the_software_device_by_name() -> None:
    acl, device_id = load_acl("sim:3")
    assert getattr(acl, "__name__", None) == "runtime_cache.aclsim"
    assert device_id == 3


def test_settings_reach_the_software_device() -> None:
    load_acl("sim:0", {"memory_bytes": 1 << 30, "soc_name": "Ascend310B4"})
    assert settings.current().memory_bytes == 1 << 30
    assert settings.current().soc_name == "Ascend310B4"
    load_acl("sim:0")
    assert settings.current() == settings.SimSettings()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"memory": 1}, "memory"), ({"memory_bytes": 1}, "memory_bytes"), ({"run_mode": 2}, "2")],
)
def test_wrong_settings_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"settings of the software device: .*{message}"):
        load_acl("sim:0", options)


def test_settings_of_the_software_device_do_not_suit_a_card() -> None:
    with pytest.raises(ConfigError, match="'npu:0' is no software device"):
        load_acl("npu:0", {"run_mode": 1})


def test_without_onnx_runtime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'runtime-cache\[sim\]'"):
        load_acl("sim:0")


def test_the_vendors_module_by_name(vendor: Path) -> None:
    vendor.write_text("class rt:\n    malloc = 1\ninit = 1\n")
    acl, device_id = load_acl("npu:7")
    assert getattr(acl, "__file__", None) == str(vendor)
    assert device_id == 7


def test_no_vendors_module(vendor: Path) -> None:
    if importlib.util.find_spec("acl") is not None:
        pytest.skip("pyACL is installed here")
    with pytest.raises(ConfigError, match=r"PYTHONPATH does not lead to it.*set_env\.sh"):
        load_acl("npu:0")


@pytest.mark.parametrize("source", ["", "init = 1\n", "class rt:\n    malloc = 1\n", "rt = 1\n"])
def test_another_package_called_acl(vendor: Path, source: str) -> None:
    vendor.write_text(source)
    with pytest.raises(ConfigError, match="is not pyACL: uninstall that package") as caught:
        load_acl("npu:0")
    assert str(vendor) in caught.value.message


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("libascendcl.so: cannot open shared object file: No such file", "LD_LIBRARY_PATH"),
        ("libascend_hal.so: cannot open shared object file: No such file", "driver"),
        ("/opt/acl.so: undefined symbol: aclrtFoo", "different releases"),
        ("something new", "something new"),
    ],
)
def test_a_module_that_cannot_be_loaded(vendor: Path, text: str, advice: str) -> None:
    vendor.write_text(f"raise ImportError({text!r})\n")
    with pytest.raises(ConfigError, match="pyACL cannot be imported") as caught:
        load_acl("npu:0")
    assert text in caught.value.message
    assert advice in caught.value.message
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_package_that_is_not_even_of_this_python(vendor: Path) -> None:
    vendor.write_text("print 'Python 2'\n")
    with pytest.raises(ConfigError, match=r"ends with SyntaxError: .*; pyACL does not: another"):
        load_acl("npu:0")


def test_a_missing_dependency_of_the_module_is_not_taken_for_the_module(vendor: Path) -> None:
    vendor.write_text("import no_such_dependency_of_acl\n")
    with pytest.raises(ConfigError, match="No module named 'no_such_dependency_of_acl'"):
        load_acl("npu:0")
