"""A directory that is written whole or not at all, whatever ends the process.

Beside the output, while it is being made:

    .NAME.xxxxxxxx/
        rtcache-convert.lock   locked as long as its run lives: shows what a killed run left behind
        new/                   what is being written; takes the output's place at the end
        old/                   what it replaces, from the moment it makes room
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime_cache.errors import BundleError

LOCK_NAME = "rtcache-convert.lock"
_NEW, _OLD = "new", "old"


@contextmanager
def staged_directory(output: Path, marker: str) -> Iterator[Path]:
    """A directory beside `output` that takes its place when the block ends without an error.

    Removes what killed runs for the same output left.

    Args:
        marker: the file by which something that may be replaced is known.

    Raises:
        BundleError: `output` is not to be replaced; it is left as it is.
    """
    output = output.resolve()  # a link stays; what it points at is replaced
    with parents_of(output):
        _remove_leftovers(output)
        check_replaceable(output, marker)
        root = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            with _locked(root):
                (root / _NEW).mkdir()
                yield root / _NEW
                _publish(root, output)
        finally:
            _dismantle(root, output)


@contextmanager
def parents_of(output: Path) -> Iterator[None]:
    """The directories above `output`, made where they are missing.

    After an error those that were made go again, unless something is in them.
    """
    missing = [parent for parent in output.parents if not parent.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


def check_replaceable(output: Path, marker: str) -> None:
    """Refuse to replace anything but a directory with the marker, or an empty one.

    Raises:
        BundleError: `output` holds something else, or cannot be moved.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise BundleError(f"{output} exists and is not a directory")
    if os.path.ismount(output):
        raise BundleError(f"{output} is a mount point and cannot be replaced; name a path inside")
    if any(output.iterdir()) and not (output / marker).is_file():
        raise BundleError(f"{output} exists and holds no {marker}; it is not overwritten")
    if not os.access(output, os.W_OK):
        raise BundleError(f"{output} is read-only; it is not overwritten")


def sync(path: Path) -> None:
    """Bring a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    fresh = root / f"{LOCK_NAME}.new"
    with fresh.open("wb") as lock:
        # Without locks, as on some network file systems, nobody removes anybody's leftovers.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(root / LOCK_NAME)  # never to be seen unlocked
        yield


def _publish(root: Path, output: Path) -> None:
    sync(root / _NEW)
    if output.exists():
        output.rename(root / _OLD)
    (root / _NEW).rename(output)
    sync(output.parent)


def _dismantle(root: Path, output: Path) -> None:
    """Remove a run's directory, after undoing a `_publish` that got half way."""
    if (root / _OLD).exists() and not output.exists():
        with suppress(FileNotFoundError):  # the next run may do the same at the same time
            (root / _OLD).rename(output)
    shutil.rmtree(root, ignore_errors=True)


def _remove_leftovers(output: Path) -> None:
    """Remove the directories of runs that were killed; the lock of one that lives is not had."""
    ours = f".{glob.escape(output.name)}.{'?' * 8}"  # eight letters are what mkdtemp adds
    for path in output.parent.glob(f"{ours}/{LOCK_NAME}"):
        with suppress(OSError), path.open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _dismantle(path.parent, output)
