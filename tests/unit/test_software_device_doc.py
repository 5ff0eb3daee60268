"""`docs/software_device.md`: the tests it names exist; settings and options are the real ones."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

import pytest

from runtime_cache.aclsim import codes, run, settings
from runtime_cache.aclsim.fault_script import _FIELDS
from runtime_cache.aclsim.ledger import Kind
from tests.unit.test_proofs_doc import TESTS, names_of

TEXT = (TESTS.parent / "docs" / "software_device.md").read_text("utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")[1:]}
NAMED = sorted(set(re.findall(r"`([^`]+\.py)(?:::([^`]+))?`", SECTIONS["Documented behaviours"])))


def first_cells(section: str) -> list[str]:
    """What is in backticks in the first cells of a section's tables."""
    rows = re.findall(r"^\| (`[^|]*) \|", SECTIONS[section].replace("\\|", "/"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_it_names_exists(path: str, name: str) -> None:
    names = names_of(path)
    assert not name or name in names


def test_every_behaviour_has_a_test() -> None:
    rows = re.findall(r"^\| (.*) \|$", SECTIONS["Documented behaviours"], re.MULTILINE)[1:]
    assert len(rows) == 28
    assert all(".py" in row.split(" | ")[1] for row in rows)


def test_every_setting_is_there() -> None:
    assert sorted(first_cells("Settings")) == sorted(f.name for f in fields(settings.SimSettings))


def test_every_option_of_run_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--help"])
    options = set(re.findall(r"^  (-m|--[a-z]+)", capsys.readouterr().out, re.MULTILINE))
    assert {cell.split()[0] for cell in first_cells("Running a program")} == options


def test_every_kind_of_misuse_is_there() -> None:
    assert sorted(first_cells("The report of misuse")) == sorted(get_args(Kind))


def test_every_field_of_a_fault_is_there() -> None:
    assert set(first_cells("Faults")) == _FIELDS | {"seed"}


def test_the_sticky_codes_are_there() -> None:
    line = next(line for line in SECTIONS["Faults"].splitlines() if line.startswith("The codes"))
    assert {int(code) for code in re.findall(r"507\d\d\d", line)} == codes.STICKY
