"""`rtcache-admin keygen`: what it refuses, and the file it names for the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.admin_client import WideClient, run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_daemon_is_told_the_whole_path(here: Path) -> None:
    out = run(WideClient(), "keygen server --server --directory keys").out
    assert out.splitlines()[-1] == f'server_key_file = "{here}/keys/server.key_secret"'


@pytest.mark.parametrize(
    "option", ["--role admin", "--tenant x", "--max-requests 1", "--tokens-per-minute 1"]
)
def test_what_is_a_clients_is_refused_for_the_daemons_key(option: str, here: Path) -> None:
    with pytest.raises(ValueError, match=f"{option.split()[0]} is about a client's key"):
        run(WideClient(), f"keygen server --server {option}")
    assert list(here.iterdir()) == []
    assert option.split()[1] in run(WideClient(), f"keygen client {option}").out
