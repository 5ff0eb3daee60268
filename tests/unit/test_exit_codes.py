"""The exit codes of `rtcached` are the same in its help and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime_cache import daemon
from runtime_cache.errors import (
    AclError,
    DeviceError,
    DeviceHung,
    DeviceLost,
    InternalError,
    RuntimeCacheError,
)

CODES = {value for name, value in vars(daemon).items() if name.startswith("EXIT_")}
FAULTS = Path(__file__).parents[2] / "docs" / "faults.md"
CALL = ("acl.mdl.execute_async", 507015, "ACL_ERROR_RT_AICORE_EXCEPTION")


def test_every_code_has_one_meaning() -> None:
    assert set(range(7)) == CODES


def test_help_names_every_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        daemon.main(["--help"])
    text = capsys.readouterr().out.partition("exit codes:")[2]
    assert {int(code) for code in re.findall(r"(?:^|  )\s*(\d) [a-z]", text, re.M)} == CODES


def test_the_documentation_names_every_code() -> None:
    table = FAULTS.read_text("utf-8").partition("## Exit codes")[2].partition("## ")[0]
    rows = re.findall(r"^\| (\d[\d, ]*) \|", table, re.M)
    assert {code for row in rows for code in map(int, row.split(","))} == CODES | {130, 143}


@pytest.mark.parametrize(
    ("fatal", "code"),
    [
        (InternalError("a bug"), daemon.EXIT_BROKEN),
        (DeviceError("the device"), daemon.EXIT_LOST),
        (AclError(*CALL), daemon.EXIT_LOST),
        (DeviceLost(*CALL), daemon.EXIT_LOST),
        (DeviceHung(*CALL), daemon.EXIT_HUNG),
    ],
)
def test_what_ends_the_service_decides_the_code(fatal: RuntimeCacheError, code: int) -> None:
    assert daemon._code_of(fatal) == code
