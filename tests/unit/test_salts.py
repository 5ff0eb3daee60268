"""Salts: drawn once, kept for good, and never a reason not to serve."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from runtime_cache.ids import TenantName
from runtime_cache.salts import load_salts, state_directory
from tests.support.process_state import open_below

ALICE, BOB = TenantName("alice"), TenantName("bob")


def test_salts_are_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = load_salts(str(state), [ALICE])
    second = load_salts(str(state), [ALICE, BOB])
    assert first.faults == second.faults == ()
    assert first.by_tenant[ALICE] == second.by_tenant[ALICE]
    assert len({*second.by_tenant.values()}) == 2
    assert {len(salt) for salt in second.by_tenant.values()} == {32}
    folder = state / "salts"
    assert sorted(path.name for path in folder.iterdir()) == ["alice", "bob"]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (state, folder, folder / "bob")]
    assert modes == [0o700, 0o700, 0o600]


def test_no_file_stays_open(tmp_path: Path) -> None:
    load_salts(str(tmp_path / "state"), [ALICE, BOB])
    assert open_below(tmp_path) == []


def test_without_a_directory_they_are_new_each_time() -> None:
    first, second = (load_salts("", [ALICE]) for _ in range(2))
    assert first.by_tenant != second.by_tenant
    assert first.faults == ()
    assert load_salts("", []).by_tenant == {}


def spoil(path: Path, kind: str) -> None:
    if kind == "short":
        path.write_text("ab" * 31)
    elif kind == "text":
        path.write_text("not a salt\n")
    elif kind == "open":
        path.chmod(0o640)
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif kind == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    elif kind == "foreign":
        os.chown(path, 12345, -1)


KINDS = {
    "short": "is damaged; remove it",
    "text": "is damaged; remove it",
    "open": r"is not the daemon's alone \(mode 0640",
    "fifo": "is damaged",
    "link": "cannot read",
    "directory": "is not the daemon's alone|cannot read|damaged",
    "foreign": r"is not the daemon's alone \(mode 0600, uid 12345",
}


@pytest.mark.parametrize(("kind", "sentence"), KINDS.items())
def test_a_file_that_cannot_be_used_is_left_alone(tmp_path: Path, kind: str, sentence: str) -> None:
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    before = load_salts(str(tmp_path), [ALICE, BOB])
    spoil(tmp_path / "salts" / "alice", kind)
    after = load_salts(str(tmp_path), [ALICE, BOB])
    (fault,) = after.faults
    assert fault.startswith("tenant 'alice' has a salt for this run only: ")
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(fault)
    assert after.by_tenant[ALICE] != before.by_tenant[ALICE]
    assert after.by_tenant[BOB] == before.by_tenant[BOB]
    assert os.path.lexists(tmp_path / "salts" / "alice")


@pytest.mark.parametrize("kind", ["missing parent", "file", "full"])
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    if kind == "missing parent":
        state = tmp_path / "no" / "state"
    elif kind == "file":
        state.write_text("precious")
    else:

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    salts = load_salts(str(state), [ALICE])
    assert len(salts.by_tenant[ALICE]) == 32
    assert "cannot write" in salts.faults[0] or "cannot read" in salts.faults[0]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".new-")]


def test_where_the_state_is() -> None:
    assert state_directory("/a", {"STATE_DIRECTORY": "/b"}) == "/a"
    assert state_directory("", {"STATE_DIRECTORY": "/b:/c"}) == "/b"
    assert state_directory("", {}) == ""
