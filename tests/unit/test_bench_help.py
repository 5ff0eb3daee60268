"""`rtcache-bench NAME --help` fits a terminal."""

from __future__ import annotations

import pytest

from tools.bench.main import BENCHMARKS, new_parser


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_has_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        new_parser().parse_args([name, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
