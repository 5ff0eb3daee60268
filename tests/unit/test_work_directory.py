"""What is kept of a conversion, for whom, and when it goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from om_models import work_directory as module
from om_models.staging import LOCK_NAME
from om_models.work_directory import (
    WorkDirectory,
    fingerprint,
    kept_for,
    link_or_copy,
    remove_kept,
    work_directory,
    work_key,
)
from runtime_cache.errors import BundleError

KEY, OTHER = work_key("one"), work_key("another")


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fail(output: Path, key: str = KEY, *, oms: tuple[str, ...] = (), is_kept: bool = True) -> None:
    """A conversion that writes an export and some `.om`, and then fails."""

    def run() -> None:
        with work_directory(output, key, is_kept=is_kept) as work:
            write(work, oms)
            (work.root / "half").mkdir()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run()


def write(work: WorkDirectory, oms: tuple[str, ...]) -> None:
    work.export.mkdir(exist_ok=True)
    (work.export / "export.json").touch()
    work.compiled.mkdir(exist_ok=True)
    for om in oms:
        (work.compiled / om).touch()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "home" / "bundle"


def test_a_success_leaves_nothing(output: Path):
    with work_directory(output, KEY, is_kept=True) as work:
        write(work, ("model.om",))
    assert left_in(output.parent) == []


def test_a_failure_leaves_what_is_whole(output: Path):
    fail(output, oms=("prefill.om",))
    (kept,) = kept_for(output)
    assert kept.contents() == ["the export", "prefill.om"]
    assert left_in(kept.root) == ["compiled", "export", LOCK_NAME]
    assert kept.root.name == f".bundle.work-{KEY}"
    with work_directory(output, KEY, is_kept=True) as work:
        assert work == kept
        assert work.has_export


def test_an_export_that_is_not_whole_does_not_stay(output: Path):
    def run() -> None:
        with work_directory(output, KEY, is_kept=True) as work:
            work.export.mkdir()
            (work.export / "model.onnx").touch()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run()
    assert left_in(output.parents[1]) == []


def test_nothing_is_kept_if_it_is_not_asked_for(output: Path):
    fail(output, oms=("model.om",), is_kept=False)
    assert left_in(output.parents[1]) == []


def test_what_a_killed_run_left_half_written_is_not_taken(output: Path):
    root = output.parent / f".bundle.work-{KEY}"
    (root / "export").mkdir(parents=True)
    (root / "export" / "model.onnx").touch()
    (root / "tmpabc").mkdir()
    (root / LOCK_NAME).touch()
    with work_directory(output, KEY, is_kept=True) as work:
        assert left_in(work.root) == [LOCK_NAME]


def test_dead_runs_of_another_kind_are_swept_and_kept_work_is_not(output: Path):
    fail(output, OTHER)
    dead = output.parent / f".bundle.work-{work_key('dead')}"
    dead.mkdir()
    (dead / LOCK_NAME).touch()
    fail(output, KEY)
    assert left_in(output.parent) == sorted(f".bundle.work-{key}" for key in (KEY, OTHER))


def test_a_success_removes_all_that_is_kept_for_its_output_and_no_other(output: Path):
    fail(output, OTHER)
    other = output.with_name("bundle.old")
    fail(other, OTHER)
    with work_directory(output, KEY, is_kept=True):
        pass
    assert kept_for(output) == []
    assert len(kept_for(other)) == 1


def test_one_run_at_a_time(output: Path):
    with (
        work_directory(output, KEY, is_kept=True) as work,
        pytest.raises(BundleError, match="the same conversion runs already"),
        work_directory(output, KEY, is_kept=True),
    ):
        pass
    assert not work.root.exists()


def test_what_another_run_works_in_stays(output: Path):
    with work_directory(output, OTHER, is_kept=True) as work:
        write(work, ("model.om",))
        remove_kept(output)
        with work_directory(output, KEY, is_kept=True):
            pass
        assert work.contents() == ["the export", "model.om"]


def test_without_locks_it_works_all_the_same(output: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    fail(output)
    assert len(kept_for(output)) == 1


def test_a_source_is_known_by_its_files(tmp_path: Path):
    (tmp_path / "a").write_text("1")
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "b").write_text("2")
    assert fingerprint(str(tmp_path)) != before
    (tmp_path / "b").unlink()
    os.utime(tmp_path / "a", ns=(1, 1))
    assert fingerprint(str(tmp_path)) != before


def test_keys_are_of_values_not_of_their_order_in_a_mapping():
    assert work_key({"a": 1, "b": 2}) == work_key({"b": 2, "a": 1})
    assert work_key("a", "b") != work_key("b", "a")
    assert len(work_key()) == 12


def test_a_file_gets_a_second_place_on_any_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_text("text")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").stat().st_ino == (tmp_path / "a").stat().st_ino

    def cannot(source: Path, target: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(module.os, "link", cannot)
    link_or_copy(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "text"
    assert (tmp_path / "c").stat().st_ino != (tmp_path / "a").stat().st_ino
