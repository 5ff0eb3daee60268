"""A staged directory takes its place whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from om_models import staging
from om_models.staging import LOCK_NAME, check_replaceable, staged_directory
from runtime_cache.errors import BundleError

MARKER = "manifest.json"


def write(output: Path, text: str = "old") -> Path:
    with staged_directory(output, MARKER) as directory:
        (directory / MARKER).write_text(text)
    return output


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A finished directory in one of its own, to see what else is written there."""
    return write(tmp_path / "home" / "bundle")


def killed(output: Path, *, is_half_published: bool = False) -> Path:
    """What a run leaves that was killed while it wrote, or between the two renames."""
    left = output.parent / f".{output.name}.abcd_123"
    with suppress(InterruptedError), staged_directory(output, MARKER) as directory:
        shutil.copytree(directory.parent, left)
        raise InterruptedError
    if is_half_published:
        output.rename(left / "old")
    return left


# --- taking the place ---


def test_what_is_written_takes_the_place_of_the_old(output: Path):
    (output / "old.om").touch()
    write(output, "new")
    assert left_in(output) == [MARKER]
    assert (output / MARKER).read_text() == "new"
    assert left_in(output.parent) == ["bundle"]


def test_a_failure_leaves_the_old(output: Path):
    def fail_midway() -> None:
        with staged_directory(output, MARKER) as directory:
            (directory / "model.om").touch()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail_midway()
    assert (left_in(output), left_in(output.parent)) == ([MARKER], ["bundle"])


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_whatever_ends_the_second_rename_gives_the_old_back(
    output: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            assert not output.exists(), "the old one has made room"
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(error):
        write(output, "new")
    assert (output / MARKER).read_text() == "old"
    assert left_in(output.parent) == ["bundle"]


def test_an_empty_directory_may_be_used_and_parents_are_made(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert left_in(write(tmp_path / "empty")) == [MARKER]
    assert left_in(write(tmp_path / "a" / "b" / "c")) == [MARKER]


def fail(output: Path, beside: Path | None = None) -> None:
    """A run that fails while it writes, when another has made a file meanwhile."""

    def run() -> None:
        with staged_directory(output, MARKER):
            if beside is not None:
                beside.touch()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run()


def test_parents_that_were_made_go_again_after_a_failure(tmp_path: Path):
    fail(tmp_path / "a" / "b" / "c")
    assert left_in(tmp_path) == []
    (tmp_path / "a").mkdir()
    fail(tmp_path / "a" / "b" / "c")
    assert left_in(tmp_path / "a") == []


def test_parents_in_which_something_is_by_then_stay(tmp_path: Path):
    fail(tmp_path / "a" / "b" / "c", beside=tmp_path / "a" / "other")
    assert left_in(tmp_path / "a") == ["other"]


def test_parents_that_cannot_all_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop_half_way(self: Path, *, parents: bool, exist_ok: bool) -> None:
        os.mkdir(tmp_path / "a")
        raise PermissionError

    monkeypatch.setattr(Path, "mkdir", stop_half_way)
    with pytest.raises(PermissionError):
        write(tmp_path / "a" / "b" / "c")
    assert left_in(tmp_path) == []


def test_the_mode_is_that_of_any_new_directory(output: Path):
    mask = os.umask(0)
    os.umask(mask)
    assert output.stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_link_stays_a_link(output: Path, tmp_path: Path):
    (tmp_path / "current").symlink_to(output)
    write(tmp_path / "current", "new")
    assert (tmp_path / "current").is_symlink()
    assert (output / MARKER).read_text() == "new"


# --- what is not replaced ---


def test_what_holds_something_else(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(BundleError, match=r"holds no manifest\.json; it is not overwritten"):
        write(tmp_path / "home")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="exists and is not a directory"):
        write(tmp_path / "file")
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    assert left_in(tmp_path) == ["file", "home"]


def test_a_mount_point(output: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BundleError, match="/proc is a mount point"):
        check_replaceable(Path("/proc"), MARKER)
    monkeypatch.setattr(staging.os.path, "ismount", lambda path: path == output)
    with pytest.raises(BundleError, match="is a mount point and cannot be replaced"):
        write(output, "new")
    assert left_in(output.parent) == ["bundle"]


def test_a_read_only_directory(output: Path, monkeypatch: pytest.MonkeyPatch):
    # Root may write everywhere, so the system's answer is played.
    monkeypatch.setattr(staging.os, "access", lambda path, mode: (path, mode) != (output, os.W_OK))
    with pytest.raises(BundleError, match="is read-only; it is not overwritten"):
        write(output, "new")


# --- what killed runs leave ---


def test_leftovers_are_removed_by_the_next_run(output: Path):
    left = killed(output)
    assert left_in(left) == ["new", LOCK_NAME]
    write(output, "new")
    assert left_in(output.parent) == ["bundle"]


def test_a_run_killed_between_the_renames_is_undone_before_anything_else(output: Path):
    killed(output, is_half_published=True)
    assert not output.exists()
    with staged_directory(output, MARKER):
        assert left_in(output) == [MARKER]


def test_a_running_one_is_not_touched(output: Path):
    with staged_directory(output, MARKER) as first:
        (first / MARKER).write_text("first")
        write(output, "second")
        assert left_in(first) == [MARKER]
    assert (output / MARKER).read_text() == "first"
    assert left_in(output.parent) == ["bundle"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".bundle.settings", "notes"),  # eight letters, but nothing of ours inside
        (".bundle.old.abcd_123", LOCK_NAME),  # of the output `bundle.old`
        (".other.abcd_123", LOCK_NAME),
        ("bundle.abcd_123", LOCK_NAME),
    ],
)
def test_what_is_not_a_leftover_of_this_output_stays(output: Path, name: str, content: str):
    (output.parent / name).mkdir()
    (output.parent / name / content).touch()
    write(output, "new")
    assert left_in(output.parent / name) == [content]


def test_without_locks_no_leftovers_are_removed(output: Path, monkeypatch: pytest.MonkeyPatch):
    left = killed(output)

    def no_locks(file: object, operation: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(staging.fcntl, "flock", no_locks)
    write(output, "new")
    assert (output / MARKER).read_text() == "new"
    assert left.is_dir()
